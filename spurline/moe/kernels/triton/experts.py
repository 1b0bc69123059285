"""SwiGLU experts in Triton as a registered op: gather, matmul, activation, matmul, combine, all on the device.

T tokens, S rows sorted by expert, e experts, D width, F hidden width. What is saved for the backward pass is the same
as in the CPU kernel: inputs, routing, and the inputs of the activation. Triton is imported when the op runs.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from spurline.device import can_run_triton, has_grouped_mm_kernel
from spurline.moe.kernels.cpu.stream import FusedKernel, complete_op
from spurline.moe.kernels.kernel import Verdict, Work, rounds_no_operands

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HAS_TRITON = importlib.util.find_spec("triton") is not None


@torch.library.custom_op("spurline::triton_experts", mutates_args=())
def triton_experts(
    x_TD: Tensor,
    w1_eFD: Tensor,
    w3_eFD: Tensor,
    w2_eDF: Tensor,
    weight_S: Tensor | None,
    base_TD: Tensor | None,
    token_S: Tensor | None,
    count_e: Tensor,
    weigh_before: bool,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """(T, D) -> (T, D), each row's weighted expert output added to base_TD; and with `keep` what backward needs."""
    from spurline.moe.kernels.triton import launch

    return launch.forward(x_TD, w1_eFD, w3_eFD, w2_eDF, weight_S, base_TD, token_S, count_e, weigh_before, keep)


@torch.library.custom_op("spurline::triton_experts_backward", mutates_args=())
def triton_experts_backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    w1_eFD: Tensor,
    w3_eFD: Tensor,
    w2_eDF: Tensor,
    weight_S: Tensor | None,
    token_S: Tensor | None,
    count_e: Tensor,
    kept_2SF: Tensor,
    weigh_before: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, w1, w3, w2 and weight_S; the matrices' are empty unless `need_weights`."""
    from spurline.moe.kernels.triton import launch

    return launch.backward(
        grad_TD, x_TD, w1_eFD, w3_eFD, w2_eDF, weight_S, token_S, count_e, kept_2SF, weigh_before, need_weights
    )


complete_op(triton_experts, triton_experts_backward)


class TritonKernel(FusedKernel):
    path = "experts.triton"
    op = staticmethod(triton_experts)

    def suits(self, work: Work) -> Verdict:
        if not HAS_TRITON:
            return Verdict(0, "needs Triton (pip install 'spurline[triton]')")
        if work.experts != "swiglu":
            return Verdict(0, f"computes SwiGLU experts, not {work.experts!r} ones")
        if refused := rounds_no_operands(work):
            return refused
        if work.dtype not in DTYPES:
            return Verdict(0, f"takes bfloat16, float16 and float32, not {work.dtype}")
        if work.device == "cpu" and is_interpreted():
            return Verdict(1, "Triton's interpreter: for tests")
        if not can_run_triton(work.device):
            return Verdict(0, f"runs on NVIDIA's and AMD's accelerators, not on {work.device}")
        if has_grouped_mm_kernel(work.device, work.dtype):
            return Verdict(12, "keeps less for the backward pass than grouped_mm, which is one launch here too")
        return Verdict(18, "one launch per matmul, with fused gather and weighting; counts stay on the device")


def is_interpreted() -> bool:
    """Whether Triton kernels run in the interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
