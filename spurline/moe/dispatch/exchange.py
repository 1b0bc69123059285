"""Exchanges of rows between the ranks of a group: each starts, is waited for, and has an inverse.

P ranks, S rows that leave this rank, R rows that reach it, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from spurline.comm.exchange import Departure, InFlight, exchange_rows, start_exchange
from spurline.moe.dispatch.permute import index_of_segments
from spurline.moe.telemetry import counted
from spurline.ops.rows import gather_rows, scatter_add_rows


class Exchange(Protocol):
    def start(self, departure: Departure) -> InFlight | PaddedInFlight:
        """Start to send this rank's rows; waiting returns the rows it receives, (R, D), in rank order."""
        ...

    def inverse(self, rows_RD: Tensor) -> Tensor:
        """(R, D) -> (S, D): send every row back to where it came from."""
        ...


@dataclass(frozen=True)
class UnevenExchange:
    """Each pair of ranks exchanges only its actual rows."""

    splits_2P: Tensor
    """Rows that this rank sends to each rank, and receives from each; on the host."""
    num_sent: int
    num_received: int
    group: ProcessGroup
    label: Tensor | None = None
    """The layer, for errors (`comm/conservation.py: as_label`)."""
    check: str = ""
    """What the ranks compare: nothing, "splits" or "rows" (`comm/exchange.py`)."""
    overlap: bool = True
    """Whether rows may be in flight between start and wait."""

    @counted("exchange.uneven")
    def start(self, departure: Departure) -> InFlight:
        return departure.start(self.splits_2P, self.num_received, self.label, self.check, self.overlap)

    def inverse(self, rows_RD: Tensor) -> Tensor:
        back_2P = self.splits_2P.flip(0)
        return exchange_rows(rows_RD, back_2P, self.group, self.num_sent, self.label, self.check, returning=True)


@dataclass(frozen=True)
class EqualSplitExchange:
    """Every pair exchanges `largest_split` rows: each segment is padded with zeros, which are dropped on arrival."""

    largest_split: int
    send_index_S: Tensor
    """Index of each row to send in the padded buffer."""
    receive_index_R: Tensor
    """Index of each received row in the padded buffer."""
    group: ProcessGroup
    label: Tensor | None = None
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
        label: Tensor | None = None,
        check: str = "",
        overlap: bool = True,
    ) -> EqualSplitExchange:
        start_P = send_P.new_ones(group.size()).cumsum(0).sub(1) * largest_split
        send_index_S = index_of_segments(start_P, send_P, num_sent)
        receive_index_R = index_of_segments(start_P, receive_P, num_received)
        return EqualSplitExchange(largest_split, send_index_S, receive_index_R, group, label, check, overlap)

    @counted(
        lambda exchange, departure: {
            "exchange.equal_split": 1,
            "exchange.equal_split.padding_rows": exchange.num_padded - departure.rows_SD.shape[0],
        }
    )
    def start(self, departure: Departure) -> PaddedInFlight:
        started = self._start(departure.rows_SD, self.send_index_S, packed_width=departure.packed_width)
        return PaddedInFlight(started, self.receive_index_R)

    def inverse(self, rows_RD: Tensor) -> Tensor:
        return PaddedInFlight(self._start(rows_RD, self.receive_index_R, True), self.send_index_S).wait()

    @property
    def num_padded(self) -> int:
        return self.group.size() * self.largest_split

    def _start(self, rows_RD: Tensor, index_R: Tensor, returning: bool = False, packed_width: int = 0) -> InFlight:
        padded_RD = scatter_add_rows(rows_RD, index_R, self.num_padded)
        how = self.label, self.check, self.overlap, returning, packed_width
        return start_exchange(padded_RD, None, self.group, self.num_padded, *how)


@dataclass(frozen=True)
class PaddedInFlight:
    """Padded rows in flight; `wait()` drops the padding."""

    in_flight: InFlight
    index_R: Tensor

    def wait(self) -> Tensor:
        return gather_rows(self.in_flight.wait(), self.index_R)
