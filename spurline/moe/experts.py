"""The experts: E SwiGLU networks over rows that lie sorted by expert.

T tokens, R rows, D width, F hidden width, e experts on this rank. A backend is one function from rows, weights and row
counts to rows; `auto` picks for the device at hand. Where rows have not left their tokens, the experts can take them
from there and add their output back, without a copy of the rows.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spurline.comm.local import local
from spurline.moe.config import MoEConfig
from spurline.moe.dispatch.plan import Plan
from spurline.moe.kernels.cpu.stream import stream_experts
from spurline.moe.kernels.fused_weights import FusedWeights
from spurline.moe.kernels.grouped import grouped_matmul, grouped_mm_takes
from spurline.moe.registry import experts_backend
from spurline.moe.registry import register_experts_backend as register_experts_backend
from spurline.moe.telemetry import count

MOST_FUSED_ROWS = 256
"""Rows an expert may have for packed weights to be worth it: with more, they leave the cache between products."""
RowCounts = Tensor | list[int]
Backend = Callable[[Tensor, Tensor, Tensor, Tensor, RowCounts], Tensor]


def loop_experts(rows_RD: Tensor, w1_eFD: Tensor, w3_eFD: Tensor, w2_eDF: Tensor, rows_per_expert: RowCounts) -> Tensor:
    """One matmul per expert, inside a registered op: any dtype, any size, any counts."""
    count("experts.loop")
    return _grouped_swiglu(rows_RD, w1_eFD, w3_eFD, w2_eDF, rows_per_expert, kernel="loop")


def grouped_mm_experts(
    rows_RD: Tensor, w1_eFD: Tensor, w3_eFD: Tensor, w2_eDF: Tensor, rows_per_expert: RowCounts
) -> Tensor:
    """PyTorch's grouped matmul: fp32, bf16 and fp16, with widths whose rows are multiples of 16 bytes."""
    count("experts.grouped_mm")
    _, F_, D = w1_eFD.shape
    if not grouped_mm_takes(rows_RD.dtype, D, F_):
        raise ValueError(
            f"experts_backend 'grouped_mm' takes float32, bfloat16 and float16 with dim and hidden_dim that fill"
            f" multiples of 16 bytes, not {rows_RD.dtype} with dim {D} and hidden_dim {F_}: choose 'loop' or 'auto'"
        )
    return _grouped_swiglu(rows_RD, w1_eFD, w3_eFD, w2_eDF, rows_per_expert, kernel="grouped_mm")


def bmm_experts(rows_RD: Tensor, w1_eFD: Tensor, w3_eFD: Tensor, w2_eDF: Tensor, rows_per_expert: RowCounts) -> Tensor:
    """Batched matmuls, for experts that all have the same number of rows."""
    count("experts.bmm")
    num_rows = equal_count(rows_per_expert)
    if num_rows is None:
        raise ValueError(
            "experts_backend 'bmm' needs the same number of rows for every expert, known on the host"
            " (as with force_load_balance): choose 'loop' or 'auto'"
        )
    rows_ecD = rows_RD.reshape(len(rows_per_expert), num_rows, rows_RD.shape[1])
    hidden_ecF = F.silu(rows_ecD @ w1_eFD.transpose(-2, -1)) * (rows_ecD @ w3_eFD.transpose(-2, -1))
    out_ecD = hidden_ecF @ w2_eDF.transpose(-2, -1)
    # Not a view to autograd: FSDP warns of modules that return one.
    return torch.ops.aten._unsafe_view.default(out_ecD, rows_RD.shape)


def _grouped_swiglu(
    rows_RD: Tensor, w1_eFD: Tensor, w3_eFD: Tensor, w2_eDF: Tensor, rows_per_expert: RowCounts, kernel: str
) -> Tensor:
    count_e = rows_per_expert
    if isinstance(count_e, list):
        # Offsets are read on the device by PyTorch's kernel, on the host by the loop.
        count_e = torch.tensor(count_e, device=rows_RD.device if kernel == "grouped_mm" else "cpu")
    hidden_RF = F.silu(grouped_matmul(rows_RD, w1_eFD, count_e, kernel)) * grouped_matmul(
        rows_RD, w3_eFD, count_e, kernel
    )
    return grouped_matmul(hidden_RF, w2_eDF, count_e, kernel)


def stream_rows(rows_RD: Tensor, w1_eFD: Tensor, w3_eFD: Tensor, w2_eDF: Tensor, rows_per_expert: RowCounts) -> Tensor:
    """One expert after the other, on rows that stay in cache: any dtype, any size, any counts, on a CPU."""
    count("experts.stream")
    return _stream(rows_RD, (w1_eFD, w3_eFD, w2_eDF), rows_per_expert)


