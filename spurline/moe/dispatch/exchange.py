"""Exchanges of rows between the ranks of a group: each starts, is waited for, and has an inverse.

P ranks, S rows that leave this rank, R rows that reach it, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from spurline.comm.exchange import Departure, InFlight, exchange_rows
from spurline.moe.dispatch.permute import index_of_segments
from spurline.moe.telemetry import counted
from spurline.ops.rows import pad_rows, unpad_rows


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
        padded = departure.padded(self.send_index_S, self.num_padded)
        started = padded.start(None, self.num_padded, self.label, self.check, self.overlap)
        return PaddedInFlight(started, self.receive_index_R)

    def inverse(self, rows_RD: Tensor) -> Tensor:
        padded = pad_rows(rows_RD, self.receive_index_R, self.num_padded)
        returned = exchange_rows(padded, None, self.group, self.num_padded, self.label, self.check, returning=True)
        return unpad_rows(returned, self.send_index_S)

    @property
    def num_padded(self) -> int:
        return self.group.size() * self.largest_split


@dataclass(frozen=True)
class PaddedInFlight:
    """Padded rows in flight; `wait()` drops the padding."""

    in_flight: InFlight
    index_R: Tensor

    def wait(self) -> Tensor:
        return unpad_rows(self.in_flight.wait(), self.index_R)
