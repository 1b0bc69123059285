"""GLM-4.5: partial RoPE (half of each head), QKV biases, and experts as in DeepSeek-V3."""
