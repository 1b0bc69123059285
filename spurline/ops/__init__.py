"""Registered ops for the entire package: each has a fake implementation and a gradient, so that tracing works."""
