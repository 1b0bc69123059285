"""Compiled graphs of a simulated step: their number, graph breaks, and the source lines of their ops."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
from torch import fx
from torch._dynamo.backends import registry
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from spurline.config import RunConfig
from spurline.simulate.places import short_path

if TYPE_CHECKING:
    from spurline.simulate.recorder import Recorder

BACKEND = "spurline_simulate"
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass
class CompiledGraphs:
    """What was compiled while a step ran."""

    num_graphs: int = 0
    num_breaks: int = 0
    break_reasons: list[str] = field(default_factory=list)
    recorder: Recorder | None = None

    @contextmanager
    def recording(self, config: RunConfig[Any]) -> Iterator[RunConfig[Any]]:
        """The config with a backend that captures graphs as usual, but runs them op by op."""
        if not config.compile.enable:
            yield config
            return
        torch._dynamo.reset()
        counters.clear()
        compiler = self._compile
        backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)

        def count_and_compile(graph: fx.GraphModule, inputs: list[Any]) -> Any:
            self.num_graphs += 1
            return backend(graph, inputs)

        torch._dynamo.register_backend(count_and_compile, name=BACKEND)
        try:
            # The loss runs eagerly: for a cross-entropy on meta tensors, torch (2.13) compiles an empty backward.
            enable = "model" in config.compile.parts
            yield replace(config, compile=replace(config.compile, enable=enable, backend=BACKEND, components="model"))
        finally:
            self.break_reasons = list(counters["graph_break"])
            self.num_breaks = sum(counters["graph_break"].values())
            torch._dynamo.reset()
            # So that the next simulation of this process can register its own; torch has no function for it.
            for names in (registry._BACKENDS, registry._COMPILER_FNS):
                names.pop(BACKEND, None)

    def _compile(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        interpreter = _Interpreter(graph, self)

        def run(*args: Any) -> Any:
            return interpreter.run(*args)

        return run


class _Interpreter(fx.Interpreter):
    """Runs a graph node by node, so that the recorder knows the source line of each."""

    def __init__(self, graph: fx.GraphModule, graphs: CompiledGraphs) -> None:
        super().__init__(graph)
        self.graphs = graphs

    def run_node(self, node: fx.Node) -> Any:
        recorder = self.graphs.recorder
        if recorder is None:
            return super().run_node(node)
        before, recorder.line = recorder.line, lambda: line_of(node)
        try:
            return super().run_node(node)
        finally:
            recorder.line = before


def line_of(node: fx.Node) -> str:
    """file:line of the code that a node was traced from; empty if unknown."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    ours = [frame for frame in frames if "/torch/" not in frame[0]]
    return f"{short_path(ours[-1][0])}:{ours[-1][1]}" if ours else ""
