"""Experts one after the other, on rows that stay in cache: take rows, multiply, activate, multiply, give back.

T tokens, S rows sorted by expert, e experts, D width, F hidden width. Rows are taken from tokens (`token_S`) and added
onto them, so that no (S, D) tensor is ever made; without `token_S`, the tokens are the rows. For the backward pass only
what stands before the activation is kept, (2, S, F); the rest is computed again, chunk by chunk.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spurline.moe.ops import memory
from spurline.moe.ops.grouped import grouped_matmul
from spurline.moe.ops.precision import product_dtype, sum_dtype
from spurline.moe.ops.rows import gather_rows, scatter_add_rows

CHUNK = 1024
"""Rows that are worked on at a time: enough to keep the cores busy, few enough to stay in cache."""

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

    The weight multiplies what goes into the expert (`weigh_before`) or what comes out of it.
    """
    work = _Workspace(x_TD, w1_eFD, count_e, token_S)
    y_TD = work.start_sum(base_TD)
    kept_2SF = memory.empty((2, work.num_rows if keep else 0, w1_eFD.shape[1]), x_TD)
    weight_S1 = work.column(weight_S)
    for chunk in work.chunks():
        rows = work.take(x_TD, chunk, "rows")
        if weigh_before and weight_S1 is not None:
            rows = torch.mul(rows, weight_S1[chunk.span], out=work.wide("weighted rows", chunk))
        # In its place for the backward pass at once, where the dtype is the same.
        kept = kept_2SF[:, chunk.span].unbind() if keep and work.dtype == x_TD.dtype else None
        gate, up = kept or (work.narrow("gate", chunk), work.narrow("up", chunk))
        torch.mm(rows, work.matrix(w1_eFD, chunk, "w1").t(), out=gate)
        torch.mm(rows, work.matrix(w3_eFD, chunk, "w3").t(), out=up)
        if keep and kept is None:
            kept_2SF[0, chunk.span], kept_2SF[1, chunk.span] = gate, up
        hidden = _silu(gate, out=work.narrow("hidden", chunk)).mul_(up)
        if not weigh_before and weight_S1 is not None:
            hidden.mul_(weight_S1[chunk.span])
        out = work.place_for_result(y_TD, chunk)
        torch.mm(hidden, work.matrix(w2_eDF, chunk, "w2").t(), out=out)
        work.give(y_TD, chunk, out)
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
    work = _Workspace(x_TD, w1_eFD, count_e, token_S)
    dx_TD = work.start_sum(None)
    dw1_eFD, dw3_eFD, dw2_eDF = (
        memory.empty(tuple(w.shape) if need_weights else (0,), w) for w in (w1_eFD, w3_eFD, w2_eDF)
    )
    dweight_S = x_TD.new_empty(0 if weight_S is None else work.num_rows, dtype=sum_dtype(x_TD.dtype))
    weight_S1 = work.column(weight_S)
    for chunk in work.chunks():
        gate, up = work.lift(kept_2SF[0, chunk.span], "gate"), work.lift(kept_2SF[1, chunk.span], "up")
        grad = work.take(grad_TD, chunk, "gradient")
        dhidden = torch.mm(grad, work.matrix(w2_eDF, chunk, "w2"), out=work.narrow("dhidden", chunk))
        active = _silu(gate, out=work.narrow("active", chunk))
        hidden = torch.mul(active, up, out=work.narrow("hidden", chunk))
        if not weigh_before and weight_S1 is not None:
            products = torch.mul(dhidden, hidden, out=work.narrow("products", chunk))
            torch.sum(products, 1, out=dweight_S[chunk.span])
            hidden.mul_(weight_S1[chunk.span])
            dhidden.mul_(weight_S1[chunk.span])
        if need_weights:
            work.add_outer(dw2_eDF, chunk, grad, hidden, "dw2")
        dup = active.mul_(dhidden)
        dgate = _silu_backward(dhidden.mul_(up), gate, grad_input=hidden)

        rows = work.take(x_TD, chunk, "rows")
        if need_weights:
            inputs = rows
            if weigh_before and weight_S1 is not None:
                inputs = torch.mul(rows, weight_S1[chunk.span], out=work.wide("weighted rows", chunk))
            work.add_outer(dw1_eFD, chunk, dgate, inputs, "dw1")
            work.add_outer(dw3_eFD, chunk, dup, inputs, "dw3")
        dx = work.place_for_result(dx_TD, chunk)
        torch.mm(dgate, work.matrix(w1_eFD, chunk, "w1"), out=dx).addmm_(dup, work.matrix(w3_eFD, chunk, "w3"))
        if weigh_before and weight_S1 is not None:
            products = torch.mul(dx, rows, out=work.wide("products of rows", chunk))
            torch.sum(products, 1, out=dweight_S[chunk.span])
            dx.mul_(weight_S1[chunk.span])
        work.give(dx_TD, chunk, dx)
    if need_weights:
        work.clear_experts_without_rows(dw1_eFD, dw3_eFD, dw2_eDF)
    dweight_S = dweight_S if weight_S is None else dweight_S.to(weight_S.dtype)
    return dx_TD.to(x_TD.dtype), dw1_eFD, dw3_eFD, dw2_eDF, dweight_S


