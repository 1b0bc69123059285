"""What surrounds a kernel that computes SwiGLU experts as a whole: fakes, gradients, and how rows go in and out.

T tokens, S rows sorted by expert, e experts, D width, F hidden width. Such a kernel is two ops:

    op(x_TD, w1_eFD, w3_eFD, w2_eDF, weight_S, base_TD, token_S, count_e, weigh_before, keep) -> y_TD, kept_2SF
    backward(grad_TD, x_TD, w1, w3, w2, weight_S, token_S, count_e, kept_2SF, weigh_before, need_weights)
        -> dx_TD, dw1, dw3, dw2, dweight_S

Rows are gathered from tokens (`token_S`) and added onto them; without `token_S`, the tokens are the rows. For the
backward pass only the arguments and kept_2SF are kept: the inputs of the activation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from spurline.moe.kernels.grouped import grouped_matmul
from spurline.moe.kernels.kernel import Kernel
from spurline.moe.rows import Rows
from spurline.moe.telemetry import counted
from spurline.ops.functional import swiglu
from spurline.ops.rows import gather_rows, scatter_add_rows

if TYPE_CHECKING:
    from spurline.moe.experts.experts import Experts


class FusedKernel(Kernel):
    """A kernel whose `op` computes SwiGLU experts as a whole, from rows among their tokens or in order."""

    op: ClassVar[Callable[..., tuple[Tensor, Tensor]]]
    path: ClassVar[str]
    """What the fast-path counters call it."""

    def run(self, experts: Experts, rows: Rows) -> Rows:
        return self._on_rows(experts, rows) if rows.token_S is None else self._on_tokens(experts, rows)

    @counted(lambda kernel, experts, rows: [kernel.path, "experts.on_tokens", *rows.weighing(rows.x.dtype)])
    def _on_tokens(self, experts: Experts, rows: Rows) -> Rows:
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

    @counted(lambda kernel, experts, rows: [kernel.path])
    def _on_rows(self, experts: Experts, rows: Rows) -> Rows:
        keep, count_e, weight_R = torch.is_grad_enabled(), rows.counts.count_e, rows.weight_to_apply()
        y_RD, _ = self.op(rows.tensor(), *experts.weights(), weight_R, None, None, count_e, False, keep)
        return rows.output(y_RD, is_weighed=weight_R is not None)


def complete_op(op: Any, backward_op: Any) -> None:
    """Give both ops their fakes, and the first one its gradient: the second, or plain products to go on from."""

    def backward(ctx, grad_TD, _):  # type: ignore[no-untyped-def]
        x_TD, w1, w3, w2, weight_S, token_S, count_e, kept_2SF = ctx.saved_tensors
        need = ctx.needs_input_grad
        if grad_TD is None:
            return (None,) * len(need)
        if torch.is_grad_enabled():
            # With respect to aliases: where one input depends on another (weights are routed from x), a gradient with
            # respect to the inputs themselves would go down that path a second time.
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
    """The same by ops that can be differentiated any number of times."""
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
