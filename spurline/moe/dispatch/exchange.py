"""Exchanges of rows between the ranks of a group, each with its inverse.

P ranks, S rows that leave this rank, R rows that reach it, D width.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup

from spurline.comm.collectives import exchange_rows
from spurline.moe.dispatch.permute import index_of_segments
from spurline.moe.telemetry import count
from spurline.ops.rows import gather_rows, scatter_add_rows


@dataclass(frozen=True)
class UnevenExchange:
    """Each pair of ranks exchanges just the rows it has."""

    send_P: list[int]
    receive_P: list[int]
    num_sent: int
    num_received: int
    group: ProcessGroup
    label: str = ""
    """Name of the layer, to check that no row gets lost on the way; empty: no check."""

    def forward(self, rows_SD: Tensor) -> Tensor:
        count("exchange.uneven")
        return exchange_rows(rows_SD, self.receive_P, self.send_P, self.group, self.num_received, self.label)

    def inverse(self, rows_RD: Tensor) -> Tensor:
        return exchange_rows(rows_RD, self.send_P, self.receive_P, self.group, self.num_sent, self.label)


@dataclass(frozen=True)
class EqualSplitExchange:
    """Every pair exchanges `width` rows: zeros fill up what is missing, and are dropped on arrival."""

    width: int
    send_index_S: Tensor
    """Where each row to send lies among the padded ones."""
    receive_index_R: Tensor
    """Where each received row lies among the padded ones."""
    group: ProcessGroup
    label: str = ""

    @staticmethod
    def make(
        width: int,
        send_P: Tensor,
        receive_P: Tensor,
        num_sent: int,
        num_received: int,
        group: ProcessGroup,
        label: str = "",
    ) -> "EqualSplitExchange":
        start_P = send_P.new_ones(group.size()).cumsum(0).sub(1) * width
        return EqualSplitExchange(
            width,
            index_of_segments(start_P, send_P, num_sent),
            index_of_segments(start_P, receive_P, num_received),
            group,
            label,
        )

    def forward(self, rows_SD: Tensor) -> Tensor:
        count("exchange.equal_split")
        count("exchange.equal_split.padding_rows", self.group.size() * self.width - rows_SD.shape[0])
        return self._exchange(rows_SD, self.send_index_S, self.receive_index_R)

    def inverse(self, rows_RD: Tensor) -> Tensor:
        return self._exchange(rows_RD, self.receive_index_R, self.send_index_S)

    def _exchange(self, rows_RD: Tensor, from_index: Tensor, to_index: Tensor) -> Tensor:
        num_padded = self.group.size() * self.width
        padded_RD = scatter_add_rows(rows_RD, from_index, num_padded)
        return gather_rows(exchange_rows(padded_RD, None, None, self.group, num_padded, self.label), to_index)