class _Chunk(NamedTuple):
    """Neighbouring rows of one expert."""

    expert: int
    span: slice
    is_first: bool
    is_last: bool

    @property
    def size(self) -> int:
        return self.span.stop - self.span.start


class _Workspace:
    """What lies at hand while experts work: buffers for one chunk, in the dtype of the products."""

    def __init__(self, x_TD: Tensor, w1_eFD: Tensor, count_e: Tensor, token_S: Tensor | None) -> None:
        self.like, self.token_S = x_TD, token_S
        self.num_rows = x_TD.shape[0] if token_S is None else token_S.shape[0]
        self.dtype = product_dtype(x_TD)
        self.sum_dtype = sum_dtype(x_TD.dtype)
        self.counts: list[int] = count_e.tolist()
        assert sum(self.counts) == self.num_rows, f"counts add up to {sum(self.counts)}, not to {self.num_rows} rows"
        # The sum of a weight's gradient over chunks would be rounded after each, which only a wide dtype can bear.
        self.chunk_size = CHUNK if self.dtype == self.sum_dtype else self.num_rows
        self._most_rows = min(self.chunk_size, max(self.counts, default=0))
        _, self._narrow, self._wide = w1_eFD.shape
        self._buffers: dict[str, Tensor] = {}

    def chunks(self) -> Iterator[_Chunk]:
        start = 0
        for expert, count in enumerate(self.counts):
            end = start + count
            for first in range(start, end, max(self.chunk_size, 1)):
                last = min(first + self.chunk_size, end)
                yield _Chunk(expert, slice(first, last), first == start, last == end)
            start = end

    def narrow(self, name: str, chunk: _Chunk) -> Tensor:
        """A buffer (rows of the chunk, F)."""
        return self._buffer(name, (self._most_rows, self._narrow), self.dtype)[: chunk.size]

    def wide(self, name: str, chunk: _Chunk) -> Tensor:
        """A buffer (rows of the chunk, D)."""
        return self._buffer(name, (self._most_rows, self._wide), self.dtype)[: chunk.size]

    def take(self, x_TD: Tensor, chunk: _Chunk, name: str) -> Tensor:
        """The chunk's rows of x, in the dtype of the products."""
        if self.token_S is None:
            return self.lift(x_TD[chunk.span], name)
        buffer = self._buffer(f"{name} as they are", (self._most_rows, self._wide), x_TD.dtype)[: chunk.size]
        return self.lift(torch.index_select(x_TD, 0, self.token_S[chunk.span], out=buffer), name)

    def lift(self, rows: Tensor, name: str) -> Tensor:
        """The rows in the dtype of the products: themselves if that is theirs."""
        if rows.dtype == self.dtype:
            return rows
        return self._buffer(name, (self._most_rows, rows.shape[1]), self.dtype)[: len(rows)].copy_(rows)

    def matrix(self, w: Tensor, chunk: _Chunk, name: str) -> Tensor:
        """The expert's matrix, in the dtype of the products."""
        if w.dtype == self.dtype:
            return w[chunk.expert]
        buffer = self._buffer(name, tuple(w.shape[1:]), self.dtype)
        return buffer.copy_(w[chunk.expert]) if chunk.is_first else buffer

    def column(self, weight_S: Tensor | None) -> Tensor | None:
        return None if weight_S is None else weight_S.to(self.dtype).unsqueeze(1)

    def start_sum(self, base_TD: Tensor | None) -> Tensor:
        """What rows are given back to: sums over experts in a wide dtype, or the rows themselves."""
        dtype = self.like.dtype if self.token_S is None else self.sum_dtype
        shape = tuple(self.like.shape)
        if base_TD is not None:
            return memory.empty(shape, self.like, dtype).copy_(base_TD)
        return memory.empty(shape, self.like, dtype) if self.token_S is None else memory.zeros(shape, self.like, dtype)

    def place_for_result(self, y_TD: Tensor, chunk: _Chunk) -> Tensor:
        """Where a product is written that `give` brings to y: in y itself, if rows are not summed."""
        if self.token_S is None and y_TD.dtype == self.dtype:
            return y_TD[chunk.span]
        return self.wide("result", chunk)

    def give(self, y_TD: Tensor, chunk: _Chunk, rows: Tensor) -> None:
        """Add the chunk's rows onto their tokens, or put them in their places."""
        if self.token_S is not None:
            if rows.dtype != y_TD.dtype:
                rows = self._buffer("result to sum", (self._most_rows, self._wide), y_TD.dtype)[: chunk.size].copy_(
                    rows
                )
            y_TD.index_add_(0, self.token_S[chunk.span], rows)
        elif rows.dtype != y_TD.dtype:
            y_TD[chunk.span] = rows

    def add_outer(self, grad_eOI: Tensor, chunk: _Chunk, a: Tensor, b: Tensor, name: str) -> None:
        """Add a^T b to the expert's gradient, which the first chunk starts."""
        same = grad_eOI.dtype == self.dtype
        total = grad_eOI[chunk.expert] if same else self._buffer(name, tuple(grad_eOI.shape[1:]), self.dtype)
        torch.addmm(total, a.t(), b, beta=0 if chunk.is_first else 1, out=total)
        if chunk.is_last and not same:
            grad_eOI[chunk.expert] = total

    def clear_experts_without_rows(self, *grads: Tensor) -> None:
        for expert, count in enumerate(self.counts):
            if not count:
                for grad in grads:
                    grad[expert].zero_()

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name not in self._buffers:
            self._buffers[name] = memory.empty(shape, self.like, dtype)
        return self._buffers[name]


