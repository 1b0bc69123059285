"""PyTorch's grouped matmul: float32, bfloat16 and float16, with widths whose rows are multiples of 16 bytes."""

import torch
import torch.nn.functional as F
from torch import Tensor

from spurline.device import has_doubtful_grouped_mm, has_grouped_mm_kernel
from spurline.moe.kernels.choose import grouped_mm_takes
from spurline.moe.kernels.kernel import Kernel, Verdict, Work
from spurline.moe.rows import Rows
from spurline.moe.telemetry import counted


class GroupedMMKernel(Kernel):
    def suits(self, work: Work) -> Verdict:
        if not grouped_mm_takes(work.dtype, work.width, work.hidden):
            return Verdict(
                0,
                "takes float32, bfloat16 and float16 with dim and hidden_dim that fill multiples of 16 bytes, not"
                f" {work.dtype} with dim {work.width} and hidden_dim {work.hidden}",
            )
        if work.device == "cpu":
            return Verdict(8, "on a CPU a loop inside PyTorch")
        if not has_grouped_mm_kernel(work.device, work.dtype):
            return Verdict(8, f"a loop inside PyTorch for {work.dtype} on this device, which waits for the row counts")
        if has_doubtful_grouped_mm(work.device):
            return Verdict(8, "one launch, but with wrong gradients on this device by reports (pytorch#193633)")
        return Verdict(15, "all experts in one launch; counts stay on the device")

    @counted("experts.grouped_mm")
    def run(self, experts, rows: Rows) -> Rows:  # type: ignore[no-untyped-def]
        return super().run(experts, rows)

    def matmul(self, rows_RI: Tensor, w_eOI: Tensor, count_e: Tensor) -> Tensor:
        if not rows_RI.shape[0]:  # which grouped_mm does not take
            return rows_RI.new_zeros(0, w_eOI.shape[1])
        is_dense = w_eOI.is_contiguous() or w_eOI.transpose(-2, -1).is_contiguous()
        dense_eOI = w_eOI if is_dense else w_eOI.contiguous()
        return F.grouped_mm(rows_RI.contiguous(), dense_eOI.transpose(-2, -1), offs=_offsets(count_e))

    def outer(self, a_RO: Tensor, b_RI: Tensor, count_e: Tensor) -> Tensor:
        if not a_RO.shape[0]:
            return a_RO.new_zeros(count_e.shape[0], a_RO.shape[1], b_RI.shape[1])
        return F.grouped_mm(a_RO.contiguous().t(), b_RI.contiguous(), offs=_offsets(count_e))


def _offsets(count_e: Tensor) -> Tensor:
    return count_e.cumsum(0).to(torch.int32)
