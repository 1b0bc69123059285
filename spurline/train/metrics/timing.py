"""Where the time of a step goes: its phases and, within a phase, the parts of MoE layers.

Every moment counts toward the innermost part only, so that the parts add up to the step.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from spurline.moe import MoE, Rows
from spurline.parallel.blocks import blocks_of

_REST_OF_STEP = "other"
_REST_OF_PHASE = ""


class StepTimer:
    """Measures the seconds of steps, phases and parts, with two clock reads for each.

        with timer.step():
            with timer.phase("forward"):
                ...
        timer.read()  # {"step_time": .., "data_wait": .., "step_time_parts": {"forward": .., "other": ..}}

    Phases and parts outside `step()`, such as those of a validation, are ignored. On an accelerator the clock is an
    event in its stream: nothing waits for it before `read`.
    """

    def __init__(self, device: torch.device | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock: Callable[[], Any] = clock
        if device is not None and device.type != "cpu":
            self._clock = partial(_record_event, device)
        self._marks: list[tuple[Any, str]] = []  # times, each with the part that begins then
        self._active: list[str] = []  # the phase, then its parts, the innermost last
        self._in_step = False
        self._seconds: dict[str, float] = {}
        self._num_steps = 0
        self._unread: deque[list[tuple[Any, str]]] = deque()  # steps whose events may not have completed yet

    @contextmanager
    def step(self) -> Iterator[None]:
        self._in_step = True
        self._mark()
        try:
            yield
            self._mark()
            self._unread.append(self._marks)
            while self._unread and _has_happened(self._unread[0][-1][0]):
                self._add_up(self._unread.popleft())
        finally:
            self._marks = []
            self._in_step = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Phases do not nest. read() returns the phase `data` as data_wait."""
        if not self._in_step:
            yield
            return
        assert not self._active, f"phase {name} inside phase {self._active[0]}"
        self._active = [name]
        self._mark()
        try:
            yield
        finally:
            self._active = []
            self._mark()

    @property
    def current(self) -> str:
        """The current phase and its innermost part, such as `forward.experts`; can be read from any thread."""
        return ".".join(name for name in self._active if name != _REST_OF_PHASE)

    def enter(self, part: str) -> None:
        if self._active:
            self._active.append(part)
            self._mark()

    def leave(self, part: str) -> None:
        """End the innermost `part`, and any part inside it that was not ended."""
        for place in range(len(self._active) - 1, 0, -1):
            if self._active[place] == part:
                del self._active[place:]
                self._mark()
                return

    def read(self) -> dict[str, Any]:
        """Mean seconds per step since the last call; empty if there was no step. Waits for the device."""
        while self._unread:
            self._add_up(self._unread.popleft())
        num_steps, parts = self._num_steps, self._seconds
        self._num_steps, self._seconds = 0, {}
        if not num_steps:
            return {}
        parts = {name: seconds / num_steps for name, seconds in parts.items()}
        return {"step_time": sum(parts.values()), "data_wait": parts.get("data", 0.0), "step_time_parts": parts}

    def _mark(self) -> None:
        phase, part = (self._active or [_REST_OF_STEP])[0], self._active[-1] if len(self._active) > 1 else ""
        self._marks.append((self._clock(), phase if part == _REST_OF_PHASE else f"{phase}.{part}"))

    def _add_up(self, marks: list[tuple[Any, str]]) -> None:
        for (start, name), (end, _) in pairwise(marks):
            self._seconds[name] = self._seconds.get(name, 0.0) + _seconds_between(start, end)
        self._num_steps += 1


def _record_event(device: torch.device) -> torch.Event:
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def _has_happened(moment: Any) -> bool:
    return isinstance(moment, float) or moment.query()


def _seconds_between(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000


def watch_layers(model: nn.Module, timer: StepTimer) -> None:
    """Time the parts of a model's MoE layers with `timer`, in forward and backward passes.

    `experts` are the routed experts; `exchange` is the rest of the layer except the shared experts: gate, plan,
    dispatch and combine (rows that experts gather themselves count for the experts). Not for compiled models, where the
    hooks would be traced.
    """
    # If everything before a layer is frozen, its input requires no gradient: torch's warning about that is expected.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    for block in blocks_of(model):
        for child in block.children():
            # For others, only the forward: a backward pass may recompute a full block from within its MoE layer.
            _watch_forward(child, "exchange" if isinstance(child, MoE) else _REST_OF_PHASE, timer)
            if isinstance(child, MoE):
                _watch_backward(child, "exchange", timer)
                _watch_forward(child.experts, "experts", timer)
                _watch_backward_of_experts(child.experts, timer)
                if child.shared_experts is not None:
                    _watch_forward(child.shared_experts, _REST_OF_PHASE, timer)
                    _watch_last_of_backward(child.shared_experts, timer)


def _watch_forward(module: nn.Module, part: str, timer: StepTimer) -> None:
    module.register_forward_pre_hook(lambda *_: timer.enter(part))
    # always_call: recomputation leaves a forward with an exception as soon as it has what it needs.
    module.register_forward_hook(lambda *_: timer.leave(part), always_call=True)


def _watch_backward(module: nn.Module, part: str, timer: StepTimer) -> None:
    """Time a module's backward pass, from the gradient of its output to that of its input."""
    module.register_full_backward_pre_hook(lambda *_: timer.enter(part))
    module.register_full_backward_hook(lambda *_: timer.leave(part))


def _watch_backward_of_experts(experts: nn.Module, timer: StepTimer) -> None:
    """The same for experts, which take and return Rows: backward hooks of modules support only tensors."""
    enter, leave = partial(timer.enter, "experts"), partial(timer.leave, "experts")

    def mark_input(module: nn.Module, args: tuple[Rows]) -> tuple[Rows] | None:
        (rows,) = args
        return (rows.through(lambda x: _InBackward.apply(x, leave)),) if torch.is_grad_enabled() else None

    def mark_output(module: nn.Module, args: Any, rows: Rows) -> Rows | None:
        return replace(rows, x=_InBackward.apply(rows.x, enter)) if torch.is_grad_enabled() else None

    experts.register_forward_pre_hook(mark_input)
    experts.register_forward_hook(mark_output)


def _watch_last_of_backward(module: nn.Module, timer: StepTimer) -> None:
    """From this module's backward to the end of its MoE layer's, time counts for the phase: only the gate follows."""

    def mark(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return _InBackward.apply(output, partial(timer.enter, _REST_OF_PHASE)) if torch.is_grad_enabled() else None

    module.register_forward_hook(mark)


class _InBackward(torch.autograd.Function):
    """The identity; calls `notify` in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, notify: Callable[[], None]) -> Tensor:
        ctx.notify = notify
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.notify()
        return grad, None
