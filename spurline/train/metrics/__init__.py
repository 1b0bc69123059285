"""What a run measures and where it writes it."""
