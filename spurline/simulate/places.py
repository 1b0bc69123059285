"""Locate ops in the source code and in the model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(_HERE))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_NOT_OURS = (_TORCH, _HERE, os.path.dirname(os.path.abspath(os.__file__)), "<")


class Place(NamedTuple):
    module: str
    """The path of the module in the model; empty outside the model."""
    line: str
    """file:line of the innermost frame that belongs neither to torch nor to the simulation."""
    in_fsdp: str = ""
    """The FSDP2 function that ran the op, if any."""


def short_path(path: str) -> str:
    """The path relative to the package's parent or the working directory, if it is inside one of them."""
    for folder in (_PACKAGE, os.getcwd()):
        if path.startswith(folder + os.sep):
            return path[len(folder) + 1 :]
    return path


def calling_line() -> tuple[str, str]:
    """file:line of the code that runs the current op, and the FSDP2 function in between, if any."""
    frame: Any = sys._getframe(1)
    in_fsdp = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_NOT_OURS):
            return f"{short_path(path)}:{frame.f_lineno}", in_fsdp
        if "_fully_shard" in path:
            in_fsdp = in_fsdp or frame.f_code.co_name
        frame = frame.f_back
    return "?", in_fsdp


class ModuleTracker:
    """Tracks which module runs: in forward by module hooks, in backward by gradient hooks."""

    def __init__(self, model: nn.Module) -> None:
        self._path = {module: path for path, module in model.named_modules()}
        self._stack: list[str] = []
        self._backward = ""

    @property
    def current(self) -> str:
        return self._stack[-1] if self._stack else self._backward

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Track the modules of the model within the block."""
        handles = [
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            # always_call: recomputation exits a forward with an exception as soon as it has what it needs.
            nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def at(self, path: str) -> None:
        """Set the path that is reported outside modules."""
        self._backward = path

    def _enter(self, module: nn.Module, args: Any) -> None:
        # The gradient of an input is ready when the module's backward pass is over.
        self._note_gradients(args, self._stack[-1] if self._stack else "")
        self._stack.append(self._path.get(module, ""))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._note_gradients(output, self._path.get(module, ""))

    def _note_gradients(self, values: Any, path: str) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:

                def note(_: Tensor, path: str = path) -> None:
                    self._backward = path

                tensor.register_hook(note)
