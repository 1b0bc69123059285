"""Fused SwiGLU experts, and their CPU kernel: one expert after another, on rows that stay in cache.

T tokens, S rows sorted by expert, e experts, D width, F hidden width. A kernel that computes complete SwiGLU experts
is two ops (Triton's are in `kernels/triton/`). `FusedKernel` calls them on `Rows`, `complete_op` adds fakes and
gradients:

    op(x_TD, w1_eFD, w3_eFD, w2_eDF, weight_S, base_TD, token_S, count_e, weigh_before, keep) -> y_TD, kept_2SF
    backward(grad_TD, x_TD, w1, w3, w2, weight_S, token_S, count_e, kept_2SF, weigh_before, need_weights)
        -> dx_TD, dw1, dw3, dw2, dweight_S

Rows are gathered from tokens (`token_S`) and added to them, so that no (S, D) tensor is ever made; without `token_S`,
the tokens are the rows. Only the arguments and the inputs of the activation, (2, S, F), are saved for the backward
pass; the rest is recomputed.

On a CPU, rows are processed in chunks: of one expert, or of several that have few rows. Each expert multiplies its own
part of a chunk; everything else is done for the entire chunk, as small operations are dominated by overhead. How a
chunk is multiplied is decided in `kernels/choose.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from spurline.moe.kernels.cpu.workspace import Matrices, WeightGradient, Workspace, multiply, sum_dtype
from spurline.moe.kernels.grouped import grouped_matmul
from spurline.moe.kernels.kernel import Kernel, Verdict, Work, rounds_no_operands
from spurline.moe.rows import Rows
from spurline.moe.telemetry import counted
from spurline.ops.functional import swiglu
from spurline.ops.rows import gather_rows, scatter_add_rows

if TYPE_CHECKING:
    from spurline.moe.experts.experts import Experts


class FusedKernel(Kernel):
    """A kernel whose `op` computes complete SwiGLU experts, from tokens with an index or from gathered rows."""

    op: ClassVar[Callable[..., tuple[Tensor, Tensor]]]
    path: ClassVar[str]
    """Its name in the fast-path counters."""

    @counted(lambda kernel, experts, rows: kernel.paths(rows))
    def run(self, experts: Experts, rows: Rows) -> Rows:
        if rows.token_S is None:
            return self._on_rows(experts, rows)
        y_TD, _ = self.op(
            rows.x,
            *experts.weights(),
            rows.weight_S,
            rows.onto_TD,
            rows.token_S,
            rows.counts.count_e,
            rows.weigh_before,
            torch.is_grad_enabled(),
        )
        return replace(rows, x=y_TD, is_combined=True)

    def paths(self, rows: Rows) -> list[str]:
        """The fast-path counters of this run."""
        on_tokens = ["experts.on_tokens", *rows.weighing(rows.x.dtype)]
        return [self.path] if rows.token_S is None else [self.path, *on_tokens]

    def _on_rows(self, experts: Experts, rows: Rows) -> Rows:
        keep, count_e, weight_R = torch.is_grad_enabled(), rows.counts.count_e, rows.weight_to_apply()
        y_RD, _ = self.op(rows.tensor(), *experts.weights(), weight_R, None, None, count_e, False, keep)
        return rows.output(y_RD, is_weighed=weight_R is not None)


def complete_op(op: Any, backward_op: Any) -> None:
    """Register fakes for both ops, and the gradient of the first: the second, or `plain_experts` under create_graph."""

    def backward(ctx, grad_TD, _):  # type: ignore[no-untyped-def]
        x_TD, w1, w3, w2, weight_S, token_S, count_e, kept_2SF = ctx.saved_tensors
        need = ctx.needs_input_grad
        if grad_TD is None:
            return (None,) * len(need)
        if torch.is_grad_enabled():
            # Differentiate with respect to aliases: if one input depends on another (routing weights depend on x), a
            # gradient with respect to the inputs themselves would include that path a second time.
            inputs: list[Any] = [t if t is None else t.view_as(t) for t in (x_TD, w1, w3, w2, weight_S)]
            wanted = [t for t, needed in zip(inputs, need[:5], strict=True) if t is not None and needed]
            x_TD, w1, w3, w2, weight_S = inputs
            y_TD = plain_experts(x_TD, w1, w3, w2, weight_S, token_S, count_e, ctx.weigh_before)
            found = iter(torch.autograd.grad(y_TD, wanted, grad_TD, create_graph=True))
            grads = [next(found) if needed else None for needed in need[:5]]
        else:
            every = backward_op(
                grad_TD, x_TD, w1, w3, w2, weight_S, token_S, count_e, kept_2SF, ctx.weigh_before, any(need[1:4])
            )
            grads = [grad if needed else None for grad, needed in zip(every, need[:5], strict=True)]
        return *grads, grad_TD if ctx.has_base else None, None, None, None, None

    op.register_fake(_fake)
    backward_op.register_fake(_fake_backward)
    op.register_autograd(backward, setup_context=_save)


def _fake(x_TD, w1_eFD, w3_eFD, w2_eDF, weight_S, base_TD, token_S, count_e, weigh_before, keep):  # type: ignore[no-untyped-def]
    num_rows = x_TD.shape[0] if token_S is None else token_S.shape[0]
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(2, num_rows if keep else 0, w1_eFD.shape[1])


def _fake_backward(  # type: ignore[no-untyped-def]
    grad_TD, x_TD, w1_eFD, w3_eFD, w2_eDF, weight_S, token_S, count_e, kept_2SF, weigh_before, need_weights
):
    dws = [w.new_empty(w.shape if need_weights else (0, *w.shape[1:])) for w in (w1_eFD, w3_eFD, w2_eDF)]
    sum_dtype = torch.promote_types(x_TD.dtype, torch.float32)
    dweight_S = x_TD.new_empty(0, dtype=sum_dtype) if weight_S is None else torch.empty_like(weight_S)
    return x_TD.new_empty(x_TD.shape), *dws, dweight_S


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x_TD, w1, w3, w2, weight_S, base_TD, token_S, count_e, ctx.weigh_before, keep = inputs
    assert keep, "experts need keep=True where gradients are wanted"
    ctx.has_base = base_TD is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x_TD, w1, w3, w2, weight_S, token_S, count_e, output[1])


def plain_experts(
    x_TD: Tensor,
    w1_eFD: Tensor,
    w3_eFD: Tensor,
    w2_eDF: Tensor,
    weight_S: Tensor | None,
    token_S: Tensor | None,
    count_e: Tensor,
    weigh_before: bool,
) -> Tensor:
    """Fused SwiGLU experts by ops that can be differentiated any number of times."""
    w1, w3, w2 = (w.to(x_TD.dtype) for w in (w1_eFD, w3_eFD, w2_eDF))
    rows = x_TD if token_S is None else gather_rows(x_TD, token_S)
    weight_S1 = None if weight_S is None else weight_S.to(x_TD.dtype).unsqueeze(1)
    if weight_S1 is not None and weigh_before:
        rows = rows * weight_S1
    hidden = swiglu(grouped_matmul(rows, w1, count_e, "loop"), grouped_matmul(rows, w3, count_e, "loop"))
    out = grouped_matmul(hidden, w2, count_e, "loop")
    if weight_S1 is not None and not weigh_before:
        out = out * weight_S1
    return out if token_S is None else scatter_add_rows(out, token_S, x_TD.shape[0])


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
    """(T, D) -> (T, D), each row's weighted expert output added to base_TD; and with `keep` what backward needs.

    The weight multiplies the input of the expert (`weigh_before`) or its output.
    """
    work = Workspace(x_TD, w1_eFD, count_e, token_S)
    y_TD = work.start_sum(base_TD)
    kept_2SF = work.empty((2, work.num_rows if keep else 0, w1_eFD.shape[1]), x_TD.dtype)
    kept = work.split(kept_2SF, dim=1)
    # If the dtype is the same, matmuls write directly to what is saved for the backward pass.
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
    """The gradients of x, w1, w3, w2 and weight_S; the matrices' are empty unless `need_weights`."""
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
