# mypy: disallow-untyped-defs=False
"""The Triton kernels of SwiGLU experts: matmuls and a combine, without atomics, so that results are deterministic.

T tokens of width D, S rows sorted by expert, e experts, F hidden width. A program computes one tile. The expert of a
tile of rows follows from the row counts, which every program reads by itself: they stay on the device. The grid has
room for the most tiles that any counts can need, and programs without a tile return immediately.

Rows past the end of an expert are read from a valid row instead, and not stored. The reduction dim is masked only if
tiles do not divide it (EVEN). Columns are masked rather than redirected: with computed column indices, the compiler
could not see that loads are contiguous.

UPCAST is for Triton's interpreter, whose bfloat16 matmuls are wrong, and which truncates to bfloat16 instead of
rounding: operands are converted to float32, and results are rounded by bit operations.
"""

import triton
import triton.language as tl


@triton.jit
def _find_rows(count, num_experts, tile, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """The expert of a tile of rows, its first row, and the end of the expert's rows (no tile if first >= end)."""
    expert_E = tl.arange(0, EXPERTS)
    count_E = tl.load(count + expert_E, mask=expert_E < num_experts, other=0).to(tl.int32)
    tiles_E = (count_E + ROWS - 1) // ROWS
    before_E = tl.cumsum(tiles_E, 0) - tiles_E
    is_mine_E = (before_E <= tile) & (tile < before_E + tiles_E)
    expert = tl.sum(tl.where(is_mine_E, expert_E, 0), 0)
    start = tl.sum(tl.where(expert_E < expert, count_E, 0), 0)
    first = start + (tile - tl.sum(tl.where(is_mine_E, before_E, 0), 0)) * ROWS
    return expert, first, start + tl.sum(tl.where(is_mine_E, count_E, 0), 0)


@triton.jit
def _dot(a, b, sum, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sum, input_precision=PRECISION)


@triton.jit
def _store(pointers, value, mask, UPCAST: tl.constexpr):
    """Store in the dtype of the pointers, rounded to nearest even."""
    dtype: tl.constexpr = pointers.dtype.element_ty
    if UPCAST and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        value = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    tl.store(pointers, value.to(dtype), mask=mask)


@triton.jit
def _load_rows(pointers, k, end, EVEN: tl.constexpr):
    """(ROWS, DEPTH), zeros where k is past the end of the reduction dim."""
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=(k < end)[None, :], other=0.0)


@triton.jit
def _load_matrix(pointers, k, end, is_column, EVEN: tl.constexpr):
    """(DEPTH, COLUMNS), zeros where k is past the end of the reduction dim, or the column is out of range."""
    if EVEN:
        return tl.load(pointers, mask=is_column[None, :], other=0.0)
    return tl.load(pointers, mask=(k < end)[:, None] & is_column[None, :], other=0.0)


