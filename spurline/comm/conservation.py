"""The conservation check of a row exchange: what one rank sends is what the other receives, row by row.

A receiver that expects more rows than were sent gets stale ones, and gloo raises no error. So, if enabled, the ranks
compare their split lists before the exchange and checksums of every pair's rows after it. All ranks see the same
comparison and raise the same error, so that no rank hangs.
"""

import torch
import torch.distributed as dist
from torch import Tensor

_LABEL_BYTES = 256
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class ConservationError(RuntimeError):
    """Rows were lost, added, changed or reordered between two ranks."""


def as_label(text: str) -> Tensor:
    """The prefix of an exchange's errors, as bytes in a tensor on the host.

    A string would be a constant of a traced graph, and each layer would be compiled separately because of its name.
    """
    encoded = text.encode()[:_LABEL_BYTES].ljust(_LABEL_BYTES)
    return torch.tensor(list(encoded), dtype=torch.uint8, device="cpu")


def text_of(label: Tensor | None, of_gradient: bool = False) -> str:
    """The text of a label, for the exchange itself or for that of its gradient."""
    text = "" if label is None else bytes(label.tolist()).decode(errors="ignore").rstrip()
    return f"gradient of {text}" if of_gradient and text else text


def check_splits(send_P: list[int], receive_P: list[int], group: dist.ProcessGroup, label: str) -> None:
    """Raise on every rank unless each rank expects from each other rank exactly what that one sends."""
    sent_PP, expected_PP = _gather_pairs(torch.tensor([send_P, receive_P]), group)
    wrong = (sent_PP != expected_PP).nonzero().tolist()
    if wrong:
        pairs = "; ".join(
            f"rank {p} sends {sent_PP[p, q]} rows to rank {q}, which expects {expected_PP[p, q]}" for p, q in wrong[:4]
        )
        raise ConservationError(f"{label}: {pairs}{_and_more(len(wrong))}")


def check_rows(
    sent_SD: Tensor,
    received_RD: Tensor,
    send_P: list[int],
    receive_P: list[int],
    group: dist.ProcessGroup,
    label: str,
) -> None:
    """Raise on every rank unless the rows of each pair arrived as they left: the same rows in the same order."""
    checksums = torch.stack([_checksum_by_rank(sent_SD, send_P), _checksum_by_rank(received_RD, receive_P)])
    sent_PP, received_PP = _gather_pairs(checksums.cpu(), group)
    wrong = (sent_PP != received_PP).nonzero().tolist()
    if wrong:
        pairs = ", ".join(f"from rank {p} to rank {q}" for p, q in wrong[:4])
        me = group.rank()
        counts = f"this is rank {me}, which sends {send_P} and receives {receive_P} rows"
        raise ConservationError(f"{label}: rows changed on their way {pairs}{_and_more(len(wrong))} ({counts})")


def _gather_pairs(sent_and_received: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """(2, P) of this rank -> what p sent to q, and what q received from p, both (P, P) on every rank."""
    device = "cpu" if dist.get_backend(group) == "gloo" else torch.accelerator.current_accelerator()
    mine = sent_and_received.to(device)
    everyones = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyones, mine, group=group)
    all_P2P = torch.stack(everyones).cpu()
    return all_P2P[:, 0], all_P2P[:, 1].t()


def _checksum_by_rank(rows_RD: Tensor, split_P: list[int]) -> Tensor:
    """(R, D) -> (P,): a number for each rank's rows that changes when a bit, a row or the order of rows changes."""
    row_bytes = rows_RD.shape[1:].numel() * rows_RD.itemsize
    word = next(dtype for dtype in _WORDS if row_bytes % dtype.itemsize == 0)  # the widest, to multiply the fewest
    word_RW = rows_RD.contiguous().flatten(1).view(word).to(torch.int64)
    # Odd multipliers that differ by position; int64 arithmetic wraps around, on every rank alike.
    column_W = torch.arange(word_RW.shape[1], device=rows_RD.device) * 0x9E3779B1 + 0x85EBCA77
    row_R = (word_RW * (column_W | 1)).sum(1)
    parts = row_R.split(split_P)
    place = [torch.arange(1, len(part) + 1, device=rows_RD.device) * 0xC2B2AE3D for part in parts]
    return torch.stack([(part * (p | 1)).sum() for part, p in zip(parts, place, strict=True)])


def _and_more(count: int) -> str:
    return f"; and {count - 4} more pairs" if count > 4 else ""
