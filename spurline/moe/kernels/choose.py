"""Kernel selection: which kernel runs for which rows, and why.

Every kernel scores itself (`Kernel.suits`); `auto` takes the highest score, a name takes that kernel or reports why it
can't run. Inside the CPU kernel, `chunk_product` decides how a chunk of rows is multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from spurline.moe.kernels.kernel import FunctionKernel, Kernel, Verdict, Work
from spurline.moe.registry import BUILT_IN_KERNELS, KERNELS
from spurline.ops.skinny_matmul import LARGE, most_skinny_rows
from spurline.registry import resolve

MANY_PARTS = 8
"""Experts in a chunk from which on one grouped matmul is faster than one matmul each."""


_made: dict[str, tuple[object, Kernel]] = {}


def kernel_named(name: str) -> Kernel:
    """The kernel registered as `name`: one object for all layers."""
    if name in _made and _made[name][0] is KERNELS.get(name):
        return _made[name][1]
    part = resolve("experts_backend", name, KERNELS)
    kernel = part() if isinstance(part, type) and issubclass(part, Kernel) else part
    if not isinstance(kernel, Kernel):
        kernel = FunctionKernel(kernel)
    kernel.name = name
    _made[name] = KERNELS[name], kernel
    return kernel


def load_kernels(wanted: str = "auto") -> None:
    """Import all built-in kernels and the wanted one now, so that nothing is imported while a graph is traced."""
    for name in BUILT_IN_KERNELS if wanted == "auto" else (*BUILT_IN_KERNELS, wanted):
        kernel_named(name)


def choose_kernel(work: Work, wanted: str = "auto") -> Kernel:
    """The kernel for this work: the best one, or the wanted one; a ValueError if that can't do it."""
    if torch.compiler.is_compiling():
        return _choose.__wrapped__(work, wanted)
    return _choose(work, wanted)


@lru_cache(maxsize=4096)
def _choose(work: Work, wanted: str) -> Kernel:
    if wanted == "auto":
        best, highest = None, -1
        for name in BUILT_IN_KERNELS:
            score = verdict_of(kernel_named(name), work).score
            if score > highest:
                best, highest = kernel_named(name), score
        assert best is not None
        return best
    kernel = kernel_named(wanted)
    verdict = verdict_of(kernel, work)
    if not verdict.score:
        raise ValueError(f"experts_backend {wanted!r} {verdict.why}: choose 'loop' or 'auto'")
    return kernel


def verdict_of(kernel: Kernel, work: Work) -> Verdict:
    """A kernel's verdict on the work; with adapters it must have `matmul`."""
    if work.adapted and not kernel.multiplies:
        return Verdict(0, "computes experts as a whole, and these have adapters (lora.targets)")
    return kernel.suits(work)


def verdicts(work: Work) -> dict[str, Verdict]:
    """Each kernel's verdict on this work, best first."""
    found = {name: verdict_of(kernel_named(name), work) for name in BUILT_IN_KERNELS}
    return dict(sorted(found.items(), key=lambda item: -item[1].score))


def grouped_mm_takes(dtype: torch.dtype, *widths: int) -> bool:
    """Whether PyTorch's grouped matmul supports rows of this dtype and these widths (multiples of 16 bytes)."""
    is_known = dtype in (torch.float32, torch.bfloat16, torch.float16)
    return is_known and math.gcd(*widths) * dtype.itemsize % 16 == 0


def chunk_product(w_eIO: Tensor, dtype: torch.dtype) -> tuple[int, bool]:
    """How chunks are multiplied by these matrices, in this dtype.

    Returns up to how many rows an expert's matmul is a skinny one (`ops/skinny_matmul.py`; 0: never), and whether the
    matrices' layout lets PyTorch's grouped matmul multiply all experts of a chunk (see `is_skinny` and `is_grouped`).
    """
    is_large = w_eIO.shape[1] * w_eIO.shape[2] >= LARGE
    skinny_rows = most_skinny_rows(w_eIO[0].t(), dtype) if is_large and w_eIO.shape[0] else 0
    is_dense = w_eIO.is_contiguous() or w_eIO.mT.is_contiguous()
    return skinny_rows, w_eIO.dtype == dtype and is_dense


def is_skinny(sizes: Sequence[int], skinny_rows: int) -> bool:
    """Whether at least half of the experts of a chunk have at most `skinny_rows` rows."""
    return 2 * sum(size <= skinny_rows for size in sizes) >= len(sizes)


def is_grouped(sizes: Sequence[int]) -> bool:
    """Whether a chunk has enough experts for one grouped matmul to be faster."""
    return len(sizes) >= MANY_PARTS
