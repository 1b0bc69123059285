"""Experts one after the other, on rows that stay in cache: take rows, multiply, activate, multiply, give back.

T tokens, S rows sorted by expert, e experts, D width, F hidden width. Rows are taken from tokens (`token_S`) and added
onto them, so that no (S, D) tensor is ever made; without `token_S`, the tokens are the rows. For the backward pass only
what stands before the activation is kept, (2, S, F); the rest is computed again.

Work goes by chunks of rows: of one expert, or of several that have few. Each expert multiplies its own part of a chunk;
all else is done for the chunk as a whole, as small operations cost more than their arithmetic. Where parts are many,
PyTorch's grouped matmul goes over them, unless most have so few rows that they go as columns (`ops/skinny_matmul.py`).
"""

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from spurline.moe.kernels.cpu import buffers
from spurline.moe.kernels.cpu.chunks import Chunk, Part, make_chunks
from spurline.moe.kernels.cpu.precision import product_dtype, sum_dtype
from spurline.moe.kernels.grouped import grouped_matmul, grouped_mm_takes
from spurline.ops.rows import gather_rows, scatter_add_rows
from spurline.ops.skinny_matmul import least_rows, most_skinny_rows

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
    kept_2SF = buffers.empty((2, work.num_rows if keep else 0, w1_eFD.shape[1]), x_TD)
    kept = work.split(kept_2SF[0]), work.split(kept_2SF[1])
    # Products are written to their place for the backward pass at once, where the dtype is the same.
    keeps_as_it_is = keep and work.dtype == x_TD.dtype
    w1_eDF, w3_eDF, w2_eFD = (work.matrices(w.mT) for w in (w1_eFD, w3_eFD, w2_eDF))
    for chunk, weight in zip(work.chunks, work.weights(weight_S), strict=True):
        rows = work.gather_rows(x_TD, chunk, "rows")
        if weigh_before and weight is not None:
            rows = torch.mul(rows, weight, out=work.wide("weighted rows", chunk))
        gate = kept[0][chunk.number] if keeps_as_it_is else work.narrow("gate", chunk)
        up = kept[1][chunk.number] if keeps_as_it_is else work.narrow("up", chunk)
        multiply(chunk, rows, w1_eDF, out=gate)
        multiply(chunk, rows, w3_eDF, out=up)
        if keep and not keeps_as_it_is:
            kept[0][chunk.number].copy_(gate)
            kept[1][chunk.number].copy_(up)
        hidden = _silu(gate, out=work.narrow("hidden", chunk)).mul_(up)
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
    work = _Workspace(x_TD, w1_eFD, count_e, token_S)
    dx_TD = work.start_sum(None)
    dweight_S = x_TD.new_empty(0 if weight_S is None else work.num_rows, dtype=sum_dtype(x_TD.dtype))
    dweights = work.split(dweight_S)
    w1, w3, w2 = (work.matrices(w) for w in (w1_eFD, w3_eFD, w2_eDF))
    dw1, dw3, dw2 = (work.gradient(w if need_weights else w[:0]) for w in (w1_eFD, w3_eFD, w2_eDF))
    gates, ups = work.split(kept_2SF[0]), work.split(kept_2SF[1])
    for chunk, weight in zip(work.chunks, work.weights(weight_S), strict=True):
        gate, up = work.lift(gates[chunk.number], "gate"), work.lift(ups[chunk.number], "up")
        grad = work.gather_rows(grad_TD, chunk, "gradient")
        dhidden = multiply(chunk, grad, w2, out=work.narrow("dhidden", chunk))
        active = _silu(gate, out=work.narrow("active", chunk))
        hidden = torch.mul(active, up, out=work.narrow("hidden", chunk))
        if weight is not None and not weigh_before:
            products = torch.mul(dhidden, hidden, out=work.narrow("products", chunk))
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
                inputs = torch.mul(rows, weight, out=work.wide("weighted rows", chunk))
            dw1.add_outer(chunk, dgate, inputs)
            dw3.add_outer(chunk, dup, inputs)
        dx = multiply(chunk, dgate, w1, out=work.place_for_result(dx_TD, chunk))
        multiply(chunk, dup, w3, out=dx, add=True)
        if weigh_before and weight is not None:
            products = torch.mul(dx, rows, out=work.wide("products", chunk))
            torch.sum(products, 1, out=dweights[chunk.number])
            dx.mul_(weight)
        work.scatter_add_rows(dx_TD, chunk, dx)
    dweight_S = dweight_S if weight_S is None else dweight_S.to(weight_S.dtype)
    return dx_TD.to(x_TD.dtype), dw1.finish(), dw3.finish(), dw2.finish(), dweight_S


