"""Experts: weights, their layout, and a formula; one file a kind."""
