"""Spurline: PyTorch-native training of mixture-of-experts models.

The names below load torch on first use, so that importing the package and asking the command line for help are instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spurline.version import __version__

if TYPE_CHECKING:
    from spurline.moe import MoE, MoEConfig, Routing
    from spurline.parallel.expert import parallelize_moe

__all__ = ["MoE", "MoEConfig", "Routing", "__version__", "parallelize_moe"]

_HOME = {
    "MoE": "spurline.moe",
    "MoEConfig": "spurline.moe",
    "Routing": "spurline.moe",
    "parallelize_moe": "spurline.parallel.expert",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'spurline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
