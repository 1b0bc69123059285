"""Simulate a real training step as rank 0 of many ranks, without the ranks or the device, and record its cost."""
