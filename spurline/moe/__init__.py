"""The mixture-of-experts layer: usable in any nn.Module, independent of our models and trainer.

`MoEConfig` is torch-free; everything else loads on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spurline.moe.config import MoEConfig

if TYPE_CHECKING:
    from spurline.moe.balance import set_token_weight, update_expert_bias
    from spurline.moe.experts.experts import Experts
    from spurline.moe.kernels.kernel import Kernel
    from spurline.moe.layer import MoE
    from spurline.moe.registry import (
        register_dispatcher,
        register_experts,
        register_experts_backend,
        register_kernel,
        register_router,
    )
    from spurline.moe.router import Router
    from spurline.moe.routing import Routing
    from spurline.moe.rows import RowCounts, Rows

_HOME = {
    "Experts": "experts.experts",
    "Kernel": "kernels.kernel",
    "MoE": "layer",
    "Router": "router",
    "Routing": "routing",
    "RowCounts": "rows",
    "Rows": "rows",
    "register_dispatcher": "registry",
    "register_experts": "registry",
    "register_experts_backend": "registry",
    "register_kernel": "registry",
    "register_router": "registry",
    "set_token_weight": "balance",
    "update_expert_bias": "balance",
}

__all__ = [
    "Experts",
    "Kernel",
    "MoE",
    "MoEConfig",
    "Router",
    "Routing",
    "RowCounts",
    "Rows",
    "register_dispatcher",
    "register_experts",
    "register_experts_backend",
    "register_kernel",
    "register_router",
    "set_token_weight",
    "update_expert_bias",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"spurline.moe.{_HOME[name]}"), name)
    raise AttributeError(f"module 'spurline.moe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
