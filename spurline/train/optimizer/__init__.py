"""The optimizer: parameter groups, learning-rate schedule, gradient clipping."""
