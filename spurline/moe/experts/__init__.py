"""Experts: weights, their layout, and a formula; one file per kind."""

from spurline.moe.registry import register_experts_backend as register_experts_backend