def multiply(chunk: Chunk, rows: Tensor, matrices: "_Matrices", out: Tensor, add: bool = False) -> Tensor:
    """Each part's rows with the matrix of its expert, written to `out` or added onto it."""
    if matrices.skinny_rows and not add and chunk.is_mostly_skinny(matrices.skinny_rows):
        return _skinny_products(chunk, rows, matrices, out)
    if chunk.end_e is not None and matrices.can_be_grouped and rows.is_contiguous():
        product = F.grouped_mm(rows, matrices.between(chunk.parts[0], chunk.parts[-1]), offs=chunk.end_e)
        return out.add_(product) if add else out.copy_(product)
    for part, a, result in zip(chunk.parts, chunk.split(rows), chunk.split(out), strict=True):
        if add:
            result.addmm_(a, matrices.of(part))
        else:
            torch.mm(a, matrices.of(part), out=result)
    return out


def _skinny_products(chunk: Chunk, rows: Tensor, matrices: "_Matrices", out: Tensor) -> Tensor:
    """The same with few rows as columns; see `ops/skinny_matmul.py`."""
    columns, out_columns = rows.t(), out.t()
    least = least_rows(rows.shape[1])
    start = 0
    for part in chunk.parts:
        if part.size <= matrices.skinny_rows:
            # A single row has its neighbour for company, whose own product overwrites this one in the next turn.
            size = min(max(part.size, least), chunk.size - start)
            product = torch.mm(matrices.of(part).t(), columns.narrow(1, start, size))
            out_columns.narrow(1, start, size).copy_(product)
        else:
            torch.mm(rows.narrow(0, start, part.size), matrices.of(part), out=out.narrow(0, start, part.size))
        start += part.size
    return out


class _Matrices:
    """One matrix of every expert, in the dtype of the products."""

    def __init__(self, w_eIO: Tensor, dtype: torch.dtype) -> None:
        self._all = w_eIO
        self._lifted = None if w_eIO.dtype == dtype else torch.empty_like(w_eIO[0], dtype=dtype)
        is_dense = w_eIO.is_contiguous() or w_eIO.mT.is_contiguous()
        self.skinny_rows = most_skinny_rows((w_eIO[0] if self._lifted is None else self._lifted).t())
        self.can_be_grouped = self._lifted is None and is_dense and grouped_mm_takes(dtype, *w_eIO.shape[1:])

    @cached_property
    def _each(self) -> tuple[Tensor, ...]:
        return self._all.unbind()

    def of(self, part: Part) -> Tensor:
        matrix = self._each[part.expert]
        if self._lifted is None:
            return matrix
        return self._lifted.copy_(matrix) if part.is_first else self._lifted

    def between(self, first: Part, last: Part) -> Tensor:
        """Those from one part to another."""
        return self._all[first.expert : last.expert + 1]


