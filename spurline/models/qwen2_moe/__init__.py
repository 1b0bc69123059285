"""Qwen2 and Qwen1.5-MoE: QKV biases; dense, or with experts and a gated shared expert."""
