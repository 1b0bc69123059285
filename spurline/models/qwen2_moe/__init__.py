"""Qwen2 and Qwen1.5-MoE: biases of queries, keys and values; dense, or with experts and a gated shared one."""
