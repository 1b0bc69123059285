"""8-bit matmuls on devices that have them, by torchao (0.18), with the rounding of `low_precision.py`.

R rows sorted by expert, e experts, I inputs, O outputs. Imported on use. Not yet run on a device.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from spurline.ops.low_precision import DTYPES, LowPrecision

MULTIPLES = {"float8": 16, "mxfp8": 32}
"""The rows of each expert are padded to a multiple of this."""


@cache
def has_torchao() -> bool:
    return importlib.util.find_spec("torchao") is not None


@cache
def _float8_config(grad_dtype: str) -> tuple[Any, Any]:
    """torchao's rowwise recipe, with gradients in this dtype."""
    from dataclasses import replace

    from torchao.float8.config import CastConfig, Float8LinearConfig, ScalingGranularity
    from torchao.float8.float8_training_tensor import LinearMMConfig

    config = Float8LinearConfig.from_recipe_name("rowwise")
    if grad_dtype != "e4m3":
        cast = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=DTYPES[grad_dtype])
        changes = {"cast_config_grad_output": cast, "cast_config_grad_output_for_grad_weight": cast}
        config = replace(config, **changes)
    return LinearMMConfig(), config


def native_linear(x_RI: Tensor, w_OI: Tensor, precision: LowPrecision) -> Tensor:
    """(R, I) and (O, I) -> (R, O)."""
    if precision.recipe == "float8":
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        return matmul_with_hp_or_float8_args.apply(x_RI, w_OI.t(), *_float8_config(precision.grad_dtype))
    from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    return _to_mxfp8_then_scaled_mm(x_RI, w_OI, KernelPreference.AUTO, ScaleCalculationMode.RCEIL)


def native_grouped_matmul(rows_RI: Tensor, w_eOI: Tensor, count_e: Tensor, precision: LowPrecision) -> Tensor:
    """(R, I) and (e, O, I) -> (R, O), with each expert's rows padded as the device requires. No device-to-host read."""
    count_e = count_e.to(rows_RI.device)
    place_R, end_e, num_padded = padded_places(count_e, rows_RI.shape[0], MULTIPLES[precision.recipe])
    padded_PI = rows_RI.new_zeros(num_padded, rows_RI.shape[1]).index_copy(0, place_R, rows_RI)
    # torchao wants the right operand with its reduction dim innermost, which is the layout of the weights.
    matrices, out = w_eOI.contiguous().transpose(-2, -1), rows_RI.dtype
    if precision.recipe == "float8":
        from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm as float8_product

        result_PO = float8_product(padded_PI, matrices, end_e, out, pad_token_groups_for_grouped_mm=False)
    else:
        from torchao.prototype.moe_training import _to_mxfp8_then_scaled_grouped_mm as mxfp8_product

        result_PO = mxfp8_product(padded_PI, matrices, offs=end_e, out_dtype=out)
    return result_PO.index_select(0, place_R)


def padded_places(count_e: Tensor, num_rows: int, multiple: int) -> tuple[Tensor, Tensor, int]:
    """The layout of rows padded to a multiple per expert: the place of each row, where experts end, and the size.

    The size is the most that any counts can need, known without the counts; what is past the last end is unused.
    """
    padded_e = (count_e + multiple - 1) // multiple * multiple
    rows = torch.arange(num_rows, device=count_e.device)
    expert_R = torch.searchsorted(count_e.cumsum(0), rows, right=True).clamp_max(count_e.shape[0] - 1)
    shift_e = (padded_e.cumsum(0) - padded_e) - (count_e.cumsum(0) - count_e)
    size = -(-num_rows // multiple) * multiple + count_e.shape[0] * multiple
    return rows + shift_e[expert_R], padded_e.cumsum(0).to(torch.int32), size