@triton.jit
def gate_up_kernel(
    x,
    token,
    weight,
    w1,
    w3,
    count,
    kept_gate,
    kept_up,
    hidden,
    num_experts,
    D,
    F,
    HAS_TOKEN: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    KEEP: tl.constexpr,
    EVEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """hidden (S, F) = silu(x w1^T) * (x w3^T), with rows of x gathered from their tokens; KEEP stores both matmuls.

    A row's weight multiplies its input (BEFORE) or its hidden state (AFTER).
    """
    num_tiles = tl.cdiv(F, COLUMNS)
    expert, first, end = _find_rows(count, num_experts, tl.program_id(0) // num_tiles, ROWS, EXPERTS)
    if first >= end:
        return
    row = first + tl.arange(0, ROWS)
    column = (tl.program_id(0) % num_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    is_real = (row < end)[:, None] & (column < F)[None, :]
    row = tl.where(row < end, row, first)
    source = tl.load(token + row) if HAS_TOKEN else row
    k = tl.arange(0, DEPTH)
    a = x + source.to(tl.int64)[:, None] * D + k[None, :]
    w1 += expert.to(tl.int64) * F * D
    w3 += expert.to(tl.int64) * F * D
    place = column[None, :] * D + k[:, None]  # within a matrix, so 32 bits are enough
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, D, DEPTH):
        rows = _load_rows(a, start + k, D, EVEN)
        gate = _dot(rows, _load_matrix(w1 + place, start + k, D, column < F, EVEN), gate, UPCAST, PRECISION)
        up = _dot(rows, _load_matrix(w3 + place, start + k, D, column < F, EVEN), up, UPCAST, PRECISION)
        a += DEPTH
        w1 += DEPTH
        w3 += DEPTH
    if BEFORE:
        scale = tl.load(weight + row).to(tl.float32)[:, None]
        gate, up = gate * scale, up * scale
    start_F = first.to(tl.int64) * F
    target = (row - first)[:, None] * F + column[None, :]
    if KEEP:
        _store(kept_gate + start_F + target, gate, is_real, UPCAST)
        _store(kept_up + start_F + target, up, is_real, UPCAST)
    active = gate * tl.sigmoid(gate) * up
    if AFTER:
        active = active * tl.load(weight + row).to(tl.float32)[:, None]
    _store(hidden + start_F + target, active, is_real, UPCAST)


@triton.jit(do_not_specialize=["num_rows"])
def rows_kernel(
    a1,
    w1,
    a2,
    w2,
    count,
    x,
    token,
    weight,
    out,
    dweight,
    num_rows,
    num_experts,
    I,  # noqa: E741
    O,  # noqa: E741
    stride_i,
    stride_o,
    HAS_TOKEN: tl.constexpr,
    TWO: tl.constexpr,
    WEIGH: tl.constexpr,
    EVEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out (S, O) = a1 (S, I) times w1[e] (I, O), plus a2 times w2 if TWO.

    WEIGH is for the gradient of weighted rows: out is multiplied by their weight, and dweight (tiles, S) gets the sums
    of out * x over the columns of a tile.
    """
    num_tiles = tl.cdiv(O, COLUMNS)
    number = tl.program_id(0) % num_tiles
    expert, first, end = _find_rows(count, num_experts, tl.program_id(0) // num_tiles, ROWS, EXPERTS)
    if first >= end:
        return
    row = first + tl.arange(0, ROWS)
    column = number * COLUMNS + tl.arange(0, COLUMNS)
    is_real = (row < end)[:, None] & (column < O)[None, :]
    row_is_real = row < end
    row = tl.where(row_is_real, row, first)
    k = tl.arange(0, DEPTH)
    place = (row - first)[:, None] * I + k[None, :]  # within a tile or a matrix, so 32 bits are enough
    place_w = column[None, :] * stride_o + k[:, None] * stride_i
    a1 += first.to(tl.int64) * I
    w1 += expert.to(tl.int64) * I * O
    if TWO:
        a2 += first.to(tl.int64) * I
        w2 += expert.to(tl.int64) * I * O
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, I, DEPTH):
        rows = _load_rows(a1 + place, start + k, I, EVEN)
        matrix = _load_matrix(w1 + place_w, start + k, I, column < O, EVEN)
        result = _dot(rows, matrix, result, UPCAST, PRECISION)
        if TWO:
            rows = _load_rows(a2 + place, start + k, I, EVEN)
            matrix = _load_matrix(w2 + place_w, start + k, I, column < O, EVEN)
            result = _dot(rows, matrix, result, UPCAST, PRECISION)
            a2 += DEPTH
            w2 += DEPTH * stride_i
        a1 += DEPTH
        w1 += DEPTH * stride_i
    if WEIGH:
        source = tl.load(token + row) if HAS_TOKEN else row
        inputs = tl.load(x + source.to(tl.int64)[:, None] * O + column[None, :], mask=is_real, other=0.0)
        tl.store(dweight + number.to(tl.int64) * num_rows + row, tl.sum(result * inputs, 1), mask=row_is_real)
        result = result * tl.load(weight + row).to(tl.float32)[:, None]
    target = (row - first)[:, None] * O + column[None, :]
    _store(out + first.to(tl.int64) * O + target, result, is_real, UPCAST)


@triton.jit(do_not_specialize=["num_rows"])
def hidden_gradient_kernel(
    grad,
    token,
    weight,
    w2,
    count,
    kept_gate,
    kept_up,
    dgate,
    dup,
    hidden,
    dweight,
    num_rows,
    num_experts,
    D,
    F,
    HAS_TOKEN: tl.constexpr,
    AFTER: tl.constexpr,
    NEED_HIDDEN: tl.constexpr,
    EVEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients dgate and dup of both matmuls, from the gradient of the hidden state, grad w2.

    The activation is recomputed: hidden (S, F), weighted, is stored for the gradient of w2, and dweight (tiles, S)
    gets the sums of the hidden state times its gradient over the columns of a tile.
    """
    num_tiles = tl.cdiv(F, COLUMNS)
    number = tl.program_id(0) % num_tiles
    expert, first, end = _find_rows(count, num_experts, tl.program_id(0) // num_tiles, ROWS, EXPERTS)
    if first >= end:
        return
    row = first + tl.arange(0, ROWS)
    column = number * COLUMNS + tl.arange(0, COLUMNS)
    is_real = (row < end)[:, None] & (column < F)[None, :]
    row_is_real = row < end
    row = tl.where(row_is_real, row, first)
    source = tl.load(token + row) if HAS_TOKEN else row
    k = tl.arange(0, DEPTH)
    a = grad + source.to(tl.int64)[:, None] * D + k[None, :]
    w2 += expert.to(tl.int64) * D * F
    place = k[:, None] * F + column[None, :]
    dhidden = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, D, DEPTH):
        rows = _load_rows(a, start + k, D, EVEN)
        dhidden = _dot(rows, _load_matrix(w2 + place, start + k, D, column < F, EVEN), dhidden, UPCAST, PRECISION)
        a += DEPTH
        w2 += DEPTH * F
    start_F = first.to(tl.int64) * F
    target = (row - first)[:, None] * F + column[None, :]
    gate = tl.load(kept_gate + start_F + target, mask=is_real, other=0.0).to(tl.float32)
    up = tl.load(kept_up + start_F + target, mask=is_real, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    active = gate * sigmoid
    state = active * up
    if AFTER:
        scale = tl.load(weight + row).to(tl.float32)[:, None]
        tl.store(dweight + number.to(tl.int64) * num_rows + row, tl.sum(dhidden * state, 1), mask=row_is_real)
        state, dhidden = state * scale, dhidden * scale
    if NEED_HIDDEN:
        _store(hidden + start_F + target, state, is_real, UPCAST)
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    _store(dgate + start_F + target, dhidden * up * slope, is_real, UPCAST)
    _store(dup + start_F + target, dhidden * active, is_real, UPCAST)


@triton.jit
def outer_kernel(
    a,
    b,
    token,
    weight,
    count,
    out,
    num_experts,
    O,  # noqa: E741
    I,  # noqa: E741
    GATHER_A: tl.constexpr,
    GATHER_B: tl.constexpr,
    WEIGH_B: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out (e, O, I) = each expert's a^T b, of (S, O) and (S, I), which may be gathered from tokens; 0 without rows."""
    row_tiles, column_tiles = tl.cdiv(O, ROWS), tl.cdiv(I, COLUMNS)
    number = tl.program_id(0) % (row_tiles * column_tiles)
    expert = tl.program_id(0) // (row_tiles * column_tiles)
    expert_E = tl.arange(0, EXPERTS)
    count_E = tl.load(count + expert_E, mask=expert_E < num_experts, other=0).to(tl.int32)
    first = tl.sum(tl.where(expert_E < expert, count_E, 0), 0)
    end = first + tl.sum(tl.where(expert_E == expert, count_E, 0), 0)
    o = (number // column_tiles) * ROWS + tl.arange(0, ROWS)
    i = (number % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, end, DEPTH):
        row = start + k
        is_real = row < end
        if GATHER_A or GATHER_B:
            source = tl.load(token + row, mask=is_real, other=0).to(tl.int64)
        place_a = source if GATHER_A else row.to(tl.int64)
        place_b = source if GATHER_B else row.to(tl.int64)
        rows_a = tl.load(a + place_a[None, :] * O + o[:, None], mask=is_real[None, :] & (o < O)[:, None], other=0.0)
        rows_b = tl.load(b + place_b[:, None] * I + i[None, :], mask=is_real[:, None] & (i < I)[None, :], other=0.0)
        if WEIGH_B:
            scale = tl.load(weight + row, mask=is_real, other=0.0).to(tl.float32)
            rows_b = rows_b * scale[:, None] if UPCAST else (rows_b * scale[:, None]).to(b.dtype.element_ty)
        result = _dot(rows_a, rows_b, result, UPCAST, PRECISION)
    target = expert.to(tl.int64) * O * I + o.to(tl.int64)[:, None] * I + i[None, :]
    _store(out + target, result, (o < O)[:, None] & (i < I)[None, :], UPCAST)


@triton.jit
def combine_kernel(rows, row, end, base, out, D, HAS_BASE: tl.constexpr, COLUMNS: tl.constexpr, UPCAST: tl.constexpr):
    """out (T, D): each token's rows, added to base. `row` lists rows by token, `end` is where each token's rows end."""
    num_tiles = tl.cdiv(D, COLUMNS)
    t = (tl.program_id(0) // num_tiles).to(tl.int64)
    column = (tl.program_id(0) % num_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    is_real = column < D
    result = tl.zeros((COLUMNS,), tl.float32)
    if HAS_BASE:
        result += tl.load(base + t * D + column, mask=is_real, other=0.0).to(tl.float32)
    first = tl.load(end + t - 1, mask=t > 0, other=0)
    for place in range(first, tl.load(end + t)):
        source = tl.load(row + place).to(tl.int64)
        result += tl.load(rows + source * D + column, mask=is_real, other=0.0).to(tl.float32)
    _store(out + t * D + column, result, is_real, UPCAST)
