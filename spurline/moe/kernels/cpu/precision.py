"""In which dtype experts multiply, and in which they sum."""

from functools import cache

import torch
from torch import Tensor


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products: x's own, or float32 where a CPU has no instructions for it.

    Without them bfloat16 is about eight times slower than to lift the rows and weights of one expert at a time to
    float32, multiply, and round the result.
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
