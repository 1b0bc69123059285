"""Qwen3-VL: a Qwen3 text model, dense or with experts, that reads images through a vision encoder."""
