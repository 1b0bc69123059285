"""The section of products in 8 bits: which layers, and how their operands are rounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Precision:
    """Products in 8 bits: float8 with a scale a row, or MXFP8 with a scale for every 32 numbers."""

    recipe: Literal["none", "float8", "mxfp8"] = "none"
    """How operands of matrix products are rounded: float8 (scale a row), mxfp8 (scale a block of 32), or not at all."""
    layers: tuple[str, ...] = ("layers.*",)
    """Names of layers to convert: linear layers, experts, shared experts. `*` is any text; `a|b` is either. By default
    all inside blocks: router, norms, embedding and head stay as they are. A pattern without a layer is an error."""
    grad_dtype: Literal["e4m3", "e5m2"] = "e4m3"
    """What gradients are rounded to; activations and weights are e4m3. Experts on an accelerator: e4m3 only."""
    emulate: bool = False
    """On an accelerator too, round operands and multiply them in training.dtype, as a CPU does."""

    def problems(self) -> list[str]:
        if self.recipe == "none":
            return []
        return [] if self.layers and all(self.layers) else ["layers must name at least one layer, such as 'layers.*'"]
