"""The products that a formula of experts is made of. R rows sorted by expert, e experts, I inputs, O outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spurline.moe.kernels.grouped import grouped_matmul
from spurline.moe.kernels.kernel import Kernel
from spurline.moe.kernels.low_precision import low_precision_matmul
from spurline.moe.rows import RowCounts
from spurline.ops.low_precision import LowPrecision


@dataclass(frozen=True)
class Products:
    """The products that an experts' formula is made of, for rows with these counts."""

    kernel: Kernel
    counts: RowCounts
    weight_R: Tensor | None = None
    """The routing weight of each row, if the formula is to apply it."""
    precision: LowPrecision | None = None
    """How matrices are multiplied, if not in the rows' dtype."""

    def matmul(self, rows_RI: Tensor, w_eOI: Tensor) -> Tensor:
        """(R, I) and (e, O, I) -> (R, O): each row times the transposed matrix of its expert, in the rows' dtype."""
        w_eOI, count_e = w_eOI.to(rows_RI.dtype), self._count_e(rows_RI)
        if self.precision is None:
            return grouped_matmul(rows_RI, w_eOI, count_e, self.kernel.name)
        return low_precision_matmul(rows_RI, w_eOI, count_e, self.kernel.name, self.precision)

    def per_row(self, b_eO: Tensor, rows_RI: Tensor) -> Tensor:
        """(e, O) -> (R, O): for each row what its expert has (a bias), in the rows' dtype."""
        count_e, num_experts = self.counts.count_e.to(rows_RI.device), b_eO.shape[0]
        expert_R = torch.repeat_interleave(
            torch.arange(num_experts, device=rows_RI.device), count_e, output_size=rows_RI.shape[0]
        )
        return b_eO.to(rows_RI.dtype).index_select(0, expert_R)

    def _count_e(self, rows_RI: Tensor) -> Tensor:
        if not self.kernel.counts_on_host:
            return self.counts.count_e.to(rows_RI.device)
        return self.counts.count_e if self.counts.host_count_e is None else self.counts.host_count_e
