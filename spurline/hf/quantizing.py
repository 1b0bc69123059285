"""Quantize weights to FP8 with one scale per block, as DeepSeek-V3 is published, one tensor at a time.

A matrix of R rows and C columns has r x c blocks, of which the last ones may be smaller.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from spurline.hf.quantized import SCALE
from spurline.hf.safetensors_file import Entry

Block = tuple[int, int]
BLOCK: Block = (128, 128)
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
# Projections, except eh_proj of prediction modules, which DeepSeek-V3 stores in bfloat16.
_PROJECTION = re.compile(r"(?!.*\.eh_proj\.).*\.\w*_proj\w*\.weight")


class TensorSource(Protocol):
    """Tensors to be written, and their values in the same order."""

    @property
    def main_dtype(self) -> torch.dtype: ...

    def entries(self) -> Iterator[Entry]: ...

    def values(self) -> Iterator[Tensor]: ...


@dataclass(frozen=True)
class BlockQuantized:
    """The tensors of another source, with projections in FP8, each followed by its scales."""

    source: TensorSource
    block: Block = BLOCK

    def __post_init__(self) -> None:
        stacks = [entry.name for entry in self.source.entries() if len(entry.shape) > 2]
        if stacks:
            raise ValueError(f"{stacks[0]} is a stack of matrices: FP8 blocks are for classes with a tensor per matrix")

    @property
    def main_dtype(self) -> torch.dtype:
        return self.source.main_dtype

    @property
    def config(self) -> dict[str, Any]:
        """The quantization_config of config.json."""
        matrices = [entry.name for entry in self.source.entries() if len(entry.shape) == 2]
        kept = [name.removesuffix(".weight") for name in matrices if not _is_projection(name)]
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(self.block),
            "modules_to_not_convert": [name for name in kept if not name.endswith("embed_tokens")],
        }

    def entries(self) -> Iterator[Entry]:
        for entry in self.source.entries():
            if _is_projection(entry.name):
                yield Entry(entry.name, torch.float8_e4m3fn, entry.shape)
                grid = tuple(-(-size // step) for size, step in zip(entry.shape, self.block, strict=True))
                yield Entry(entry.name + SCALE, torch.float32, grid)
            else:
                yield entry

    def values(self) -> Iterator[Tensor]:
        for entry, tensor in zip(self.source.entries(), self.source.values(), strict=True):
            if _is_projection(entry.name):
                yield from quantize(tensor, self.block)
            else:
                yield tensor


def _is_projection(name: str) -> bool:
    return _PROJECTION.fullmatch(name) is not None


def quantize(weight_RC: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """(R, C) -> FP8 (R, C) and float32 scales (r, c), which map each block's largest magnitude to FP8's largest."""
    num_rows, num_columns = weight_RC.shape
    padding = (0, -num_columns % block[1], 0, -num_rows % block[0])
    padded = torch.nn.functional.pad(weight_RC.float(), padding)
    value_rBcC = padded.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1]))
    largest_rc = value_rBcC.abs().amax(dim=(1, 3))
    scale_rc = torch.where(largest_rc > 0, largest_rc / _LARGEST, 1.0)
    scaled = (value_rBcC / scale_rc[:, None, :, None]).clamp(-_LARGEST, _LARGEST)
    quantized_RC = scaled.flatten(2).flatten(0, 1)[:num_rows, :num_columns].to(torch.float8_e4m3fn)
    return quantized_RC.contiguous(), scale_rc