@stream_experts.register_fake
def _(x_TD, w1_eFD, w3_eFD, w2_eDF, weight_S, base_TD, token_S, count_e, weigh_before, keep):  # type: ignore[no-untyped-def]
    num_rows = x_TD.shape[0] if token_S is None else token_S.shape[0]
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(2, num_rows if keep else 0, w1_eFD.shape[1])


@stream_experts_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    grad_TD, x_TD, w1_eFD, w3_eFD, w2_eDF, weight_S, token_S, count_e, kept_2SF, weigh_before, need_weights
):
    dws = [w.new_empty(w.shape if need_weights else 0) for w in (w1_eFD, w3_eFD, w2_eDF)]
    dweight_S = x_TD.new_empty(0, dtype=sum_dtype(x_TD.dtype)) if weight_S is None else torch.empty_like(weight_S)
    return x_TD.new_empty(x_TD.shape), *dws, dweight_S


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x_TD, w1, w3, w2, weight_S, base_TD, token_S, count_e, ctx.weigh_before, keep = inputs
    assert keep, "stream_experts needs keep=True where gradients are wanted"
    ctx.has_base = base_TD is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x_TD, w1, w3, w2, weight_S, token_S, count_e, output[1])


def _backward(ctx, grad_TD, _):  # type: ignore[no-untyped-def]
    x_TD, w1, w3, w2, weight_S, token_S, count_e, kept_2SF = ctx.saved_tensors
    need = ctx.needs_input_grad
    if grad_TD is None:
        return (None,) * len(need)
    if torch.is_grad_enabled():
        wanted = [t for t, needed in zip((x_TD, w1, w3, w2, weight_S), need[:5], strict=True) if needed]
        y_TD = plain_experts(x_TD, w1, w3, w2, weight_S, token_S, count_e, ctx.weigh_before)
        found = iter(torch.autograd.grad(y_TD, wanted, grad_TD, create_graph=True))
        grads = [next(found) if needed else None for needed in need[:5]]
    else:
        every = stream_experts_backward(
            grad_TD, x_TD, w1, w3, w2, weight_S, token_S, count_e, kept_2SF, ctx.weigh_before, any(need[1:4])
        )
        grads = [grad if needed else None for grad, needed in zip(every, need[:5], strict=True)]
    return *grads, grad_TD if ctx.has_base else None, None, None, None, None


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
    hidden = F.silu(grouped_matmul(rows, w1, count_e, "loop")) * grouped_matmul(rows, w3, count_e, "loop")
    out = grouped_matmul(hidden, w2, count_e, "loop")
    if weight_S1 is not None and not weigh_before:
        out = out * weight_S1
    return out if token_S is None else scatter_add_rows(out, token_S, x_TD.shape[0])


stream_experts.register_autograd(_backward, setup_context=_save)
