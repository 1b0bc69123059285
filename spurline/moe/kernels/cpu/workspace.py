"""The workspace of the CPU kernel: rows split into chunks, buffers for one chunk, and its matmuls.

S rows sorted by expert, e experts, D width, F hidden width, I inputs and O outputs of a matrix. A chunk has the rows of
one expert, or of several that have few.
"""

from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spurline.moe.kernels.choose import chunk_product, grouped_mm_takes, is_grouped, is_skinny
from spurline.moe.kernels.cpu.buffers import POOL, SMALLEST
from spurline.ops.skinny_matmul import least_rows

CHUNK = 2048
"""Rows per chunk of one expert: enough to keep the cores busy, few enough to stay in cache."""
JOINED = 1 << 18
"""Elements (rows x width) up to which the rows of several experts share a chunk: about the size of a core's cache."""


class Part(NamedTuple):
    """Consecutive rows of one expert."""

    expert: int
    size: int
    is_first: bool
    is_last: bool


class Chunk(NamedTuple):
    """Consecutive rows that are processed together."""

    number: int
    parts: list[Part]
    sizes: list[int]
    """Rows of each part."""
    size: int
    end_e: Tensor | None
    """Offsets where the rows of each expert end, from the first expert to the last, for a grouped matmul; else None."""


def make_chunks(counts: list[int], width: int, whole_experts: bool) -> list[Chunk]:
    """Split rows of this width into chunks, given the rows per expert; with whole_experts, no expert is split."""
    most_of_one = max([1, *counts]) if whole_experts else CHUNK
    most_of_several = JOINED // max(width, 1)
    joined: list[tuple[list[Part], list[int]]] = []
    num_rows = 0
    for expert, count in enumerate(counts):
        for first in range(0, count, most_of_one):
            size = min(most_of_one, count - first)
            if not joined or num_rows + size > most_of_several:
                joined.append(([], []))
                num_rows = 0
            parts, sizes = joined[-1]
            parts.append(Part(expert, size, first == 0, first + most_of_one >= count))
            sizes.append(size)
            num_rows += size
    return [
        Chunk(number, parts, sizes, sum(sizes), _ends(parts) if is_grouped(sizes) else None)
        for number, (parts, sizes) in enumerate(joined)
    ]


def _ends(parts: list[Part]) -> Tensor:
    first, last = parts[0].expert, parts[-1].expert
    counts = [0] * (last - first + 1)
    for part in parts:
        counts[part.expert - first] += part.size
    return torch.tensor(counts).cumsum(0, dtype=torch.int32)


def multiply(chunk: Chunk, rows: Tensor, matrices: "Matrices", out: Tensor, add: bool = False) -> Tensor:
    """Each part's rows times the matrix of its expert, written or added to `out`."""
    if matrices.skinny_rows and not add and is_skinny(chunk.sizes, matrices.skinny_rows):
        return _skinny_products(chunk, rows, matrices, out)
    if chunk.end_e is not None and matrices.can_be_grouped and rows.is_contiguous():
        of_chunk = matrices.every[chunk.parts[0].expert : chunk.parts[-1].expert + 1]
        product = F.grouped_mm(rows, of_chunk, offs=chunk.end_e)
        return out.add_(product) if add else out.copy_(product)
    if len(chunk.parts) > 1:
        results, inputs = out.split(chunk.sizes), rows.split(chunk.sizes)
    else:
        results, inputs = (out,), (rows,)
    for part, a, result in zip(chunk.parts, inputs, results, strict=True):
        matrix = matrices.each[part.expert] if matrices.lifted is None else matrices.lift(part.expert, part.is_first)
        if add:
            result.addmm_(a, matrix)
        else:
            torch.mm(a, matrix, out=result)
    return out


