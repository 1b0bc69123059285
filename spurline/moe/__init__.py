"""The mixture-of-experts layer: usable alone in anybody's nn.Module, it knows no model and no trainer.

`MoEConfig` is free of torch; everything else loads on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spurline.moe.config import MoEConfig

if TYPE_CHECKING:
    from spurline.moe.balance import update_expert_bias
    from spurline.moe.layer import MoE
    from spurline.moe.registry import register_dispatcher, register_experts_backend, register_router
    from spurline.moe.router import Router, Routing

_HOME = {
    "MoE": "layer",
    "Router": "router",
    "Routing": "router",
    "register_dispatcher": "registry",
    "register_experts_backend": "registry",
    "register_router": "registry",
    "update_expert_bias": "balance",
}

__all__ = [
    "MoE",
    "MoEConfig",
    "Router",
    "Routing",
    "register_dispatcher",
    "register_experts_backend",
    "register_router",
    "update_expert_bias",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"spurline.moe.{_HOME[name]}"), name)
    raise AttributeError(f"module 'spurline.moe' has no attribute {name!r}")
