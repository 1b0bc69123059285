"""Registered ops that every room may use: each has a fake implementation and a gradient, so that tracing works."""
