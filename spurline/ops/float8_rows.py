"""Rows packed as bytes: activations as float8 with a scale per row, other columns unchanged.

S rows, D columns that are rounded, X columns in all, Y bytes of a packed row: D for the numbers, 4 for the scale, the
bytes of the other columns, up to a multiple of 16. In bfloat16 that is D + 32 bytes with a weight, instead of 2 D + 16.
The relative error of a number is at most 2**-4, and about 2.6e-2 for a row of normally distributed numbers.
"""

import torch
from torch import Tensor

from spurline.ops.low_precision import DTYPES, float8_scale

_SCALE_BYTES = 4
_MULTIPLE = 16


def packed_bytes(width: int, num_columns: int, itemsize: int) -> int:
    """Y: the size of a packed row in bytes."""
    return -(-(width + _SCALE_BYTES + (num_columns - width) * itemsize) // _MULTIPLE) * _MULTIPLE


@torch.library.custom_op("spurline::pack_rows", mutates_args=())
def pack_rows(rows_SX: Tensor, width: int) -> Tensor:
    """(S, X) -> (S, Y) of uint8: the first `width` columns as e4m3, the others unchanged."""
    num_rows, num_columns = rows_SX.shape
    packed_SY = rows_SX.new_zeros(num_rows, packed_bytes(width, num_columns, rows_SX.itemsize), dtype=torch.uint8)
    if not num_rows:
        return packed_SY
    numbers_SD, e4m3 = rows_SX[:, :width].float(), DTYPES["e4m3"]
    scale_S1, most = float8_scale(numbers_SD.abs().amax(1, keepdim=True), e4m3), torch.finfo(e4m3).max
    packed_SY[:, :width] = (numbers_SD * scale_S1).clamp(-most, most).to(e4m3).view(torch.uint8)
    parts = scale_S1, rows_SX[:, width:].contiguous()
    tail = torch.cat([part.view(torch.uint8) for part in parts if part.shape[1]], dim=1)
    packed_SY[:, width : width + tail.shape[1]] = tail
    return packed_SY


@torch.library.custom_op("spurline::unpack_rows", mutates_args=())
def unpack_rows(packed_RY: Tensor, width: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    """(R, Y) of uint8 -> (R, X): the inverse of `pack_rows`, up to its rounding."""
    rows_RX = packed_RY.new_empty(packed_RY.shape[0], num_columns, dtype=dtype)
    if not rows_RX.shape[0]:
        return rows_RX
    end = width + _SCALE_BYTES
    scale_R1 = packed_RY[:, width:end].contiguous().view(torch.float32)
    numbers_RD = packed_RY[:, :width].contiguous().view(DTYPES["e4m3"])
    rows_RX[:, :width] = numbers_RD.float() / scale_R1
    if num_columns > width:
        others = packed_RY[:, end : end + (num_columns - width) * dtype.itemsize].contiguous()
        rows_RX[:, width:] = others.view(dtype)
    return rows_RX


@pack_rows.register_fake
def _(rows_SX: Tensor, width: int) -> Tensor:
    num_bytes = packed_bytes(width, rows_SX.shape[1], rows_SX.itemsize)
    return rows_SX.new_empty(rows_SX.shape[0], num_bytes, dtype=torch.uint8)


@unpack_rows.register_fake
def _(packed_RY: Tensor, width: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    return packed_RY.new_empty(packed_RY.shape[0], num_columns, dtype=dtype)
