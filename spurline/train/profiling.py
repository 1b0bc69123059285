"""Profile a few steps: a Chrome trace, and a table of the most expensive operations of each layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from spurline.moe import MoE
from spurline.parallel.blocks import blocks_of
from spurline.train.setup import is_model_compiled

if TYPE_CHECKING:
    from spurline.train.trainer import Trainer

_MARK = "layer: "
_ENGINE = "autograd::engine::evaluate_function: "
_OUTSIDE = "(outside)"
_OPS_A_LAYER = 8


class Cost(NamedTuple):
    layer: str
    op: str
    milliseconds: float
    """On the host, excluding the operations it calls; device time likewise."""
    device_milliseconds: float
    calls: int


class StepProfiler:
    """Profiles the steps from `first` up to, not including, `last`, and writes to `folder` when the last one is done.

        profiler = StepProfiler(model, folder / "profile", first=3, last=6)
        for step in ...:
            with profiler.step(step):
                ...

    trace.json opens in chrome://tracing and ui.perfetto.dev; ops.txt is the table. Without a model (hooks can't mark
    the parts of compiled blocks) the table does not distinguish layers.
    """

    def __init__(self, model: nn.Module | None, folder: Path, first: int, last: int) -> None:
        assert first < last, "no step to profile"
        self._model, self._folder = model, folder
        self._first, self._last = first, last
        self._profile: profile | None = None
        self._marks: list[Any] = []

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        if self._profile is None and step >= self._first and step < self._last:
            self._start()
        with record_function(f"step {step}"):
            yield
        if self._profile is not None and step >= self._last - 1:
            self.finish()

    def finish(self) -> None:
        """Write what was profiled so far, if anything: for a run that ends before `last`."""
        if self._profile is None:
            return
        self._profile.stop()
        for mark in self._marks:
            mark.remove()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._folder / "trace.json"))
        (self._folder / "ops.txt").write_text(table(costs(self._profile.events())), encoding="utf-8")
        self._profile, self._last = None, self._first

    def _start(self) -> None:
        if self._model is not None:
            self._marks = [hook for name, module in _layers(self._model) for hook in _mark(name, module)]
        activities = [ProfilerActivity.CPU]
        if torch.accelerator.is_available():
            activities += torch.profiler.supported_activities() - set(activities)
        self._profile = profile(activities=activities)
        self._profile.start()


def make_profiler(trainer: Trainer) -> StepProfiler | None:
    """The profiler that the config asks for, on the first rank."""
    config = trainer.config
    if not config.profile.enable or not trainer.world.is_first:
        return None
    model = None if is_model_compiled(config) else trainer.model
    first = config.profile.first_step
    return StepProfiler(model, Path(config.job.dump_folder) / "profile", first, first + config.profile.steps)


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that the table lists: parts of each block, parts of each MoE layer, and modules outside blocks."""
    name_of = {module: name for name, module in model.named_modules()}
    blocks = set(blocks_of(model))
    for module, name in name_of.items():
        parent = model.get_submodule(name.rpartition(".")[0])
        beside_blocks = parent is model and module is not model and not blocks & set(module.modules())
        if parent in blocks or isinstance(parent, MoE) or beside_blocks:
            yield name, module


def _mark(name: str, module: nn.Module) -> list[Any]:
    """Mark in the profile when the module runs."""
    active: list[record_function] = []

    def enter(*_: Any) -> None:
        active.append(record_function(_MARK + name))
        active[-1].__enter__()

    def leave(*_: Any) -> None:
        active.pop().__exit__(None, None, None)

    # always_call: recomputation leaves a forward with an exception as soon as it has what it needs.
    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]


def costs(events: Iterable[Any]) -> list[Cost]:
    """The cost of each operation of each layer, most expensive first; backwards count for their forward's layer."""
    layer_of: dict[int, str] = {}  # by sequence number, which a backward shares with its forward
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
    for event in events:  # in the order in which they began
        layer = _layer_of(event, layer_of)
        is_backward = event.name.startswith(_ENGINE) or event.scope == 1
        if event.sequence_nr >= 0 and not is_backward:
            layer_of[event.sequence_nr] = layer
        op = "(python)" if event.name.startswith(_MARK) else event.name.replace(_ENGINE, "(autograd) ")
        total = sums[layer, op]
        total[0] += event.self_cpu_time_total / 1000
        total[1] += event.self_device_time_total / 1000
        total[2] += event.count
    found = [Cost(layer, op, host, device, int(calls)) for (layer, op), (host, device, calls) in sums.items()]
    return sorted(found, key=lambda cost: cost.milliseconds + cost.device_milliseconds, reverse=True)


def _layer_of(event: Any, layer_of: dict[int, str]) -> str:
    while event is not None:
        if event.name.startswith(_MARK):
            return event.name.removeprefix(_MARK)
        if event.name.startswith("Optimizer."):
            return "optimizer"
        if event.name.startswith(_ENGINE) and event.sequence_nr in layer_of:
            return layer_of[event.sequence_nr]
        event = event.cpu_parent
    return _OUTSIDE


def table(found: list[Cost]) -> str:
    """The layers, most expensive first; then the most expensive operations of each."""
    by_layer: dict[str, list[Cost]] = defaultdict(list)
    for cost in found:
        by_layer[cost.layer].append(cost)
    layers = [
        Cost(layer, "", sum(c.milliseconds for c in ops), sum(c.device_milliseconds for c in ops), len(ops))
        for layer, ops in by_layer.items()
    ]
    layers.sort(key=lambda cost: cost.milliseconds + cost.device_milliseconds, reverse=True)
    most_expensive = [cost for layer in layers for cost in by_layer[layer.layer][:_OPS_A_LAYER]]
    return "\n".join([*_lines(layers, "kinds", layers), "", *_lines(most_expensive, "calls", layers), ""])


def _lines(rows: list[Cost], count: str, layers: list[Cost]) -> Iterator[str]:
    """Lines of the table; shares are of all layers, and the device column appears if the device did anything."""
    width = max([len(layer.layer) for layer in layers] + [len("layer")])
    with_device = any(layer.device_milliseconds for layer in layers)
    total = sum(layer.milliseconds for layer in layers) or 1.0
    device = f"  {'device ms':>10}" if with_device else ""
    yield f"{'layer':{width}}  {'self ms':>10}  {'share':>6}{device}  {count:>8}  operation"
    for row in rows:
        device = f"  {row.device_milliseconds:10.2f}" if with_device else ""
        share = row.milliseconds / total
        yield f"{row.layer:{width}}  {row.milliseconds:10.2f}  {share:6.1%}{device}  {row.calls:8}  {row.op or 'all'}"
