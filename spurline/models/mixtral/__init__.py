"""Mistral and Mixtral: attention with an optional sliding window; dense, or with experts in every layer."""
