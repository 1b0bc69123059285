"""Record the cost of every op of a step: kernels, collectives, memory, and where the host waits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from spurline.simulate.collectives import Collective, Groups, describe, is_collective
from spurline.simulate.compiled import CompiledGraphs
from spurline.simulate.memory import BATCH, GATHERED, REDUCED, TEMPORARY, Memory
from spurline.simulate.places import Place, calling_line
from spurline.simulate.timeline import Timeline
from spurline.simulate.values import Values
from spurline.simulate.work import is_kernel, work_of

_aten = torch.ops.aten
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_SIZED_BY_VALUES = {"nonzero", "masked_select", "unique_dim", "_unique2", "bincount", "repeat_interleave", "equal"}
"""Ops for which the host must wait, since the size or value of their result depends on data."""
_INDEXED = {"index", "index_put_", "index_put", "_index_put_impl_"}


@dataclass(frozen=True)
class HostAccess:
    """A copy between host and device."""

    direction: str
    """read (device to host) or write (host to device)."""
    what: str
    blocking: bool
    """Whether the host waits until the device has reached it."""
    place: Place
    phase: str


@dataclass(frozen=True)
class Cast:
    source: str
    target: str
    num_bytes: int
    """Bytes read and written."""
    of_weight: bool
    """Whether it has the shape of a parameter."""
    place: Place
    phase: str


@dataclass(frozen=True)
class Communication:
    """A collective and where in the step it ran."""

    collective: Collective
    place: Place
    phase: str
    micro_batch: int
    """Counted from 1; 0 before the first."""


@dataclass
class Trace:
    """The record of a step."""

    host: list[HostAccess] = field(default_factory=list)
    collectives: list[Communication] = field(default_factory=list)
    casts: list[Cast] = field(default_factory=list)
    launches: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Kernels by (phase, module)."""
    flops: Counter[tuple[str, str]] = field(default_factory=Counter)
    """FLOPs by (phase, kind)."""
    phases: list[tuple[str, int, float]] = field(default_factory=list)
    """The start of each phase: its name, the moment (see Memory) and the time."""
    totals: list[dict[tuple[str, str], float]] = field(default_factory=list)
    """What the step had taken at the start of each phase (`Recorder.totals`)."""


