"""The CPU kernel: one expert after another, on rows that stay in cache."""
