"""8-bit matmuls on devices that have them, by torchao (0.18), with the rounding of `low_precision.py`.

R rows sorted by expert, e experts, I inputs, O outputs. Imported on use. Not yet run on a device.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spurline.ops.low_precision import LowPrecision

LINEAR_MULTIPLES = {"float8": 16, "mxfp8": 32}
"""What the widths of a linear layer must be a multiple of; and its rows, over which the weights' gradient sums."""
EXPERT_MULTIPLES = {"float8": 16, "mxfp8": 128}
"""The same for grouped matmuls: widths of experts, rows of each expert, and all rows together."""


@cache
def has_torchao() -> bool:
    return importlib.util.find_spec("torchao") is not None


def missing_packages() -> list[str]:
    """The packages that torchao's grouped MXFP8 matmuls need besides it, and that are not installed."""
    from torchao.prototype.moe_training.kernels.mxfp8.cute_utils import _missing_cutedsl_runtime_packages

    return _missing_cutedsl_runtime_packages()


@cache
def _rowwise_float8() -> tuple[Any, Any]:
    """torchao's rowwise recipe."""
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_training_tensor import LinearMMConfig

    return LinearMMConfig(), Float8LinearConfig.from_recipe_name("rowwise")


def native_linear(x_RI: Tensor, w_OI: Tensor, precision: LowPrecision) -> Tensor:
    """(R, I) and (O, I) -> (R, O), with rows padded by zeros as the gradient of the weights requires."""
    num_rows = x_RI.shape[0]
    padding = _round_up(max(num_rows, 1), LINEAR_MULTIPLES[precision.recipe]) - num_rows
    if not padding:
        return _linear(x_RI.contiguous(), w_OI.contiguous(), precision.recipe)
    return _linear(F.pad(x_RI, (0, 0, 0, padding)), w_OI.contiguous(), precision.recipe)[:num_rows]


def _linear(x_RI: Tensor, w_OI: Tensor, recipe: str) -> Tensor:
    if recipe == "float8":
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        return matmul_with_hp_or_float8_args.apply(x_RI, w_OI.t(), *_rowwise_float8())
    from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    return _to_mxfp8_then_scaled_mm(x_RI, w_OI, KernelPreference.AUTO, ScaleCalculationMode.RCEIL)


def native_grouped_matmul(rows_RI: Tensor, w_eOI: Tensor, count_e: Tensor, precision: LowPrecision) -> Tensor:
    """(R, I) and (e, O, I) -> (R, O), with each expert's rows padded as the device requires. No device-to-host read."""
    count_e = count_e.to(rows_RI.device)
    place_R, end_e, num_padded = padded_places(count_e, rows_RI.shape[0], EXPERT_MULTIPLES[precision.recipe])
    padded_PI = rows_RI.new_zeros(num_padded, rows_RI.shape[1]).index_copy(0, place_R, rows_RI)
    # torchao wants the right operand with its reduction dim innermost, which is the layout of the weights.
    result_PO = _grouped_matmul(padded_PI, w_eOI.contiguous().transpose(-2, -1), end_e, precision.recipe)
    return result_PO.index_select(0, place_R)


def _grouped_matmul(padded_PI: Tensor, w_eIO: Tensor, end_e: Tensor, recipe: str) -> Tensor:
    if recipe == "float8":
        from torchao.float8.config import e4m3_dtype  # e4m3fnuz on MI300
        from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm as float8_product

        return float8_product(
            padded_PI, w_eIO, end_e, padded_PI.dtype, float8_dtype=e4m3_dtype, pad_token_groups_for_grouped_mm=False
        )
    from torchao.prototype.moe_training import _to_mxfp8_then_scaled_grouped_mm as mxfp8_product

    return mxfp8_product(padded_PI, w_eIO, offs=end_e, out_dtype=padded_PI.dtype)


def padded_places(count_e: Tensor, num_rows: int, multiple: int) -> tuple[Tensor, Tensor, int]:
    """The layout of rows padded to a multiple per expert: the place of each row, where experts end, and the size.

    An expert without rows gets padding too: the gradient of its weights is then a sum of zeros, while not every kernel
    writes an empty sum. The size is a multiple, and the most that any counts can need, known without the counts; what
    is past the last end is unused.
    """
    padded_e = ((count_e + multiple - 1) // multiple).clamp_min(1) * multiple
    rows = torch.arange(num_rows, device=count_e.device)
    expert_R = torch.searchsorted(count_e.cumsum(0), rows, right=True).clamp_max(count_e.shape[0] - 1)
    shift_e = (padded_e.cumsum(0) - padded_e) - (count_e.cumsum(0) - count_e)
    size = _round_up(num_rows, multiple) + count_e.shape[0] * multiple
    return rows + shift_e[expert_R], padded_e.cumsum(0).to(torch.int32), size


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