class Recorder(TorchDispatchMode):
    """Runs every op on a device without data, and records it while `recording`.

    `where` returns the module that runs. `experts_of(num_tokens, num_experts, top_k)` returns the experts of tokens
    where a router selects them.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compilation through; the ops of compiled graphs are recorded when they run."""
        return True

    def __init__(
        self,
        device: torch.device,
        timeline: Timeline,
        groups: Groups,
        where: Callable[[], str],
        experts_of: Callable[[int, int, int], Tensor | None],
    ) -> None:
        super().__init__()
        self.device, self.timeline, self.groups = device, timeline, groups
        self.where, self.experts_of = where, experts_of
        self.memory, self.values, self.trace = Memory(device), Values(device), Trace()
        self.phase, self.micro_batch = "step", 0
        self.recording = False
        self.weights: set[tuple[int, ...]] = set()
        self.graphs = CompiledGraphs()
        self.line: Callable[[], str] | None = None
        """Returns the source line of the current node while a compiled graph runs."""
        self._in_flight = WeakIdKeyDictionary()
        self._is_dtensor: dict[Any, bool] = {}

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        before = self.phase
        self.micro_batch += name == "forward"
        self._begin(name)
        try:
            yield
        finally:
            if name == "forward":
                self.memory.keep(name)
            self._begin(before)

    def _begin(self, name: str) -> None:
        self.phase = name
        if self.recording:
            self.trace.phases.append((name, self.memory.moment, self.timeline.compute.tail))
            self.trace.totals.append(self.totals())

    def totals(self) -> dict[tuple[str, str], float]:
        """What the step has taken so far: seconds "busy" and "exposed", "flops", "launches" and "reads", by kind."""
        found: defaultdict[tuple[str, str], float] = defaultdict(float)
        for kind, seconds in self.timeline.busy.items():
            found["busy", kind] = seconds
        for label, seconds in self.timeline.exposed.items():
            found["exposed", label] = seconds
        for (_, kind), number in self.trace.flops.items():
            found["flops", kind] += number
        found["launches", ""] = sum(self.trace.launches.values())
        found["reads", ""] = sum(access.blocking for access in self.trace.host)
        return dict(found)

    def place(self) -> Place:
        line, in_fsdp = calling_line()
        return Place(self.where(), (self.line and self.line()) or line, in_fsdp)

    def waited(self, what: str) -> None:
        """Record that the host waited for an event or a stream."""
        if self.recording:
            self.trace.host.append(HostAccess("read", what, True, self.place(), self.phase))

    def made_of_list(self, tensor: Tensor) -> None:
        """Record torch.tensor(numbers, device=...): created on the host, and copied while the host waits."""
        self._write("tensor made of numbers", blocking=True)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(op, HigherOrderOperator):
            return op(*args, **kwargs)
        if any(self._is_subclass(kind) for kind in types):
            return NotImplemented
        if torch._C._get_dispatch_mode(_FAKE) is not None:  # DTensor's shape propagation, or tracing
            return op(*args, **kwargs)
        self.memory.moment += 1
        name = op.overloadpacket.__name__
        if op is _aten._local_scalar_dense.default and args[0].device == self.device:
            return self._read(args[0], "item()", blocking=True).item()
        if name == "wait_tensor":
            if (end := self._in_flight.pop(args[0], None)) is not None:
                self.timeline.current.wait_event(end)
            return args[0]
        if name in ("_to_copy", "copy_"):
            return self._copy(op, name, args, kwargs)
        on_device = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.device == self.device]
        if on_device and name in _SIZED_BY_VALUES and not _has_size(name, args, kwargs):
            return self._run_by_values(op, name, args, kwargs, on_device)
        if on_device and name in _INDEXED:
            self._check_indices(args[1])
        result = op(*args, **kwargs)
        if name == "stable_topk" and on_device:
            self._choose_experts(args, result)
        self._note(op, name, args, kwargs, on_device, result)
        return result

    def _is_subclass(self, kind: Any) -> bool:
        if kind not in self._is_dtensor:
            self._is_dtensor[kind] = issubclass(kind, DTensor)
        return self._is_dtensor[kind]

    def _note(self, op: Any, name: str, args: Any, kwargs: Any, on_device: list[Tensor], result: Any) -> None:
        if is_collective(op) and on_device:
            self._follow_collective(op, args, result)
        else:
            self.values.follow(op, args, kwargs, result)
        if not self.recording:
            return
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.device == self.device]
        if is_collective(op) and on_device:
            self._note_collective(op, args, result, outputs)
        elif (on_device or outputs) and is_kernel(op):
            work = work_of(op, args, [*on_device, *outputs])
            self.trace.launches[self.phase, self.where()] += 1
            if work.flops:
                self.trace.flops[self.phase, work.kind] += work.flops
            self.timeline.kernel(work.flops, work.num_bytes, work.is_fp32, work.kind)
        if not op.is_view:
            self.allocated(outputs, name)

    def allocated(self, tensors: Sequence[Tensor], op: str) -> None:
        """Record the memory of new tensors."""
        for tensor in tensors:
            if self.memory.knows(tensor):
                continue
            place = self.place()
            holder = BATCH if self.phase == "data" else TEMPORARY
            if place.in_fsdp:
                holder = REDUCED if "reduce" in place.in_fsdp else GATHERED
            self.memory.add(tensor, holder, op, place, self.phase)

    # Copies between host and device.

    def _copy(self, op: Any, name: str, args: Any, kwargs: Any) -> Any:
        source = args[0] if name == "_to_copy" else args[1]
        if name == "_to_copy":
            target = torch.device(kwargs.get("device") or source.device)
            blocking = not kwargs.get("non_blocking", False)
        else:
            target, blocking = args[0].device, not (len(args) > 2 and args[2])
        from_device, to_device = source.device == self.device, target.type == self.device.type
        if from_device and not to_device:
            values = self._read(source, "copy to the host", blocking)
            if name == "copy_":
                return args[0].copy_(values)
            return values.to(kwargs.get("dtype") or source.dtype)
        if to_device and not from_device:
            self._write("copy to the device", blocking)
            result = op(*args, **kwargs)
            if not source.is_floating_point():
                self.values.set(result, source.to(result.dtype))
            self.allocated([result] if self.recording else [], name)
            return result
        result = op(*args, **kwargs)
        on_device = [t for t in (source, result) if t.device == self.device]
        if self.recording and on_device and result.dtype != source.dtype:
            self._note_cast(source, result)
        self._note(op, name, args, kwargs, on_device, result)
        return result

    def _note_cast(self, source: Tensor, result: Tensor) -> None:
        source_dtype, target = (str(t.dtype).removeprefix("torch.") for t in (source, result))
        num_bytes = source.numel() * (source.element_size() + result.element_size())
        is_weight = source.dim() > 1 and source.is_floating_point() and tuple(source.shape) in self.weights
        self.trace.casts.append(Cast(source_dtype, target, num_bytes, is_weight, self.place(), self.phase))

    def _read(self, tensor: Tensor, what: str, blocking: bool) -> Tensor:
        if self.recording:
            self.trace.host.append(HostAccess("read", what, blocking, self.place(), self.phase))
        if blocking:
            self.timeline.host_read()
        return self.values.read(tensor)

    def _write(self, what: str, blocking: bool) -> None:
        if self.recording:
            self.trace.host.append(HostAccess("write", what, blocking, self.place(), self.phase))
        if blocking:
            self.timeline.host_read()

    def _run_by_values(self, op: Any, name: str, args: Any, kwargs: Any, on_device: list[Tensor]) -> Any:
        self._read(on_device[0], f"{name}()", blocking=True)
        if name == "equal":
            return True
        to_host = [self.values.read(arg) if isinstance(arg, Tensor) else arg for arg in args]
        result = op(*to_host, **kwargs)
        made = result.to(self.device) if isinstance(result, Tensor) else tuple(t.to(self.device) for t in result)
        for tensor, values in zip(tree_leaves(made), tree_leaves(result), strict=True):
            self.values.set(tensor, values)
        self.allocated(tree_leaves(made) if self.recording else [], name)
        return made

    def _check_indices(self, indices: Any) -> None:
        for index in tree_leaves(indices):
            if isinstance(index, Tensor) and index.device != self.device and index.dim():
                self._write("index on the host", blocking=True)

    # Known values of device tensors.

    def _choose_experts(self, args: Any, result: Tensor) -> None:
        score_TE, top_k = args[0], args[1]
        if (experts_TK := self.experts_of(score_TE.shape[0], score_TE.shape[1], top_k)) is not None:
            self.values.set(result, experts_TK)

    def _follow_collective(self, op: Any, args: Any, result: Any) -> None:
        """Set the values of a collective's result, assuming that all ranks have the same values."""
        first = next(leaf for leaf in tree_leaves(list(args)) if isinstance(leaf, Tensor))
        kind = describe(op, args, result, self.groups)
        if kind.kind == "all-reduce" and (known := self.values.get(first)) is not None:
            total = known * kind.group_size if not known.is_floating_point() else known
            self.values.set(first if op.namespace == "c10d" or op._schema.is_mutable else result, total)
        elif kind.kind == "all-gather" and op.namespace == "_c10d_functional":
            if (known := self.values.get(first)) is not None:
                self.values.set(result, torch.cat([known] * kind.group_size))
        elif kind.kind == "all-to-all" and (known := self.values.get(first)) is not None:
            # Rank 0 receives from every rank what it sends to itself.
            self.values.set(result, torch.cat([known.chunk(kind.group_size)[0]] * kind.group_size))

    def _note_collective(self, op: Any, args: Any, result: Any, outputs: list[Tensor]) -> None:
        collective = describe(op, args, result, self.groups)
        self.trace.collectives.append(Communication(collective, self.place(), self.phase, self.micro_batch))
        end = self.timeline.collective(
            collective.label, collective.axis, collective.intra_bytes, collective.inter_bytes
        )
        if op.namespace == "c10d" or not outputs:
            self.timeline.current.wait_event(end)
        else:
            self._in_flight[outputs[0]] = end


def _has_size(name: str, args: Any, kwargs: Any) -> bool:
    return name == "repeat_interleave" and (kwargs.get("output_size") is not None or len(args) > 2)
