"""The operations of an expert formula. R rows sorted by expert, e experts, I inputs, O outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spurline.lora.adapters import LowRank
from spurline.moe.kernels.grouped import grouped_matmul
from spurline.moe.kernels.kernel import Kernel
from spurline.moe.kernels.low_precision import low_precision_matmul
from spurline.moe.rows import RowCounts
from spurline.ops.low_precision import LowPrecision


@dataclass(frozen=True)
class Products:
    """The grouped matmuls and bias lookups of an expert formula, for rows with these counts."""

    kernel: Kernel
    counts: RowCounts
    weight_R: Tensor | None = None
    """The routing weight of each row, if the formula must apply it."""
    precision: LowPrecision | None = None
    """Precision of the matmuls, if not the rows' dtype."""

    def matmul(self, rows_RI: Tensor, w_eOI: Tensor | LowRank) -> Tensor:
        """(R, I) and (e, O, I) -> (R, O): each row times the transposed matrix of its expert, in the rows' dtype."""
        if isinstance(w_eOI, LowRank):
            of_adapter = self if self.precision is None else replace(self, precision=None)
            low_Rr = of_adapter.matmul(rows_RI, w_eOI.a) * w_eOI.scale
            return self.matmul(rows_RI, w_eOI.weight) + of_adapter.matmul(low_Rr, w_eOI.b)
        w_eOI, count_e = w_eOI.to(rows_RI.dtype), self._count_e(rows_RI)
        if self.precision is None:
            return grouped_matmul(rows_RI, w_eOI, count_e, self.kernel.name)
        return low_precision_matmul(rows_RI, w_eOI, count_e, self.kernel.name, self.precision)

    def per_row(self, b_eO: Tensor, rows_RI: Tensor) -> Tensor:
        """(e, O) -> (R, O): for each row the vector of its expert (a bias), in the rows' dtype."""
        count_e, num_experts = self.counts.count_e.to(rows_RI.device), b_eO.shape[0]
        expert_R = torch.repeat_interleave(
            torch.arange(num_experts, device=rows_RI.device), count_e, output_size=rows_RI.shape[0]
        )
        return b_eO.to(rows_RI.dtype).index_select(0, expert_R)

    def _count_e(self, rows_RI: Tensor) -> Tensor:
        if not self.kernel.counts_on_host:
            return self.counts.count_e.to(rows_RI.device)
        return self.counts.count_e if self.counts.host_count_e is None else self.counts.host_count_e
