"""Dispatch libraries: which dispatcher needs which, and whether it is installed. Torch-free."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import NamedTuple


class Library(NamedTuple):
    name: str
    module: str
    """Looked up, without importing it, to see whether the library is installed."""
    source: str


LIBRARIES = {
    "deep_ep": Library("DeepEP", "deep_ep", "github.com/deepseek-ai/DeepEP, v1.2.1 or later"),
    "deep_ep_low_latency": Library("DeepEP", "deep_ep", "github.com/deepseek-ai/DeepEP, v1.2.1 or later"),
    "hybrid_ep": Library("HybridEP", "hybrid_ep_cpp", "github.com/deepseek-ai/DeepEP, branch hybrid-ep"),
}


def missing_library(dispatcher: str) -> list[str]:
    """One line if the library that a dispatcher needs is not installed; empty if it is, or needs none."""
    library = LIBRARIES.get(dispatcher)
    if library is None or library.module in sys.modules or find_spec(library.module) is not None:
        return []
    return [
        f"dispatcher {dispatcher!r} needs the library {library.name}, which is not installed here: install it from"
        f" {library.source} (NVIDIA GPUs only), or choose dispatcher 'local' or 'capacity', which need nothing"
    ]


def require_library(dispatcher: str) -> None:
    """Raise a ValueError if the library of this dispatcher is missing."""
    if problems := missing_library(dispatcher):
        raise ValueError(problems[0])
