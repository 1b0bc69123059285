"""Exchanges of rows between the ranks of a group: each starts, is waited for, and has an inverse.

P ranks, S rows that leave this rank, R rows that reach it, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from spurline.comm.exchange import InFlight, exchange_rows, start_exchange
from spurline.moe.dispatch.permute import index_of_segments
from spurline.moe.rows import Arrival
from spurline.moe.telemetry import counted
from spurline.ops.rows import gather_rows, scatter_add_rows


class Exchange(Protocol):
    def start(self, rows_SD: Tensor) -> Arrival:
        """Send this rank's rows; waited for, (R, D): those that reach it, rank after rank."""
        ...

    def inverse(self, rows_RD: Tensor) -> Tensor:
        """(R, D) -> (S, D): every row back to where it came from."""
        ...


@dataclass(frozen=True)
class UnevenExchange:
    """Each pair of ranks exchanges just the rows it has."""

    splits_2P: Tensor
    """Rows that this rank sends to each rank, and receives from each; on the host."""
    num_sent: int
    num_received: int
    group: ProcessGroup
    label: str = ""
    """The layer, for errors."""
    check: str = ""
    """What the ranks compare: nothing, "splits" or "rows" (`comm/exchange.py`)."""
    overlap: bool = True
    """Whether rows may be in flight between start and wait."""

    @counted("exchange.uneven")
    def start(self, rows_SD: Tensor) -> Arrival:
        how = self.label, self.check, self.overlap
        return start_exchange(rows_SD, self.splits_2P, self.group, self.num_received, *how)

    def inverse(self, rows_RD: Tensor) -> Tensor:
        back_2P = self.splits_2P.flip(0)
        return exchange_rows(rows_RD, back_2P, self.group, self.num_sent, self.label, self.check)


@dataclass(frozen=True)
class EqualSplitExchange:
    """Every pair exchanges `largest_split` rows: each segment is padded with zeros, which are dropped on arrival."""

    largest_split: int
    send_index_S: Tensor
    """Where each row to send lies among the padded ones."""
    receive_index_R: Tensor
    """Where each received row lies among the padded ones."""
    group: ProcessGroup
    label: str = ""
    check: str = ""
    overlap: bool = True

    @staticmethod
    def make(
        largest_split: int,
        send_P: Tensor,
        receive_P: Tensor,
        num_sent: int,
        num_received: int,
        group: ProcessGroup,
        label: str = "",
        check: str = "",
        overlap: bool = True,
    ) -> EqualSplitExchange:
        start_P = send_P.new_ones(group.size()).cumsum(0).sub(1) * largest_split
        send_index_S = index_of_segments(start_P, send_P, num_sent)
        receive_index_R = index_of_segments(start_P, receive_P, num_received)
        return EqualSplitExchange(largest_split, send_index_S, receive_index_R, group, label, check, overlap)

    @counted(
        lambda exchange, rows_SD: {
            "exchange.equal_split": 1,
            "exchange.equal_split.padding_rows": exchange.num_padded - rows_SD.shape[0],
        }
    )
    def start(self, rows_SD: Tensor) -> Arrival:
        return _Padded(self._start(rows_SD, self.send_index_S), self.receive_index_R)

    def inverse(self, rows_RD: Tensor) -> Tensor:
        return _Padded(self._start(rows_RD, self.receive_index_R), self.send_index_S).wait()

    @property
    def num_padded(self) -> int:
        return self.group.size() * self.largest_split

    def _start(self, rows_RD: Tensor, index_R: Tensor) -> InFlight:
        padded_RD = scatter_add_rows(rows_RD, index_R, self.num_padded)
        return start_exchange(padded_RD, None, self.group, self.num_padded, self.label, self.check, self.overlap)


@dataclass(frozen=True)
class _Padded:
    in_flight: InFlight
    index_R: Tensor

    def wait(self) -> Tensor:
        return gather_rows(self.in_flight.wait(), self.index_R)
