"""Quantized weights as the float tensors that they stand for, dequantized when they are read.

FP8 with a scale for each block of a matrix (DeepSeek-V3: 128 x 128), and MXFP4 (gpt-oss): 32 values of 4 bits with a
power of two as their scale. Both are presented as bfloat16; read into float32, nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from spurline.config_io import ConfigError
from spurline.hf.folder import at_most
from spurline.hf.safetensors_file import FLOATS, Stored, read_bytes

_SCALE = "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_GROUP_SIZE = 32  # values that share a scale in MXFP4
_BIAS = 127  # of the exponent that a scale is


class AnyStored(Protocol):
    """A tensor in a file, quantized or not."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read_into(self, target: Tensor, start: int = 0) -> None:
        """Fill a contiguous CPU tensor of any float dtype with the elements from element `start` on."""


def read_whole(stored: AnyStored) -> Tensor:
    tensor = torch.empty(stored.shape, dtype=FLOATS[stored.dtype])
    stored.read_into(tensor)
    return tensor


@dataclass(frozen=True)
class BlockScaled:
    """An FP8 matrix with a float32 scale for each block of rows and columns; the last blocks may be smaller."""

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
        raw = torch.empty(target.numel(), dtype=torch.uint8)
        read_bytes(raw, self.weight, start)
        value_RC = raw.view(torch.float8_e4m3fn).float().view(size, num_columns)
        scale_rc = torch.empty(self.scale.shape, dtype=FLOATS[self.scale.dtype])
        self.scale.read_into(scale_rc)
        block_of_row = torch.arange(first, first + size) // self.block[0]
        block_of_column = torch.arange(num_columns) // self.block[1]
        value_RC *= scale_rc.float()[block_of_row][:, block_of_column]
        target.view(size, num_columns).copy_(value_RC)


@dataclass(frozen=True)
class MXFP4:
    """Matrices of 4-bit values, two a byte, each stored as (rows, groups of 32 columns) and presented transposed."""

    blocks: Stored
    scales: Stored
    dtype: ClassVar = "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        num_matrices, num_rows, num_groups, _ = self.blocks.shape
        return num_matrices, num_groups * _GROUP_SIZE, num_rows

    def read_into(self, target: Tensor, start: int = 0) -> None:
        num_columns, num_rows = self.shape[1:]
        size = num_rows * num_columns
        assert (start % size, target.numel() % size) == (0, 0), "whole matrices only"
        for number, matrix in enumerate(target.view(-1, num_columns, num_rows), start // size):
            matrix.copy_(self._matrix(number, num_rows, num_columns).mT)

    def _matrix(self, number: int, num_rows: int, num_columns: int) -> Tensor:
        packed = torch.empty(num_rows, num_columns // _GROUP_SIZE, _GROUP_SIZE // 2, dtype=torch.uint8)
        read_bytes(packed, self.blocks, number * packed.numel())
        exponent = torch.empty(num_rows, num_columns // _GROUP_SIZE, dtype=torch.uint8)
        read_bytes(exponent, self.scales, number * exponent.numel())
        table = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)])
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)  # the lower half comes first
        return torch.ldexp(table[codes.int()], exponent.int().unsqueeze(-1) - _BIAS).view(num_rows, num_columns)


def dequantized(stored: Mapping[str, Stored], their_config: Mapping[str, Any], where: str) -> dict[str, AnyStored]:
    """All tensors by name, with those that are quantized as what they stand for; their scales are no longer listed.

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
        scale = stored.get(name + _SCALE)
        if scale is None:
            problems.append(f"tensor {name} is FP8, and its scale {name}{_SCALE} is missing")
            continue
        grid = tuple(-(-size // step) for size, step in zip(weight.shape, block, strict=False))
        if len(weight.shape) != 2 or scale.shape != grid or scale.dtype not in FLOATS:
            problems.append(
                f"tensor {name} {weight.shape} in blocks of {block[0]} x {block[1]} needs a scale {name}{_SCALE} of"
                f" shape {grid} and a float dtype, got {scale.dtype} {scale.shape}"
            )
            continue
        found[name] = BlockScaled(weight, scale, block)
        del found[name + _SCALE]
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
