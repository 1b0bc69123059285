"""Qwen3: grouped-query attention with normalized queries and keys; dense, or with experts in every layer."""
