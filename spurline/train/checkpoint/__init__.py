"""Checkpoints: what a run saves, how it is written and checked, and how a run resumes from it."""
