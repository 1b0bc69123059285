"""SwiGLU experts one after the other, on rows that stay in cache: gather, multiply, activate, multiply, scatter-add.

T tokens, S rows sorted by expert, e experts, D width, F hidden width. Rows are gathered from tokens (`token_S`) and
added onto them, so that no (S, D) tensor is ever made; without `token_S`, the tokens are the rows. For the backward
pass only the inputs of the activation are kept, (2, S, F); the rest is recomputed.

Work goes by chunks of rows: of one expert, or of several that have few. Each expert multiplies its own part of a chunk;
everything else is done for the chunk as a whole, as small operations cost more than their arithmetic. How a chunk is
multiplied is decided in `kernels/choose.py`.
"""

import torch
from torch import Tensor

from spurline.moe.kernels.cpu.workspace import Matrices, WeightGradient, Workspace, multiply, sum_dtype
from spurline.moe.kernels.fused import FusedKernel, complete_op
from spurline.moe.kernels.kernel import Verdict, Work, rounds_no_operands

_silu = torch.ops.aten.silu.out
_silu_backward = torch.ops.aten.silu_backward.grad_input


@torch.library.custom_op("spurline::stream_experts", mutates_args=())
def stream_experts(
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
    """(T, D) -> (T, D), each row's expert output, weighted, added onto base_TD; and with `keep` what backward needs.

    The weight multiplies the input of the expert (`weigh_before`) or its output.
    """
    work = Workspace(x_TD, w1_eFD, count_e, token_S)
    y_TD = work.start_sum(base_TD)
    kept_2SF = work.empty((2, work.num_rows if keep else 0, w1_eFD.shape[1]), x_TD.dtype)
    kept = work.split(kept_2SF, dim=1)
    # Products are written to their place for the backward pass at once, where the dtype is the same.
    keeps_as_it_is = keep and work.dtype == x_TD.dtype
    w1_eDF, w3_eDF, w2_eFD = Matrices(w1_eFD.mT, work), Matrices(w3_eFD.mT, work), Matrices(w2_eDF.mT, work)
    for chunk, weight in zip(work.chunks, work.weights(weight_S), strict=True):
        rows = work.gather_rows(x_TD, chunk, "rows")
        if weigh_before and weight is not None:
            rows = torch.mul(rows, weight, out=work.buffer("weighted rows", chunk.size, work.width))
        gate, up = kept[chunk.number]
        if not keeps_as_it_is:
            gate, up = (work.buffer(name, chunk.size, work.hidden) for name in ("gate", "up"))
        multiply(chunk, rows, w1_eDF, out=gate)
        multiply(chunk, rows, w3_eDF, out=up)
        if keep and not keeps_as_it_is:
            kept[chunk.number][0].copy_(gate)
            kept[chunk.number][1].copy_(up)
        hidden = _silu(gate, out=work.buffer("hidden", chunk.size, work.hidden)).mul_(up)
        if weight is not None and not weigh_before:
            hidden.mul_(weight)
        work.scatter_add_rows(y_TD, chunk, multiply(chunk, hidden, w2_eFD, out=work.place_for_result(y_TD, chunk)))
    return y_TD.to(x_TD.dtype), kept_2SF


@torch.library.custom_op("spurline::stream_experts_backward", mutates_args=())
def stream_experts_backward(
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
    """The gradients of x, w1, w3, w2 and weight_S; those of the matrices are empty unless `need_weights`."""
    work = Workspace(x_TD, w1_eFD, count_e, token_S)
    dx_TD = work.start_sum(None)
    dweight_S = x_TD.new_empty(0 if weight_S is None else work.num_rows, dtype=sum_dtype(x_TD.dtype))
    dweights = work.split(dweight_S)
    w1, w3, w2 = (Matrices(w, work) for w in (w1_eFD, w3_eFD, w2_eDF))
    dw1, dw3, dw2 = (
        WeightGradient(w if need_weights else w[:0], work.counts, work.dtype) for w in (w1_eFD, w3_eFD, w2_eDF)
    )
    kept = work.split(kept_2SF, dim=1)
    for chunk, weight in zip(work.chunks, work.weights(weight_S), strict=True):
        gate, up = (work.lift(part, name) for part, name in zip(kept[chunk.number], ("gate", "up"), strict=True))
        grad = work.gather_rows(grad_TD, chunk, "gradient")
        dhidden = multiply(chunk, grad, w2, out=work.buffer("dhidden", chunk.size, work.hidden))
        active = _silu(gate, out=work.buffer("active", chunk.size, work.hidden))
        hidden = torch.mul(active, up, out=work.buffer("hidden", chunk.size, work.hidden))
        if weight is not None and not weigh_before:
            products = torch.mul(dhidden, hidden, out=work.buffer("products", chunk.size, work.hidden))
            torch.sum(products, 1, out=dweights[chunk.number])
            hidden.mul_(weight)
            dhidden.mul_(weight)
        if need_weights:
            dw2.add_outer(chunk, grad, hidden)
        dup = active.mul_(dhidden)
        dgate = _silu_backward(dhidden.mul_(up), gate, grad_input=hidden)

        rows = work.gather_rows(x_TD, chunk, "rows")
        if need_weights:
            inputs = rows
            if weigh_before and weight is not None:
                inputs = torch.mul(rows, weight, out=work.buffer("weighted rows", chunk.size, work.width))
            dw1.add_outer(chunk, dgate, inputs)
            dw3.add_outer(chunk, dup, inputs)
        dx = multiply(chunk, dgate, w1, out=work.place_for_result(dx_TD, chunk))
        multiply(chunk, dup, w3, out=dx, add=True)
        if weigh_before and weight is not None:
            products = torch.mul(dx, rows, out=work.buffer("products", chunk.size, work.width))
            torch.sum(products, 1, out=dweights[chunk.number])
            dx.mul_(weight)
        work.scatter_add_rows(dx_TD, chunk, dx)
    dweight_S = dweight_S if weight_S is None else dweight_S.to(weight_S.dtype)
    return dx_TD.to(x_TD.dtype), dw1.finish(), dw3.finish(), dw2.finish(), dweight_S


complete_op(stream_experts, stream_experts_backward)


class StreamKernel(FusedKernel):
    counts_on_host = True
    path = "experts.stream"
    op = staticmethod(stream_experts)

    def suits(self, work: Work) -> Verdict:
        if work.device != "cpu":
            return Verdict(0, f"runs on CPUs, not on {work.device}")
        if work.experts != "swiglu":
            return Verdict(0, f"computes SwiGLU experts, not {work.experts!r} ones")
        return rounds_no_operands(work) or Verdict(30, "rows stream through the cache, without copies of them")
