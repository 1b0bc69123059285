"""Compile a model block by block, and single functions."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from spurline.parallel.blocks import blocks_of
from spurline.parallel.remat import FullRecomputation

P = ParamSpec("P")
R = TypeVar("R")

# All blocks of a class share their code object, and torch counts graphs by code object: each kind of block (dense,
# MoE) takes one for training, one for validation and one for a changed shape. The default limit of 8 is reached by the
# second model of a process, and is an error under `fullgraph`.
_RECOMPILE_LIMIT = 64


def apply_compile(model: nn.Module, backend: str = "inductor", fullgraph: bool = True) -> None:
    """Compile each block of the model in place, as one graph; calling it again changes nothing."""
    _check_backend(backend)
    for block in blocks_of(model):
        options: dict[str, Any] = {"backend": backend, "fullgraph": fullgraph, "recompile_limit": _RECOMPILE_LIMIT}
        if isinstance(forward := block.__dict__.get("forward"), FullRecomputation):
            forward.compile(**options)
        elif block._compiled_call_impl is None:
            block.compile(**options)


def compile_function(function: Callable[P, R], backend: str = "inductor") -> Callable[P, R]:
    """Compile `function` as one graph."""
    _check_backend(backend)
    return torch.compile(function, backend=backend, fullgraph=True, recompile_limit=_RECOMPILE_LIMIT)  # type: ignore[call-overload]


def _check_backend(backend: str) -> None:
    if backend not in torch.compiler.list_backends(()):
        usual = ", ".join(["aot_eager", "eager", *torch.compiler.list_backends()])
        raise ValueError(f"compile.backend: there is no {backend!r}. Choose from: {usual}")
