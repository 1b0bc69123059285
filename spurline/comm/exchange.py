"""The asynchronous all-to-all of rows: started, and waited for later, in the forward and in the backward pass.

P ranks, S rows that leave this rank, R rows that reach it. `splits_2P` (int64, on the host) holds the rows that this
rank sends to each rank and receives from each; None means equal splits. Splits are passed as a tensor, not as a list,
so that a traced graph has one symbol for the output size instead of one for every rank.

Started in the forward pass, an exchange is in flight until `wait()`; in the backward pass its mirror is in flight from
the gradient of `wait()` until the gradient of the start. So whatever ran in between overlaps in both directions, as
autograd runs nodes in the reverse order of their creation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function
from torch.distributed.distributed_c10d import _resolve_process_group

from spurline.accelerator import record_event, side_stream_behind
from spurline.comm.collectives import group_size
from spurline.comm.conservation import check_rows, check_splits, text_of
from spurline.ops.float8_rows import pack_rows, unpack_rows
from spurline.ops.rows import pad_rows

_ops = torch.ops._c10d_functional
_all_to_all, _wait = _ops.all_to_all_single, _ops.wait_tensor


@dataclass(frozen=True)
class Departure:
    """Rows that are ready to be sent, while their split sizes may not be known yet."""

    rows_SD: Tensor
    """The tensor that autograd returns the gradient to."""
    group: dist.ProcessGroup
    ready: torch.Event | None = None
    """Recorded when the rows are ready, if the exchange should wait only for them (on an accelerator)."""
    packed_width: int = 0
    """Number of columns of a row that are sent as float8 (0: rows are sent unchanged)."""
    packed_SY: Tensor | None = None
    """What is sent instead of the rows, if they are packed."""

    def start(
        self,
        splits_2P: Tensor | None,
        output_size: int | None = None,
        label: Tensor | None = None,
        check: str = "",
        overlap: bool = True,
        returning: bool = False,
    ) -> InFlight:
        """Start the exchange; see `start_exchange`."""
        rows_SD, size = self.rows_SD, self.group.size()
        if splits_2P is None and rows_SD.size(0) % size:
            raise ValueError(
                f"start_exchange: {rows_SD.size(0)} rows can't be split equally over {size} ranks: pass splits_2P"
            )
        if size == 1:
            return InFlight(rows_SD, rows_SD, None, "", label, check, overlap)
        if output_size is None:
            output_size = rows_SD.size(0) if splits_2P is None else int(splits_2P[1].sum())
        name = self.group.group_name
        sent = rows_SD.detach() if self.packed_SY is None else self.packed_SY
        how = sent, splits_2P, output_size, name, label, check, overlap, returning
        if self.ready is None or not overlap or check == "rows":  # complete when it returns, or no event
            started = _start(*how)
        else:
            with side_stream_behind(self.ready, rows_SD.device):
                started = _start(*how)
            started.record_stream(torch.accelerator.current_stream())  # allocated on the side stream, used on this one
        return InFlight(rows_SD, started, splits_2P, name, label, check, overlap, self.packed_width)

    def padded(self, place_S: Tensor, num_places: int) -> Departure:
        """The same rows, each in its own place, with zeros in empty places.

        Without `ready`: places are computed from numbers that the host reads, after whatever has been queued since.
        """
        padded = depart(pad_rows(self.rows_SD, place_S, num_places), self.group)
        if self.packed_SY is None:
            return padded
        return replace(padded, packed_width=self.packed_width, packed_SY=pad_rows(self.packed_SY, place_S, num_places))


def depart(rows_SD: Tensor, group: dist.ProcessGroup, beside: bool = False, packed_width: int = 0) -> Departure:
    """Prepare rows to be sent; what runs from here to `wait()` overlaps the exchange in the backward pass.

    With `beside`, an exchange that starts later on an accelerator waits only for these rows, and runs concurrently with
    what has been queued since. With packed_width, that many columns of a row are sent as float8
    (`ops/float8_rows.py`); gradients come back unrounded.
    """
    if group_size(group) == 1:
        return Departure(rows_SD, group, record_event(rows_SD.device) if beside else None)
    packed_SY = pack_rows(rows_SD.detach(), packed_width) if packed_width else None
    ready = record_event(rows_SD.device) if beside else None
    return Departure(_Begin.apply(rows_SD), group, ready, packed_width, packed_SY)


@dataclass(frozen=True)
class InFlight:
    """Rows in flight between ranks; `wait()` returns what this rank receives, (R, ..)."""

    sent: Tensor
    """The tensor that autograd returns the gradient to."""
    started: Tensor
    splits_2P: Tensor | None
    group_name: str
    label: Tensor | None
    check: str
    overlap: bool
    packed_width: int = 0

    def wait(self) -> Tensor:
        if not self.group_name:
            return self.sent
        how = self.group_name, self.label, self.check, self.overlap, self.packed_width
        return _Finish.apply(self.sent, self.started, self.splits_2P, *how)


def start_exchange(
    rows_SD: Tensor,
    splits_2P: Tensor | None,
    group: dist.ProcessGroup,
    output_size: int | None = None,
    label: Tensor | None = None,
    check: str = "",
    overlap: bool = True,
    returning: bool = False,
) -> InFlight:
    """Start to send splits_2P[0, i] rows to rank i and to receive splits_2P[1, i] from it, in rank order.

    Pass output_size = R if it is known: while tracing, it is then one symbol. `label` (`as_label`) names the caller in
    errors. `check` is "" (none), "splits" (compare the ranks' splits first; only if a mismatch would abort the
    process, that is on gloo) or "rows" (compare splits and checksums of all rows; such an exchange is complete when it
    returns). Without `overlap` it is also complete when it returns, in both directions: needed if a graph ends between
    start and wait. `returning` rows are sent back to be combined: selective checkpointing saves only those sent to
    experts.
    """
    return depart(rows_SD, group).start(splits_2P, output_size, label, check, overlap, returning)


def exchange_rows(
    rows_SD: Tensor,
    splits_2P: Tensor | None,
    group: dist.ProcessGroup,
    output_size: int | None = None,
    label: Tensor | None = None,
    check: str = "",
    returning: bool = False,
) -> Tensor:
    """`start_exchange` and `wait` in one: (S, ..) -> (R, ..). Mirror: the exchange with the splits swapped."""
    return start_exchange(rows_SD, splits_2P, group, output_size, label, check, returning=returning).wait()


class _Begin(Function):
    """The identity; in the backward pass, waits for the mirrored exchange."""

    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor) -> Tensor:
        return rows_SD.view_as(rows_SD)

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> Tensor:
        return grad_SD if _is_differentiated_again() else _wait(grad_SD)


class _Finish(Function):
    """Waits for the exchange; in the backward pass, starts the mirrored one."""

    @staticmethod
    def forward(
        ctx: Any,
        sent_SD: Tensor,
        started: Tensor,
        splits_2P: Tensor | None,
        group_name: str,
        label: Tensor | None,
        check: str,
        overlap: bool,
        packed_width: int,
    ) -> Tensor:
        if torch.compiler.is_compiling():
            ctx.save_for_backward(splits_2P, label)
        else:
            # Not saved tensors: recomputation stops at the last of those, and need not wait for this exchange.
            ctx.splits_and_label = splits_2P, label
        ctx.num_sent, ctx.group_name, ctx.check, ctx.overlap = sent_SD.shape[0], group_name, check, overlap
        received = _wait(started)
        return unpack_rows(received, packed_width, sent_SD.shape[1], sent_SD.dtype) if packed_width else received

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        splits_2P, label = ctx.splits_and_label if hasattr(ctx, "splits_and_label") else ctx.saved_tensors
        mirrored_2P = None if splits_2P is None else splits_2P.flip(0)
        if _is_differentiated_again():
            group = _resolve_process_group(ctx.group_name)
            grad_SD = exchange_rows(grad_RD, mirrored_2P, group, ctx.num_sent, label, ctx.check)
        else:
            how = ctx.group_name, label, ctx.check, ctx.overlap, False
            grad_SD = _start(grad_RD, mirrored_2P, ctx.num_sent, *how, of_gradient=True)
            # Anomaly detection reads every gradient as soon as it is returned.
            if not torch.compiler.is_compiling() and torch.is_anomaly_enabled():
                grad_SD = _wait(grad_SD)
        return grad_SD, *[None] * 7


def _is_differentiated_again() -> bool:
    """Whether a backward pass is itself recorded (create_graph=True)."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


