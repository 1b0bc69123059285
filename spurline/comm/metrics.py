"""Metrics that modules report as device tensors: reduced over ranks in one collective, read in one copy.

A metric takes one method. Any module of a model may have

    def metrics(self) -> dict[str, Metric]:      # of the step just taken
        return {"gate_norm": Metric(self.gate.detach().norm(), "mean")}

    def reset_metrics(self) -> None:             # optional; the trainer calls it before every step
        self.total.zero_()

and its numbers appear in metrics.jsonl, TensorBoard and the report, by the path of the module. All ranks must report
the same metrics. Validation may run before metrics are read, so a module must record values only in training mode.

N numbers in all metrics, M of them reduced by max or min, R ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Reduction = Literal["same", "sum", "mean", "max", "min"]
"""How values are reduced over ranks; `same` is for a value that every rank already has, and is not communicated."""
_ORDER = get_args(Reduction)


@dataclass(frozen=True)
class Metric:
    value: Tensor
    """A scalar or any other tensor, on any device. Integers are exact up to 2**53."""
    reduction: Reduction
    per_layer: bool = True
    """False: reduce over all modules that report it too, to one number for the model."""

    def __post_init__(self) -> None:
        if self.reduction not in _ORDER:
            raise ValueError(f"a metric's reduction must be one of {', '.join(_ORDER)}, got {self.reduction!r}")
        if not self.per_layer and (self.reduction == "same" or self.value.numel() != 1):
            raise ValueError("a metric of the whole model (per_layer=False) must be one number with a reduction")


class Offered(NamedTuple):
    """A metric with its name and the path of the module that reports it."""

    name: str
    layer: str
    metric: Metric


def collect_metrics(model: nn.Module) -> list[Offered]:
    """The metrics of all modules of a model.

    With `metrics_of_parent = True`, a module's metrics are reported under its parent: the router's under the MoE layer.
    """
    found = []
    for path, module in model.named_modules():
        # Looked up on the class, as a submodule may be called `metrics` too.
        if offer := getattr(type(module), "metrics", None):
            layer = path.rpartition(".")[0] if getattr(module, "metrics_of_parent", False) else path
            found += [Offered(name, layer, metric) for name, metric in offer(module).items()]
    return found


def reset_metrics(model: nn.Module) -> None:
    """Reset the metrics of every module before a step."""
    for module in model.modules():
        if reset := getattr(type(module), "reset_metrics", None):
            reset(module)


class ReducedMetrics:
    """Metrics of all ranks in one tensor on the device, until `read` copies it to the host."""

    def __init__(self, offered: list[Offered], packed_N: Tensor) -> None:
        self._offered, self._packed_N = offered, packed_N

    def reductions(self) -> dict[str, Reduction]:
        """The reductions of model-level metrics, by name."""
        return {name: metric.reduction for name, _, metric in self._offered if not metric.per_layer}

    def read(self) -> dict[str, Any]:
        """The metrics in the format of a line of metrics.jsonl.

        A metric is `{name: {layer: value}}`; with a name such as "routing/load" it is `{"routing": {layer: {"load":
        value}}}`; a metric of the root module, or of the model, is `{name: value}`.
        """
        record: dict[str, Any] = {}
        of_model: dict[str, tuple[str, list[float]]] = {}
        numbers = self._packed_N.tolist()
        for name, layer, metric in self._offered:
            size = metric.value.numel()
            own, numbers = numbers[:size], numbers[size:]
            if not metric.value.is_floating_point() and metric.reduction != "mean":
                own = [int(number) for number in own]
            if metric.per_layer:
                _put(record, name, layer, own if metric.value.dim() else own[0])
            else:
                of_model.setdefault(name, (metric.reduction, []))[1].extend(own)
        for name, (reduction, values) in of_model.items():
            _put(record, name, "", _reduce_on_host(reduction, values))
        return record


@torch.no_grad()
def reduce_metrics(offered: Iterable[Offered], group: dist.ProcessGroup | None = None) -> ReducedMetrics:
    """Reduce metrics over the ranks of `group`, in one all-reduce, without reading from the device."""
    ordered = sorted(offered, key=lambda one: _ORDER.index(one.metric.reduction))
    if not ordered:
        return ReducedMetrics([], torch.empty(0))
    dtype = _exact_dtype(ordered[0].metric.value.device)
    packed_N = torch.cat([_plain(one.metric.value).flatten().to(dtype) for one in ordered])
    if group is not None and group.size() > 1:
        numels = [
            sum(one.metric.value.numel() for one in ordered if one.metric.reduction == reduction)
            for reduction in _ORDER
        ]
        packed_N = _all_reduce_packed(packed_N, numels, group)
    return ReducedMetrics(ordered, packed_N)


def join_records(record: dict[str, Any], reductions: dict[str, Reduction], group: dist.ProcessGroup) -> dict[str, Any]:
    """Merge the records of ranks with different modules (pipeline stages), on all of them.

    Model-level metrics are reduced by `reductions`; the others are the same on all ranks that have them.
    """
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, (record, reductions), group=group)
    joined: dict[str, Any] = {}
    for one, _ in gathered:
        _join(joined, one)
    for name, reduction in {name: how for _, known in gathered for name, how in known.items()}.items():
        values = [one[name] for one, known in gathered if name in known]
        joined[name] = _reduce_on_host(reduction, values)
    return joined


def _join(into: dict[str, Any], other: dict[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _join(into[key], value)
        else:
            into.setdefault(key, value)


def _plain(value: Tensor) -> Tensor:
    """The full value, if it was computed from sharded parameters, such as the norm of one."""
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def _exact_dtype(device: torch.device) -> torch.dtype:
    """fp64, in which integers up to 2**53 and sums of fp32 are exact; fp32 on MPS, which has no fp64."""
    return torch.float32 if device.type == "mps" else torch.float64


def _all_reduce_packed(packed_N: Tensor, numels: list[int], group: dist.ProcessGroup) -> Tensor:
    """Reduce a tensor that concatenates the numbers of `same`, `sum`, `mean`, `max` and `min`, in this order."""
    same, sums, means, maxima, minima = packed_N.split(numels)
    # Each rank writes its maxima into its own row, zero on all other ranks: so one all-reduce serves both kinds, and
    # NaN is preserved, which a max of the collective library does not guarantee.
    slots_RM = packed_N.new_zeros(group.size(), maxima.numel() + minima.numel())
    slots_RM[group.rank()] = torch.cat([maxima, -minima])
    message = torch.cat([sums, means, slots_RM.flatten()])
    if message.numel():
        dist.all_reduce(message, group=group)
    sums, means, slots = message.split([sums.numel(), means.numel(), slots_RM.numel()])
    maxima, minima = slots.view_as(slots_RM).amax(0).split([maxima.numel(), minima.numel()])
    return torch.cat([same, sums, means / group.size(), maxima, -minima])


def _reduce_on_host(reduction: str, values: list[float]) -> float:
    if reduction in ("max", "min"):
        return float("nan") if any(value != value for value in values) else (max if reduction == "max" else min)(values)
    return sum(values) if reduction == "sum" else statistics.fmean(values)


def _put(record: dict[str, Any], name: str, layer: str, value: Any) -> None:
    group, _, key = name.partition("/")
    *path, last = [part for part in (group, layer, key) if part]
    for part in path:
        record = record.setdefault(part, {})
        if not isinstance(record, dict):
            raise ValueError(f"metric {name!r}: {part!r} is a number already, of another module")
    if last in record:
        raise ValueError(f"metric {name!r} of {layer or 'the model'} is offered twice: choose another name")
    record[last] = value
