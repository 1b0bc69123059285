"""Rows packed as float8 for the exchange: unpacked, they are the same rows rounded once."""

import pytest
import torch

from spurline.ops.float8_rows import pack_rows, packed_bytes, unpack_rows
from spurline.ops.low_precision import round_operand
from spurline.testing.equivalence import relative_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_more", [0, 8])
@pytest.mark.parametrize("num_rows", [0, 9])
def test_numbers_are_rounded_and_the_other_columns_are_not(num_rows: int, num_more: int, dtype: torch.dtype) -> None:
    rows = torch.randn(num_rows, 24 + num_more).to(dtype)
    if num_rows:
        rows[3, :24] = 0
        rows[4] *= 1e-4
    packed = pack_rows(rows, 24)
    assert packed.shape == (num_rows, packed_bytes(24, 24 + num_more, dtype.itemsize))
    found = unpack_rows(packed, 24, 24 + num_more, dtype)
    assert torch.equal(found[:, 24:], rows[:, 24:])
    assert torch.equal(found[:, :24], round_operand(rows[:, :24].contiguous(), "float8", "e4m3", 1))


def test_about_half_of_the_bytes_and_a_stated_error() -> None:
    rows = torch.randn(100, 2048 + 8).bfloat16()
    assert pack_rows(rows, 2048).shape[1] == 2048 + 32
    error = relative_error(unpack_rows(pack_rows(rows, 2048), 2048, 2056, torch.bfloat16)[:, :2048], rows[:, :2048])
    assert 0.02 < error < 0.03, error