def _stream(
    x_TD: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    rows_per_expert: RowCounts,
    weight_S: Tensor | None = None,
    token_S: Tensor | None = None,
    base_TD: Tensor | None = None,
    weigh_before: bool = False,
) -> Tensor:
    count_e = rows_per_expert if isinstance(rows_per_expert, Tensor) else torch.tensor(rows_per_expert)
    keep = torch.is_grad_enabled()
    y_TD, _ = stream_experts(x_TD, *weights, weight_S, base_TD, token_S, count_e, weigh_before, keep)
    return y_TD


def equal_count(rows_per_expert: RowCounts) -> int | None:
    """The number of rows every expert has, if it is one number and known without asking a device."""
    if isinstance(rows_per_expert, Tensor):
        if rows_per_expert.device.type != "cpu" or torch.compiler.is_compiling():
            return None
        rows_per_expert = rows_per_expert.tolist()
    return rows_per_expert[0] if len(set(rows_per_expert)) == 1 else None


class Experts(nn.Module):
    def __init__(self, config: MoEConfig, init_std: float = 0.02, output_std: float | None = None) -> None:
        super().__init__()
        E, F_, D = config.num_experts, config.hidden_dim, config.dim
        self.backend = config.experts_backend
        self.std = {"w1_EFD": init_std, "w3_EFD": init_std, "w2_EDF": output_std or init_std}
        self.w1_EFD = nn.Parameter(torch.empty(E, F_, D))
        self.w3_EFD = nn.Parameter(torch.empty(E, F_, D))
        self.w2_EDF = nn.Parameter(torch.empty(E, D, F_))
        self.fused_weights = FusedWeights()

    @property
    def backend(self) -> str:
        return self._backend

    @backend.setter
    def backend(self, name: str) -> None:
        # Found now and not in each call, so that nothing is imported while a graph is traced.
        self._chosen = None if name == "auto" else experts_backend(name)
        self._backend = name

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator | None) -> None:
        std = self.std[name]
        nn.init.trunc_normal_(tensor, std=std, a=-3 * std, b=3 * std, generator=generator)

    def train(self, mode: bool = True) -> "Experts":
        if mode:
            self.fused_weights.clear()
        return super().train(mode)

    def forward(
        self, rows_RD: Tensor, rows_per_expert: RowCounts, plan: Plan | None = None, base_TD: Tensor | None = None
    ) -> Tensor:
        """(R, D), sorted by expert, and the rows of each -> (R, D).

        With a plan, tokens instead of rows (see `takes_tokens`), (T, D) -> (T, D): each token's weighted sum over its
        experts, added onto base_TD if there is one.
        """
        if plan is not None:
            return self._on_tokens(rows_RD, plan, base_TD)
        w1, w3, w2 = self._weights()
        if num_rows := self._rows_for_fused_weights(rows_per_expert):
            count("experts.fused_weights")
            return self.fused_weights.swiglu(rows_RD, num_rows, w1, w3, w2)
        backend = self._chosen or choose_backend(rows_RD, w1.shape[1], rows_per_expert)
        if backend is not stream_rows:  # which takes one expert's weights at a time to the dtype it multiplies in
            w1, w3, w2 = (w.to(rows_RD.dtype) for w in (w1, w3, w2))
        return backend(rows_RD, w1, w3, w2, rows_per_expert)

    def takes_tokens(self, x_TD: Tensor, plan: Plan) -> bool:
        """Whether the experts should take rows from the tokens by themselves: on a CPU, if rows stay on this rank."""
        if plan.steps or x_TD.device.type != "cpu" or self.backend not in ("auto", "stream"):
            return False
        return not self._rows_for_fused_weights(plan.rows_per_expert)

    def _on_tokens(self, x_TD: Tensor, plan: Plan, base_TD: Tensor | None) -> Tensor:
        count("experts.on_tokens")
        plan.count_weighing()
        before = plan.score_before_experts
        return _stream(x_TD, self._weights(), plan.rows_per_expert, plan.weight_S, plan.token_S, base_TD, before)

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return local(self.w1_EFD), local(self.w3_EFD), local(self.w2_EDF)

    def _rows_for_fused_weights(self, rows_per_expert: RowCounts) -> int | None:
        """The rows of each expert, if packed weights can serve them: as many for all, and no gradients."""
        if torch.is_grad_enabled():
            self.fused_weights.clear()
            return None
        if self.backend not in ("auto", "bmm") or torch.compiler.is_compiling():
            return None
        num_rows = equal_count(rows_per_expert)
        if num_rows is None or (self.backend == "auto" and num_rows > MOST_FUSED_ROWS):
            return None
        return num_rows if self.fused_weights.can_hold(*self._weights()) else None


def choose_backend(rows_RD: Tensor, hidden_dim: int, rows_per_expert: RowCounts) -> Backend:
    """What is fastest here: on a CPU one expert after the other, on a device no loop that would wait for counts."""
    if rows_RD.device.type == "cpu":
        return stream_rows
    if equal_count(rows_per_expert) is not None:
        return bmm_experts
    return grouped_mm_experts if grouped_mm_takes(rows_RD.dtype, rows_RD.shape[1], hidden_dim) else loop_experts
