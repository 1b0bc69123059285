"""The KV cache: what attention keeps of earlier positions, so that a new token costs one position instead of all.

B rows of a batch, L positions of this forward pass, S slots up to the last of them, H query heads, G heads of keys and
values, R width of queries and keys, V width of values.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """The KV cache of a batch of texts, for all layers of a model, with room for num_slots tokens per row.

    All rows fill the same slots: shorter prompts are padded on the left, by padding_B tokens. A row's positions count
    from its first real token; real tokens do not attend to the padding. Layers allocate their buffers on first use.
    """

    def __init__(self, num_layers: int, num_slots: int, padding_B: Tensor | None = None) -> None:
        self.num_slots, self._padding_B = num_slots, padding_B
        self._twins: dict[int, KVCache] = {}
        self.padding_B1 = None if padding_B is None or not padding_B.any() else padding_B.unsqueeze(1)
        self.start = self.stop = 0
        self.mask_B1LS: Tensor | None = None
        self.layers = [LayerKVCache(self) for _ in range(num_layers)]

    def twin(self, number: int) -> KVCache:
        """A cache of the same texts for another pipeline stage of the model, which advances on its own."""
        if number not in self._twins:
            self._twins[number] = KVCache(len(self.layers), self.num_slots, self._padding_B)
        return self._twins[number]

    def advance(self, num_tokens: int, device: torch.device) -> Tensor:
        """Advance to the next num_tokens slots; returns the positions of their tokens, (L,) or (B, L)."""
        assert self.stop + num_tokens <= self.num_slots, f"{self.stop} + {num_tokens} tokens in {self.num_slots} slots"
        self.start, self.stop = self.stop, self.stop + num_tokens
        slot_L = torch.arange(self.start, self.stop, device=device)
        self.mask_B1LS = self._mask(slot_L)
        return slot_L if self.padding_B1 is None else (slot_L - self.padding_B1).clamp(min=0)

    def _mask(self, slot_L: Tensor) -> Tensor | None:
        """The attention mask of this forward pass; None for a prefill without padding, and for a single token."""
        if self.padding_B1 is None and (self.start == 0 or len(slot_L) == 1):
            return None
        slot_S = torch.arange(self.stop, device=slot_L.device)
        mask_B1LS = (slot_S <= slot_L.unsqueeze(1)).expand(1, 1, -1, -1)
        if self.padding_B1 is None:
            return mask_B1LS
        is_real_B11S = (slot_S >= self.padding_B1)[:, None, None]
        # Padding attends to itself: a softmax over nothing would be NaN.
        return mask_B1LS & is_real_B11S | (slot_S == slot_L.unsqueeze(1))


class LayerKVCache:
    """One layer's part of a KVCache: the tensors that its attention caches, with one row per slot."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._buffers: list[Tensor] = []

    @property
    def has_past(self) -> bool:
        """Whether there are tokens before those of this forward pass: False during prefill."""
        return self._cache.start > 0

    @property
    def mask(self) -> Tensor | None:
        """The attention mask, (B or 1, 1, L, S); None: causal during prefill, else everything is visible."""
        return self._cache.mask_B1LS

    def extend(self, *news: Tensor) -> list[Tensor]:
        """Append the current positions; returns past and current together: (.., L, W) -> (.., S, W)."""
        start, stop = self._cache.start, self._cache.stop
        if not self._buffers:
            self._buffers = [new.new_empty(*new.shape[:-2], self._cache.num_slots, new.shape[-1]) for new in news]
        for buffer, new in zip(self._buffers, news, strict=True):
            buffer[..., start:stop, :] = new
        return [buffer[..., :stop, :] for buffer in self._buffers]


def attend_to_past(
    q_BHLR: Tensor,
    k_BGSR: Tensor,
    v_BGSV: Tensor,
    mask_B1LS: Tensor | None,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention of a few queries to many keys, under the mask: -> (B, H, L, V).

    The query heads that share a head of keys are rows of one matmul, so that keys and values are read once, in place.
    A sink is an additional logit of its head, without a value.
    """
    B, H, L, _ = q_BHLR.shape
    G = k_BGSR.shape[1]
    score_BGXS = (q_BHLR * scale).reshape(B, G, H // G * L, -1) @ k_BGSR.transpose(-2, -1)
    if mask_B1LS is not None:
        score_BGXS = score_BGXS.masked_fill(~mask_B1LS.repeat(1, 1, H // G, 1), float("-inf"))
    if sinks_H is not None:
        sink_GX1 = sinks_H.view(G, H // G, 1).expand(-1, -1, L).reshape(G, -1, 1)
        score_BGXS = torch.cat([score_BGXS, sink_GX1.expand(B, -1, -1, -1)], dim=-1)
    probability_BGXS = score_BGXS.softmax(dim=-1, dtype=torch.float32).to(v_BGSV.dtype)
    if sinks_H is not None:
        probability_BGXS = probability_BGXS[..., :-1]
    return (probability_BGXS @ v_BGSV).view(B, H, L, -1)
