"""Qwen3-VL: a Qwen3 text model, dense or with experts, that reads pictures through a vision encoder."""
