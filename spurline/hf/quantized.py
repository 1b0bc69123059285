"""Quantized weights presented as float tensors, dequantized when they are read.

FP8 with one scale per block of a matrix (DeepSeek-V3: 128 x 128), and MXFP4 (gpt-oss): groups of 32 4-bit values with
a power of two as their scale. Both are presented as bfloat16; reading into float32 does not round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from spurline.config_io import ConfigError
from spurline.hf.folder import at_most
from spurline.hf.safetensors_file import FLOATS, Stored, read_byte_box

SCALE = "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_GROUP_SIZE = 32  # values that share a scale in MXFP4
_BIAS = 127  # exponent bias of the scales, which are stored as exponents


class AnyStored(Protocol):
    """A tensor in a file, quantized or not."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read_into(self, target: Tensor, start: int = 0) -> None:
        """Fill a contiguous CPU tensor of any float dtype with the elements from element `start` on."""

    def read_box(self, start: int, num_columns: int, rows: range, columns: range) -> Tensor:
        """Some rows and columns of the matrix of `num_columns` columns that begins at element `start`.

        Little more than those is read; quantized values are returned in float32, without rounding.
        """


def read_whole(stored: AnyStored) -> Tensor:
    tensor = torch.empty(stored.shape, dtype=FLOATS[stored.dtype])
    stored.read_into(tensor)
    return tensor


@dataclass(frozen=True)
class BlockScaled:
    """An FP8 matrix with one float32 scale per block of rows and columns; the last blocks may be smaller."""

    weight: Stored
    scale: Stored
    block: tuple[int, int]
    dtype: ClassVar = "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def read_into(self, target: Tensor, start: int = 0) -> None:
        num_columns = self.shape[1]
        first, size = start // num_columns, target.numel() // num_columns
        assert (start, target.numel()) == (first * num_columns, size * num_columns), "whole rows only"
        box_RC = self.read_box(0, num_columns, range(first, first + size), range(num_columns))
        target.view(size, num_columns).copy_(box_RC)

    def read_box(self, start: int, num_columns: int, rows: range, columns: range) -> Tensor:
        assert (start % num_columns, num_columns) == (0, self.shape[1]), "whole rows only"
        rows = range(rows.start + start // num_columns, rows.stop + start // num_columns)
        value_rc = read_byte_box(self.weight, 0, num_columns, rows, columns).view(torch.float8_e4m3fn).float()
        row_blocks, column_blocks = _blocks_of(rows, self.block[0]), _blocks_of(columns, self.block[1])
        scale = self.scale.read_box(0, self.scale.shape[1], row_blocks, column_blocks).float()
        block_of_row = torch.arange(rows.start, rows.stop) // self.block[0] - row_blocks.start
        block_of_column = torch.arange(columns.start, columns.stop) // self.block[1] - column_blocks.start
        return value_rc.mul_(scale[block_of_row][:, block_of_column])


def _blocks_of(indices: range, size: int) -> range:
    return range(indices.start // size, -(-indices.stop // size))


@dataclass(frozen=True)
class MXFP4:
    """Matrices of 4-bit values, two per byte, stored as (rows, groups of 32 columns) and presented transposed."""

    blocks: Stored
    scales: Stored
    dtype: ClassVar = "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        num_matrices, num_rows, num_groups, _ = self.blocks.shape
        return num_matrices, num_groups * _GROUP_SIZE, num_rows

    def read_into(self, target: Tensor, start: int = 0) -> None:
        num_rows, num_columns = self.shape[1:]
        size = num_rows * num_columns
        assert (start % size, target.numel() % size) == (0, 0), "whole matrices only"
        for number, matrix in enumerate(target.view(-1, num_rows, num_columns), start // size):
            matrix.copy_(self.read_box(number * size, num_columns, range(num_rows), range(num_columns)))

    def read_box(self, start: int, num_columns: int, rows: range, columns: range) -> Tensor:
        """Stored rows are presented as columns; of each, only the groups that overlap `rows` are read."""
        number, rest = divmod(start, prod(self.shape[1:]))
        assert (rest, num_columns) == (0, self.shape[2]), "boxes of whole matrices only"
        groups = _blocks_of(rows, _GROUP_SIZE)
        num_groups, num_bytes = self.blocks.shape[2:]
        first, in_bytes = number * num_columns, range(groups.start * num_bytes, groups.stop * num_bytes)
        row_bytes = num_groups * num_bytes
        packed = read_byte_box(self.blocks, first * row_bytes, row_bytes, columns, in_bytes)
        exponent = read_byte_box(self.scales, first * num_groups, num_groups, columns, groups)
        table = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)])
        codes = torch.stack([packed & 15, packed >> 4], dim=-1)  # the lower half comes first
        value_cgv = table[codes.int()].view(len(columns), len(groups), _GROUP_SIZE)
        value_cr = torch.ldexp(value_cgv, exponent.int().unsqueeze(-1) - _BIAS).flatten(1)
        begin = groups.start * _GROUP_SIZE
        return value_cr[:, rows.start - begin : rows.stop - begin].mT


