"""The kernel for CPUs: experts one after the other, on rows that stay in cache."""
