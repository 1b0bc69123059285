"""An experts backend that gathers a copy of the expert's matrices for every row.

R rows, D width, F hidden width, e experts on this rank.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def gathered_experts(
    rows_RD: Tensor, w1_eFD: Tensor, w3_eFD: Tensor, w2_eDF: Tensor, rows_per_expert: Tensor | list[int]
) -> Tensor:
    """(R, D), sorted by expert -> (R, D): one batched matmul; for few rows, as each gets a copy of its matrices."""
    count_e = torch.as_tensor(rows_per_expert, device=rows_RD.device)
    expert_R = torch.repeat_interleave(count_e, output_size=rows_RD.shape[0])
    rows_R1D = rows_RD.unsqueeze(1)
    hidden_R1F = F.silu(rows_R1D @ w1_eFD[expert_R].mT) * (rows_R1D @ w3_eFD[expert_R].mT)
    return (hidden_R1F @ w2_eDF[expert_R].mT).squeeze(1)