class _Workspace:
    """What lies at hand while experts work: rows cut into chunks, and buffers for one, in the dtype of the products."""

    def __init__(self, x_TD: Tensor, w1_eFD: Tensor, count_e: Tensor, token_S: Tensor | None) -> None:
        self.like = x_TD
        self.sums_by_token = token_S is not None
        self.num_rows = x_TD.shape[0] if token_S is None else token_S.shape[0]
        self.dtype = product_dtype(x_TD)
        self.counts: list[int] = count_e.tolist()
        assert sum(self.counts) == self.num_rows, (
            f"row counts add up to {sum(self.counts)}, but there are {self.num_rows} rows"
        )
        # The sum of a weight's gradient over chunks would be rounded after each, which only a wide dtype can bear.
        whole_experts = self.dtype != sum_dtype(x_TD.dtype)
        self.chunks = make_chunks(self.counts, x_TD.shape[1], whole_experts)
        self._sizes = [chunk.size for chunk in self.chunks]
        self._tokens = self.split(token_S) if token_S is not None else ()
        self._most_rows = max(self._sizes, default=0)
        _, self._narrow, self._wide = w1_eFD.shape
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[tuple[str, int], Tensor] = {}

    def split(self, rows_S: Tensor) -> tuple[Tensor, ...]:
        """The rows of each chunk; nothing if there are none."""
        return rows_S.split(self._sizes) if rows_S.shape[0] else (rows_S,) * len(self._sizes)

    def weights(self, weight_S: Tensor | None) -> Sequence[Tensor | None]:
        """The weights of each chunk's rows, as columns."""
        if weight_S is None:
            return [None] * len(self.chunks)
        return self.split(weight_S.to(self.dtype).unsqueeze(1))

    def narrow(self, name: str, chunk: Chunk) -> Tensor:
        """A buffer (rows of the chunk, F)."""
        return self._buffer(name, chunk.size, self._narrow, self.dtype)

    def wide(self, name: str, chunk: Chunk) -> Tensor:
        """A buffer (rows of the chunk, D)."""
        return self._buffer(name, chunk.size, self._wide, self.dtype)

    def gather_rows(self, x_TD: Tensor, chunk: Chunk, name: str) -> Tensor:
        """The chunk's rows of x, in the dtype of the products."""
        if not self.sums_by_token:
            return self.lift(self.split(x_TD)[chunk.number], name)
        buffer = self._buffer(f"{name} as they are", chunk.size, self._wide, x_TD.dtype)
        return self.lift(torch.index_select(x_TD, 0, self._tokens[chunk.number], out=buffer), name)

    def lift(self, rows: Tensor, name: str) -> Tensor:
        """The rows in the dtype of the products: themselves if that is theirs."""
        if rows.dtype == self.dtype:
            return rows
        return self._buffer(name, rows.shape[0], rows.shape[1], self.dtype).copy_(rows)

    def matrices(self, w_eIO: Tensor) -> _Matrices:
        return _Matrices(w_eIO, self.dtype)

    def gradient(self, w_eOI: Tensor) -> "_WeightGradient":
        return _WeightGradient(w_eOI, self.counts, self.dtype)

    def start_sum(self, base_TD: Tensor | None) -> Tensor:
        """What rows are given back to: sums over experts in a wide dtype, or the rows themselves."""
        dtype = sum_dtype(self.like.dtype) if self.sums_by_token else self.like.dtype
        sum_TD = buffers.empty(tuple(self.like.shape), self.like, dtype)
        if base_TD is not None:
            return sum_TD.copy_(base_TD)
        return sum_TD.zero_() if self.sums_by_token else sum_TD

    def place_for_result(self, y_TD: Tensor, chunk: Chunk) -> Tensor:
        """Where a product is written that `scatter_add_rows` brings to y: in y itself, if rows are not summed."""
        if not self.sums_by_token and y_TD.dtype == self.dtype:
            return self.split(y_TD)[chunk.number]
        return self.wide("result", chunk)

    def scatter_add_rows(self, y_TD: Tensor, chunk: Chunk, rows: Tensor) -> None:
        """Add the chunk's rows onto their tokens, or put them in their places."""
        if self.sums_by_token:
            if rows.dtype != y_TD.dtype:
                rows = self._buffer("result to sum", chunk.size, self._wide, y_TD.dtype).copy_(rows)
            y_TD.index_add_(0, self._tokens[chunk.number], rows)
        elif rows.dtype != y_TD.dtype:
            self.split(y_TD)[chunk.number].copy_(rows)

    def _buffer(self, name: str, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        # Small experts make views as dear as arithmetic, so views are kept as well.
        view = self._views.get((name, num_rows))
        if view is None:
            if name not in self._buffers:
                self._buffers[name] = buffers.empty((self._most_rows, width), self.like, dtype)
            view = self._views[name, num_rows] = self._buffers[name][:num_rows]
        return view


class _WeightGradient:
    """The gradient of one matrix of every expert."""

    def __init__(self, w_eOI: Tensor, counts: list[int], dtype: torch.dtype) -> None:
        self.grad_eOI = buffers.empty(tuple(w_eOI.shape), w_eOI)
        self._grads = self.grad_eOI.unbind()
        self._counts = counts
        same = w_eOI.dtype == dtype or not self._grads
        self._total = None if same else torch.empty_like(self._grads[0], dtype=dtype)

    def add_outer(self, chunk: Chunk, a: Tensor, b: Tensor) -> None:
        """Add a^T b to the gradient of each part's expert, which its first part starts."""
        for part, a_part, b_part in zip(chunk.parts, chunk.split(a), chunk.split(b), strict=True):
            grad = self._grads[part.expert]
            total = grad if self._total is None else self._total
            if part.is_first:
                torch.mm(a_part.t(), b_part, out=total)
            else:
                total.addmm_(a_part.t(), b_part)
            if part.is_last and self._total is not None:
                grad.copy_(total)

    def finish(self) -> Tensor:
        """All of it, with zeros for experts without rows."""
        for grad, count in zip(self._grads, self._counts, strict=False):
            if not count:
                grad.zero_()
        return self.grad_eOI


@stream_experts.register_fake
def _(x_TD, w1_eFD, w3_eFD, w2_eDF, weight_S, base_TD, token_S, count_e, weigh_before, keep):  # type: ignore[no-untyped-def]
    num_rows = x_TD.shape[0] if token_S is None else token_S.shape[0]
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(2, num_rows if keep else 0, w1_eFD.shape[1])


@stream_experts_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    grad_TD, x_TD, w1_eFD, w3_eFD, w2_eDF, weight_S, token_S, count_e, kept_2SF, weigh_before, need_weights
):
    dws = [w.new_empty(w.shape if need_weights else (0, *w.shape[1:])) for w in (w1_eFD, w3_eFD, w2_eDF)]
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
