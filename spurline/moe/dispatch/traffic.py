"""Who sends how many rows to whom: the numbers that the host needs for a plan across ranks.

P ranks, E experts of which e live on each rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spurline.moe.telemetry import count


@dataclass(frozen=True)
class Traffic:
    """Host integers; while tracing, symbols."""

    send_P: list[int]
    """Rows that this rank sends to each rank."""
    receive_P: list[int]
    """Rows that this rank receives from each rank."""
    num_received: int
    largest_split: int
    """The most rows that any rank of the group sends to any rank."""
    num_rows: int
    """Rows of the whole group."""
    count_PE: list[list[int]] | None = None
    """Rows from each rank to each expert; None while tracing, where P*E symbols would be too many."""

    @staticmethod
    def of_counts(count_PE: list[list[int]], rank: int) -> "Traffic":
        """From the whole group's counts."""
        P = len(count_PE)
        e = len(count_PE[0]) // P
        split_PP = [[sum(count_E[q * e : (q + 1) * e]) for q in range(P)] for count_E in count_PE]
        return Traffic.of_splits(split_PP, rank, count_PE)

    @staticmethod
    def of_splits(split_PP: list[list[int]], rank: int, count_PE: list[list[int]] | None = None) -> "Traffic":
        """From the rows of each rank (first dim) for each rank (second dim)."""
        receive_P = [split_P[rank] for split_P in split_PP]
        return Traffic(
            send_P=split_PP[rank],
            receive_P=receive_P,
            num_received=sum(receive_P),
            largest_split=max(max(split_P) for split_P in split_PP),
            num_rows=sum(sum(split_P) for split_P in split_PP),
            count_PE=count_PE,
        )

    @staticmethod
    def traced(count_PE: Tensor, rank: int) -> "Traffic":
        """From counts on a device while tracing: every number becomes a symbol.

        The total is a symbol of its own, so that sizes are one symbol and not a sum over a list of them.
        """
        P = count_PE.shape[0]
        split_PP = count_PE.unflatten(1, (P, -1)).sum(-1)
        send_P, receive_P = split_PP[rank], split_PP[:, rank]
        totals = torch.stack([receive_P.sum(), split_PP.max(), split_PP.sum()])
        numbers = read_on_host(torch.cat([send_P, receive_P, totals]))
        for number in numbers:
            torch._check(number >= 0)
        return Traffic(numbers[:P], numbers[P : 2 * P], *numbers[2 * P :])


def read_on_host(numbers: Tensor) -> list:
    """The one place where a plan waits for a device."""
    count("plan.host_reads")
    return numbers.tolist()


def forced_rows(num_rows: int, num_experts: int, first: int, last: int) -> int:
    """How many of the numbers below num_rows fall on experts first..last-1, when number i falls on i % num_experts."""
    whole_rounds, rest = num_rows // num_experts, num_rows % num_experts
    return whole_rounds * (last - first) + max(0, min(rest, last) - first)


def forced_traffic(num_rows_P: list[int], num_experts: int, rank: int) -> Traffic:
    """Forced balance: all numbers follow from the rows of each rank, so nobody has to be asked."""
    E, P = num_experts, len(num_rows_P)
    if not torch.compiler.is_compiling():
        return Traffic.of_counts([[forced_rows(n, E, i, i + 1) for i in range(E)] for n in num_rows_P], rank)
    e = E // P
    return Traffic.of_splits([[forced_rows(n, E, q * e, (q + 1) * e) for q in range(P)] for n in num_rows_P], rank)


def forced_counts(num_rows_P: list[int], num_experts: int, device: torch.device) -> Tensor:
    """Forced balance: rows from each rank to each expert, (P, E), made on the device."""
    expert_E = torch.arange(num_experts, device=device)
    return torch.stack([(num_rows + num_experts - 1 - expert_E) // num_experts for num_rows in num_rows_P])


def forced_order(count_E: Tensor, num_rows: int) -> Tensor:
    """Forced balance: the order that a stable sort of i % E by expert would give, (S,), without sorting.

    Expert e gets the slots e, e + E, e + 2E, ...: the j-th row of expert e is slot e + j * E.
    """
    expert_E = torch.arange(count_E.shape[0], device=count_E.device)
    first_row_E = count_E.cumsum(0) - count_E
    shift_S = torch.repeat_interleave(expert_E - first_row_E * count_E.shape[0], count_E, output_size=num_rows)
    return shift_S + torch.arange(num_rows, device=count_E.device) * count_E.shape[0]