# A registered op, because only then can the size of its result be known before it runs.
@torch.library.custom_op("spurline::start_exchange", mutates_args=())
def _start(
    rows_SD: Tensor,
    splits_2P: Tensor | None,
    output_size: int,
    group_name: str,
    label: Tensor | None,
    check: str,
    overlap: bool,
    returning: bool,
    of_gradient: bool = False,
) -> Tensor:
    group = _resolve_process_group(group_name)  # type: ignore[arg-type]
    rows_SD = rows_SD.contiguous()
    if splits_2P is None:
        send_P = receive_P = [rows_SD.size(0) // group.size()] * group.size()
    else:
        send_P, receive_P = splits_2P.tolist()
    if check == "rows" or (check == "splits" and dist.get_backend(group) == "gloo"):
        check_splits(send_P, receive_P, group, text_of(label, of_gradient))
    received_RD = _all_to_all(rows_SD, receive_P, send_P, group_name)
    if not overlap or check == "rows":
        received_RD = _wait(received_RD)
    if check == "rows":
        check_rows(rows_SD, received_RD, send_P, receive_P, group, text_of(label, of_gradient))
    return received_RD


@_start.register_fake
def _(
    rows_SD: Tensor,
    splits_2P: Tensor | None,
    output_size: int,
    group_name: str,
    label: Tensor | None,
    check: str,
    overlap: bool,
    returning: bool,
    of_gradient: bool = False,
) -> Tensor:
    return rows_SD.new_empty(output_size, *rows_SD.shape[1:])