def _skinny_products(chunk: Chunk, rows: Tensor, matrices: "Matrices", out: Tensor) -> Tensor:
    """`multiply`, with parts of few rows as columns; see `ops/skinny_matmul.py`."""
    columns, out_columns = rows.t(), out.t()
    least = least_rows(rows.shape[1])
    start = 0
    for part in chunk.parts:
        matrix = matrices.each[part.expert] if matrices.lifted is None else matrices.lift(part.expert, part.is_first)
        if part.size <= matrices.skinny_rows:
            # A single row is multiplied together with the next one, whose result the next iteration overwrites.
            size = min(max(part.size, least), chunk.size - start)
            product = torch.mm(matrix.t(), columns.narrow(1, start, size))
            out_columns.narrow(1, start, size).copy_(product)
        else:
            torch.mm(rows.narrow(0, start, part.size), matrix, out=out.narrow(0, start, part.size))
        start += part.size
    return out


class Matrices:
    """One matrix of every expert, in the dtype of the matmuls."""

    def __init__(self, w_eIO: Tensor, work: "Workspace") -> None:
        dtype = work.dtype
        self.every = w_eIO
        self.each = w_eIO.unbind()
        self.lifted = None if w_eIO.dtype == dtype else torch.empty_like(w_eIO[0], dtype=dtype)
        self.skinny_rows, is_dense = chunk_product(w_eIO, dtype)
        self.can_be_grouped = is_dense and work.can_be_grouped

    def lift(self, expert: int, is_first: bool) -> Tensor:
        """The matrix of an expert in the dtype of the matmuls, converted once, for its first part."""
        assert self.lifted is not None
        return self.lifted.copy_(self.each[expert]) if is_first else self.lifted


