"""Building blocks of both stand-ins: a blocking all-to-all of rows, without autograd."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

row_dtypes = (torch.bfloat16, torch.float32)
"""Row dtypes of the stand-ins. The libraries take only bfloat16; float32 shows that an adapter is exact."""


def send_rows(rows: Tensor, send_P: list[int], receive_P: list[int], group: ProcessGroup) -> Tensor:
    """Rows to send in rank order -> rows received, in rank order."""
    received = rows.new_empty(sum(receive_P), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receive_P, send_P, group=group)
    return received


def counts_of_all(send_P: list[int], group: ProcessGroup) -> list[int]:
    """How many rows this rank receives from each rank."""
    received = torch.empty(len(send_P), dtype=torch.int64)
    dist.all_to_all_single(received, torch.tensor(send_P), group=group)
    return received.tolist()


def check_rows(x: Tensor) -> None:
    assert x.dim() == 2, f"rows are [num_tokens, hidden], got {tuple(x.shape)}"
    assert x.is_contiguous(), "rows must be contiguous"
    assert x.dtype in row_dtypes, f"rows must be bfloat16, got {x.dtype}"


def add_up(rows: Tensor, token_R: Tensor, num_tokens: int) -> Tensor:
    """(R, D) -> (T, D): summed in float32 and rounded once, as the kernels do."""
    total = torch.zeros(num_tokens, rows.shape[1], dtype=torch.promote_types(rows.dtype, torch.float32))
    return total.index_add_(0, token_R.long(), rows.to(total.dtype)).to(rows.dtype)
