"""Registered ops: each has a fake implementation and a gradient, so that compile and export keep working."""
