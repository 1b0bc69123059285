"""Stand-ins for DeepEP and HybridEP on CPU ranks: the same API, shapes, dtypes and row order, over gloo.

`--import spurline.testing.stand_ins.use` substitutes them for libraries that are not installed, so that the adapters
run on CPU ranks. They show that the adapters are correct if the libraries behave as documented, and nothing about
speed. Torch-free until they are used.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_HOMES = {
    "Buffer": "deep_ep_buffer",
    "HybridEPBuffer": "hybrid_ep_buffer",
    "low_latency_widths": "deep_ep_buffer",
    "row_dtypes": "exchange",
}
_MODULES = ("deep_ep", "hybrid_ep_cpp")


class _Lazy(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"the stand-in for {self.__name__} has no {name!r}")
        return getattr(import_module(f"spurline.testing.stand_ins.{_HOMES[name]}"), name)


def install() -> list[str]:
    """Install stand-ins for missing libraries in this process; returns the names of the replaced modules."""
    missing = [name for name in _MODULES if name not in sys.modules and find_spec(name) is None]
    for name in missing:
        module = _Lazy(name)
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
    return missing


@contextmanager
def installed() -> Iterator[None]:
    """`install` within the block."""
    names = install()
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
