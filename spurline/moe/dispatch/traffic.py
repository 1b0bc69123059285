"""Who sends how many rows to whom: the numbers that the host needs for a plan across ranks.

P ranks, E experts of which e live on each rank. The (P, E) matrix of counts is summed on the device; the host reads
2P + e + 7 numbers in one copy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from spurline.accelerator import HostCopy
from spurline.moe.telemetry import counted


@dataclass(frozen=True)
class Traffic:
    splits_2P: Tensor
    """Rows that this rank sends to each rank and receives from each; int64 on the host."""
    num_received: int
    """While tracing its own symbol, so that a size is one symbol and not a sum of several."""
    largest_split: int
    """The most rows that any rank of the group sends to any rank."""
    count_e: Tensor
    """Rows of each expert on this rank, on the device where they were counted."""
    host_count_e: Tensor
    """The same on the host."""
    known_count_e: list[int] | None = None
    """The same as integers; this and the fields below are None while tracing, as a graph can't branch on them."""
    num_rows: int | None = None
    """Rows of the entire group."""
    segment_range: tuple[int, int] | None = None
    """The fewest and most rows that any rank sends to any expert of this rank."""
    expert_range: tuple[int, int] | None = None
    """The fewest and most rows of any expert of the group."""

    @staticmethod
    def of_counts(count_PE: Tensor, rank: int) -> Traffic:
        """From the rows that each rank has for each expert, by one copy to the host."""
        P, (numbers, count_e) = count_PE.shape[0], traffic_numbers(count_PE, rank)
        if torch.compiler.is_compiling():
            host = numbers.cpu()  # blocks: nothing in a graph would wait for a non-blocking copy
            num_received, largest_split = host[2 * P].item(), host[2 * P + 1].item()
            torch._check(num_received >= 0)
            torch._check(largest_split >= 0)
            splits_2P, host_count_e = host[: 2 * P].view(2, P), host[2 * P + 7 :]
            return Traffic(splits_2P, num_received, largest_split, count_e, host_count_e)  # type: ignore[arg-type]
        return Traffic.of_numbers(HostCopy(numbers), count_e, P)

    @staticmethod
    def of_numbers(numbers: HostCopy, count_e: Tensor, P: int) -> Traffic:
        """From `traffic_numbers`, after waiting for their copy to the host."""
        host = numbers.wait()
        read = Traffic.read_on_host(host)
        received, largest, total, fewest_of_segment, most_of_segment, fewest, most = read[2 * P : 2 * P + 7]
        return Traffic(
            splits_2P=host[: 2 * P].view(2, P),
            num_received=received,
            largest_split=largest,
            count_e=count_e,
            host_count_e=host[2 * P + 7 :],
            known_count_e=read[2 * P + 7 :],
            num_rows=total,
            segment_range=(fewest_of_segment, most_of_segment),
            expert_range=(fewest, most),
        )

    @staticmethod
    @counted("plan.host_reads")
    def read_on_host(numbers: Tensor) -> list[int]:
        """The only place where a plan reads counts from a device."""
        return numbers.tolist()

    @staticmethod
    def forced(num_rows_P: list[int], count_e: Tensor, num_experts: int, rank: int, parts: int = 1) -> Traffic:
        """With forced balance: all numbers follow from the rows of each rank, without communication.

        With parts, `parts` consecutive ranks share e experts, and each of the ranks gets all rows of these experts.
        """
        P, E = len(num_rows_P), num_experts
        e = E * parts // P
        mine = range(rank // parts * e, rank // parts * e + e)
        send_P = [forced_rows(num_rows_P[rank], E, q // parts * e, q // parts * e + e) for q in range(P)]
        receive_P = [forced_rows(num_rows, E, mine.start, mine.stop) for num_rows in num_rows_P]
        splits_2P = torch.tensor([send_P, receive_P])
        # The first experts get the most rows, and the first rank has them.
        largest_split = max(forced_rows(num_rows, E, 0, e) for num_rows in num_rows_P)
        if torch.compiler.is_compiling():
            host_count_e = forced_counts(num_rows_P, E, torch.device("cpu"))[:, mine.start : mine.stop].sum(0)
            return Traffic(splits_2P, sum(receive_P), largest_split, count_e, host_count_e)
        ranks_with = Counter(num_rows_P)
        known_count_e = [sum(many * forced_rows(n, E, i, i + 1) for n, many in ranks_with.items()) for i in mine]
        fewest, most = (sum(many * forced_rows(n, E, i, i + 1) for n, many in ranks_with.items()) for i in (E - 1, 0))
        segments = [forced_rows(n, E, i, i + 1) for n in ranks_with for i in (mine.start, mine.stop - 1)]
        return Traffic(
            splits_2P=splits_2P,
            num_received=sum(receive_P),
            largest_split=largest_split,
            count_e=count_e,
            host_count_e=torch.tensor(known_count_e),
            known_count_e=known_count_e,
            num_rows=sum(num_rows_P) * parts,
            segment_range=(min(segments), max(segments)),
            expert_range=(fewest, most),
        )


def traffic_numbers(count_PE: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Rows of each rank for each expert -> all numbers that the host needs, (2P + 7 + e,), and their last part, (e,).

    What this rank sends to each rank and receives from each; rows received, the largest split of any pair, rows of the
    group; fewest and most rows of a segment of this rank and of an expert; rows of each expert of this rank.
    """
    P, E = count_PE.shape
    e = E // P
    split_PP = count_PE.unflatten(1, (P, e)).sum(-1)
    count_Pe, count_E = count_PE[:, rank * e : (rank + 1) * e], count_PE.sum(0)
    send_P, receive_P, count_e = split_PP[rank], split_PP[:, rank], count_E[rank * e : (rank + 1) * e]
    totals = [receive_P.sum(), split_PP.max(), split_PP.sum()]
    ranges = [count_Pe.min(), count_Pe.max(), count_E.min(), count_E.max()]
    return torch.cat([send_P, receive_P, torch.stack(totals + ranges), count_e]), count_e


def forced_rows(num_rows: int, num_experts: int, first: int, last: int) -> int:
    """How many of num_rows rows go to experts first..last-1, if row i goes to expert i % num_experts."""
    whole_rounds, rest = num_rows // num_experts, num_rows % num_experts
    return whole_rounds * (last - first) + max(0, min(rest, last) - first)


def forced_counts(num_rows_P: list[int], num_experts: int, device: torch.device) -> Tensor:
    """Forced balance: rows from each rank to each expert, (P, E), computed on the device."""
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


def counts_of_parts(count_PE: Tensor, num_owners: int, parts: int) -> Tensor:
    """(P, E) -> (P, E * parts): rows for the parts of experts, each of which gets all rows of its expert.

    An owner is `parts` consecutive ranks that share e experts; part p of each expert lives on the p-th of them.
    """
    P, E = count_PE.shape
    return count_PE.view(P, num_owners, 1, E // num_owners).expand(-1, -1, parts, -1).flatten(1)
