"""What every block needs besides its activations: one value, made once in each forward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from spurline.comm.sequence import HeadTailShard
from spurline.models.common.cache import LayerKVCache
from spurline.models.common.rope import Rope


@dataclass(frozen=True)
class BlockContext:
    """The same for all layers but for the KV cache. B sequences of L positions, P pairs of rotary channels.

    A pipeline stage makes its own from the tokens of the micro-batch; it is never sent between stages.
    """

    rope: Rope
    """Cosine and sine of every position's rotary angles, two of (L, P) or (B, L, P)."""
    length: int | None = None
    """L, where a rank has a part of the positions between blocks."""
    mask: Tensor | BlockMask | None = None
    """Attention mask, (B, 1, L, L) and True where a position may attend to another, or by blocks (None: causal).
    With a shard, queries may be those of this rank alone and keys those of whole sequences."""
    shard: HeadTailShard | None = None
    """Context parallelism: which positions of whole sequences the L are that this rank has (None: all of them)."""
    cache: LayerKVCache | None = None
    """This layer's KV cache, while text is generated."""

    def with_cache(self, cache: LayerKVCache | None) -> BlockContext:
        """This context for the layer that `cache` belongs to."""
        return self if cache is None else replace(self, cache=cache)
