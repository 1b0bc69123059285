"""What every block needs besides its activations: one object, created once per forward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from spurline.comm.sequence import HeadTailShard
from spurline.models.common.cache import LayerKVCache
from spurline.models.common.rope import Rope


@dataclass(frozen=True)
class BlockContext:
    """Shared by all layers, except for the KV cache. B sequences of L positions, P pairs of rotary channels.

    Each pipeline stage creates its own from the tokens of the micro-batch; it is never sent between stages.
    """

    rope: Rope
    """Cosine and sine of every position's rotary angles, two of (L, P) or (B, L, P)."""
    length: int | None = None
    """L, which a rank needs when it holds only a shard of the positions between blocks."""
    mask: Tensor | BlockMask | None = None
    """Attention mask: (B, 1, L, L), True where a position may attend to another, or a BlockMask (None: causal).
    With a shard, its queries may be this rank's positions alone; its keys are the full sequences."""
    shard: HeadTailShard | None = None
    """Context parallelism: which positions of the full sequences this rank holds as its L (None: all of them)."""
    cache: LayerKVCache | None = None
    """This layer's KV cache, during generation."""

    def with_cache(self, cache: LayerKVCache | None) -> BlockContext:
        """This context for the layer that `cache` belongs to."""
        return self if cache is None else replace(self, cache=cache)
