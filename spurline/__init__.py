"""Spurline: PyTorch-native training of mixture-of-experts models.

The names below load torch on first use, so that importing the package and asking the command line for help are instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spurline.moe import MoE, MoEConfig, Routing

__version__ = "0.1.0"
__all__ = ["MoE", "MoEConfig", "Routing", "__version__"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("spurline.moe"), name)
    raise AttributeError(f"module 'spurline' has no attribute {name!r}")