class Workspace:
    """Rows split into chunks, and buffers for one chunk, in the dtype of the matmuls."""

    def __init__(self, x_TD: Tensor, w1_eFD: Tensor, count_e: Tensor, token_S: Tensor | None) -> None:
        self.like = x_TD
        self.sums_by_token = token_S is not None
        self.num_rows = x_TD.shape[0] if token_S is None else token_S.shape[0]
        self.dtype, self.sum_dtype = product_dtype(x_TD), torch.promote_types(x_TD.dtype, torch.float32)
        self.counts: list[int] = count_e.tolist()
        assert sum(self.counts) == self.num_rows, (
            f"row counts add up to {sum(self.counts)}, but there are {self.num_rows} rows"
        )
        # A weight gradient summed over chunks is rounded after each, which only a wide dtype tolerates.
        self.chunks = make_chunks(self.counts, x_TD.shape[1], whole_experts=self.dtype != self.sum_dtype)
        self._sizes = list(map(attrgetter("size"), self.chunks))
        self._tokens = self.split(token_S) if token_S is not None else ()
        self._most_rows = max(self._sizes, default=0)
        _, self.hidden, self.width = w1_eFD.shape
        self.can_be_grouped = grouped_mm_takes(self.dtype, self.hidden, self.width)
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialized memory, from the pool if it is large."""
        num_elements = 1
        for size in shape:
            num_elements *= size
        if num_elements * dtype.itemsize < SMALLEST:
            return torch.empty(shape, dtype=dtype)
        return POOL.empty(shape, self.like, dtype)

    def split(self, rows_S: Tensor, dim: int = 0) -> Sequence[Tensor]:
        """Split a dim into the rows of each chunk; an empty tensor for each if it has none."""
        return rows_S.split(self._sizes, dim) if rows_S.shape[dim] else (rows_S,) * len(self._sizes)

    def weights(self, weight_S: Tensor | None) -> Sequence[Tensor | None]:
        """The weights of each chunk's rows, as columns."""
        if weight_S is None:
            return [None] * len(self.chunks)
        return weight_S.to(self.dtype).unsqueeze(1).split(self._sizes)

    def gather_rows(self, x_TD: Tensor, chunk: Chunk, name: str) -> Tensor:
        """The chunk's rows of x, in the dtype of the matmuls."""
        if not self.sums_by_token:
            return self.lift(self.split(x_TD)[chunk.number], name)
        buffer = self.buffer(f"{name} as they are", chunk.size, self.width, x_TD.dtype)
        rows = torch.index_select(x_TD, 0, self._tokens[chunk.number], out=buffer)
        return rows if rows.dtype == self.dtype else self.lift(rows, name)

    def lift(self, rows: Tensor, name: str) -> Tensor:
        """The rows in the dtype of the matmuls; not copied if they already are."""
        if rows.dtype == self.dtype:
            return rows
        return self.buffer(name, rows.shape[0], rows.shape[1], self.dtype).copy_(rows)

    def start_sum(self, base_TD: Tensor | None) -> Tensor:
        """The output buffer: a sum by token in a wide dtype, or the rows themselves."""
        dtype = self.sum_dtype if self.sums_by_token else self.like.dtype
        sum_TD = self.empty(tuple(self.like.shape), dtype)
        if base_TD is not None:
            return sum_TD.copy_(base_TD)
        return sum_TD.zero_() if self.sums_by_token else sum_TD

    def place_for_result(self, y_TD: Tensor, chunk: Chunk) -> Tensor:
        """Where a matmul writes what `scatter_add_rows` adds to y: y itself, if rows are not summed."""
        if not self.sums_by_token and y_TD.dtype == self.dtype:
            return self.split(y_TD)[chunk.number]
        return self.buffer("result", chunk.size, self.width, self.dtype)

    def scatter_add_rows(self, y_TD: Tensor, chunk: Chunk, rows: Tensor) -> None:
        """Add the chunk's rows to their tokens, or copy them to their rows of y."""
        if self.sums_by_token:
            if rows.dtype != y_TD.dtype:
                rows = self.buffer("result to sum", chunk.size, self.width, y_TD.dtype).copy_(rows)
            y_TD.index_add_(0, self._tokens[chunk.number], rows)
        elif rows.dtype != y_TD.dtype:
            self.split(y_TD)[chunk.number].copy_(rows)

    def buffer(self, name: str, num_rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """The buffer of that name, (num_rows, width); by default in the dtype of the matmuls."""
        # For small experts, views cost as much as arithmetic, so views are cached as well; key -1 is the full buffer.
        view = self._buffers.get((name, num_rows))
        if view is None:
            whole = self._buffers.get((name, -1))
            if whole is None:
                whole = self._buffers[name, -1] = self.empty((self._most_rows, width), dtype or self.dtype)
            view = self._buffers[name, num_rows] = whole[:num_rows]
        return view


class WeightGradient:
    """The gradient of one matrix of every expert."""

    def __init__(self, w_eOI: Tensor, counts: list[int], dtype: torch.dtype) -> None:
        self.grad_eOI = POOL.empty(tuple(w_eOI.shape), w_eOI)
        self._grads = self.grad_eOI.unbind()
        self._counts = counts
        same = w_eOI.dtype == dtype or not self._grads
        self._total = None if same else torch.empty_like(self._grads[0], dtype=dtype)

    def add_outer(self, chunk: Chunk, a: Tensor, b: Tensor) -> None:
        """Add a^T b to the gradient of each part's expert; an expert's first part overwrites."""
        for part, a_part, b_part in zip(chunk.parts, a.split(chunk.sizes), b.split(chunk.sizes), strict=True):
            grad = self._grads[part.expert]
            total = grad if self._total is None else self._total
            if part.is_first:
                torch.mm(a_part.t(), b_part, out=total)
            else:
                total.addmm_(a_part.t(), b_part)
            if part.is_last and self._total is not None:
                grad.copy_(total)

    def finish(self) -> Tensor:
        """The full gradient, with zeros for experts without rows."""
        for grad, count in zip(self._grads, self._counts, strict=False):
            if not count:
                grad.zero_()
        return self.grad_eOI


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matmuls: x's own, or float32 if the CPU has no instructions for it.

    Without them, bfloat16 is about eight times slower than converting the rows and weights of one expert at a time to
    float32, multiplying, and rounding the result.
    """
    if x.device.type != "cpu" or x.dtype not in (torch.bfloat16, torch.float16):
        return x.dtype
    return x.dtype if x.dtype == torch.bfloat16 and cpu_multiplies_bfloat16() else torch.float32


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """At least float32."""
    return torch.promote_types(dtype, torch.float32)


@cache
def cpu_multiplies_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "arm_bf16"))