def dequantized(stored: Mapping[str, Stored], their_config: Mapping[str, Any], where: str) -> dict[str, AnyStored]:
    """All tensors by name, with quantized ones presented as float tensors; their scales are no longer listed.

    Raises a ConfigError with every quantized tensor that can't be read.
    """
    method = (their_config.get("quantization_config") or {}).get("quant_method")
    found: dict[str, AnyStored] = dict(stored)
    problems: list[str] = []
    if method == "fp8":
        problems = _pair_fp8(found, stored, tuple(their_config["quantization_config"]["weight_block_size"]))
    elif method == "mxfp4":
        problems = _pair_mxfp4(found, stored)
    if problems:
        raise ConfigError(at_most([f"{where}: {problem}" for problem in sorted(problems)]))
    return found


def _pair_fp8(found: dict[str, AnyStored], stored: Mapping[str, Stored], block: tuple[int, int]) -> list[str]:
    problems = []
    for name, weight in stored.items():
        if weight.dtype != "F8_E4M3":
            continue
        scale = stored.get(name + SCALE)
        if scale is None:
            problems.append(f"tensor {name} is FP8, and its scale {name}{SCALE} is missing")
            continue
        grid = tuple(-(-size // step) for size, step in zip(weight.shape, block, strict=False))
        if len(weight.shape) != 2 or scale.shape != grid or scale.dtype not in FLOATS:
            problems.append(
                f"tensor {name} {weight.shape} in blocks of {block[0]} x {block[1]} needs a scale {name}{SCALE} of"
                f" shape {grid} and a float dtype, got {scale.dtype} {scale.shape}"
            )
            continue
        found[name] = BlockScaled(weight, scale, block)
        del found[name + SCALE]
    return problems


def _pair_mxfp4(found: dict[str, AnyStored], stored: Mapping[str, Stored]) -> list[str]:
    problems = []
    for name, blocks in stored.items():
        if not name.endswith(_BLOCKS):
            continue
        base = name.removesuffix(_BLOCKS)
        scales = stored.get(base + _SCALES)
        if scales is None:
            problems.append(f"tensor {name} is MXFP4, and its scales {base}{_SCALES} are missing")
            continue
        is_packed = len(blocks.shape) == 4 and blocks.shape[-1] * 2 == _GROUP_SIZE and blocks.dtype == "U8"
        if not is_packed or scales.shape != blocks.shape[:-1] or scales.dtype != "U8":
            problems.append(
                f"tensor {name} {blocks.dtype} {blocks.shape} with scales {scales.dtype} {scales.shape} is not MXFP4:"
                " (matrices, rows, groups, 16) and (matrices, rows, groups) of bytes"
            )
            continue
        found[base] = MXFP4(blocks, scales)
        del found[name], found[base + _SCALES]
    return problems
