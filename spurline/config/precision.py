"""The section for 8-bit matmuls: which layers, and how their operands are quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Precision:
    """8-bit matmuls: float8 with rowwise scales, or MXFP8 with one scale per 32 elements."""

    recipe: Literal["none", "float8", "mxfp8"] = "none"
    """How matmul operands are quantized: float8 (rowwise scales), mxfp8 (one scale per 32 elements), or not at all."""
    layers: tuple[str, ...] = ("layers.*",)
    """Name patterns of layers to convert: linear layers, experts, shared experts. `*` matches any text, `a|b` either.
    The default converts all in blocks; router, norms, embedding and head stay as they are. Each pattern and
    alternative must match."""
    grad_dtype: Literal["e4m3", "e5m2"] = "e4m3"
    """Format of quantized gradients; activations and weights are always e4m3. Accelerators need e4m3, or emulate."""
    emulate: bool = False
    """Emulate on accelerators too, as CPUs always do: quantize operands, but multiply them in training.dtype."""

    def problems(self) -> list[str]:
        if self.recipe == "none":
            return [] if self.layers == Precision.layers else ["layers needs a recipe: float8 or mxfp8"]
        return [] if self.layers and all(self.layers) else ["layers must name at least one layer, such as 'layers.*'"]
