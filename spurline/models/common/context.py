"""What every block needs besides its activations: one value, made once in each forward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from spurline.models.common.cache import LayerKVCache
from spurline.models.common.rope import Rope


@dataclass(frozen=True)
class BlockContext:
    """The same for all layers but for the KV cache. B sequences of L positions, P pairs of rotary channels.

    A pipeline stage makes its own from the tokens of the micro-batch; it is never sent between stages.
    """

    rope: Rope
    """Cosine and sine of every position's rotary angles, two of (L, P) or (B, L, P): for whole sequences."""
    length: int | None = None
    """L, the length of whole sequences, where a rank has a part of the positions between blocks."""
    mask: Tensor | BlockMask | None = None
    """Attention mask, (B, 1, L, L) and True where a position may attend to another, or by blocks (None: causal)."""
    cache: LayerKVCache | None = None
    """This layer's KV cache, while text is generated."""

    def with_cache(self, cache: LayerKVCache | None) -> BlockContext:
        """This context for the layer that `cache` belongs to."""
        return self if cache is None else replace(self, cache=cache)
