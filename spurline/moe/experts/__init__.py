"""Experts: weights, their layout, and a formula; one file a kind."""

from spurline.moe.registry import register_experts_backend as register_experts_backend
