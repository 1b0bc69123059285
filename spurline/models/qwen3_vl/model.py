"""The Qwen3-VL models: Qwen3 with pictures in its sequences.

B sequences of L positions, of which this rank has l; D width; M features of all pictures.
"""

from __future__ import annotations

from itertools import zip_longest

import torch
from torch import Tensor, nn

from spurline.comm.sequence import SequenceShard
from spurline.data.batch import Images, Spot
from spurline.models.common.cache import Cache
from spurline.models.common.rope import Rope
from spurline.models.qwen3.model import Qwen3
from spurline.models.qwen3_vl.configs import Qwen3VLConfig
from spurline.models.qwen3_vl.geometry import feature_of_position, sequence_positions
from spurline.models.qwen3_vl.vision import VisionEncoder


class Qwen3VL(Qwen3):
    """Language model that sees: tokens (B, L) and pictures among them -> logits (B, L, vocab_size).

    A picture's features take the place of the tokens at its spot, whatever these are. DeepStack adds features from the
    encoder's middle at the same places, behind the first blocks of the text model.
    """

    def __init__(self, config: Qwen3VLConfig) -> None:
        super().__init__(config)
        self.vision = VisionEncoder(config.vision, config.dim)
        self.pairs_of_axis = config.pairs_of_axis()

    def blocks(self) -> list[nn.Module]:
        """What is recomputed, compiled and sharded by itself."""
        return [*self.vision.layers.values(), *self.layers.values()]

    def hidden(
        self,
        tokens_BL: Tensor,
        cache: Cache | None = None,
        documents_BL: Tensor | None = None,
        images: Images | None = None,
    ) -> Tensor:
        """What the output head sees: (B, L) -> (B, L, D). A cache and documents are for text alone."""
        if images is None:
            return super().hidden(tokens_BL, cache, documents_BL)
        assert cache is None, "a cache is for text alone"
        assert documents_BL is None, "documents are for text alone"
        B, L = tokens_BL.shape
        position_M, feature_M = (part.to(tokens_BL.device) for part in self._own_features(images.spots, B, L))
        features_MD, added = self._encode(images)
        x_BlD = self.embed(tokens_BL)
        rope = self._rope_of_axes(sequence_positions(images.spots, B, L).to(tokens_BL.device))

        x_XD = x_BlD.flatten(0, 1).index_copy(0, position_M, features_MD.index_select(0, feature_M))
        x_BlD = x_XD.view_as(x_BlD)
        for block, more_MD in zip_longest(self.layers.values(), added):
            x_BlD = block(x_BlD, rope, L)
            if more_MD is not None:
                x_XD = x_BlD.flatten(0, 1).index_add(0, position_M, more_MD.index_select(0, feature_M))
                x_BlD = x_XD.view_as(x_BlD)
        return self.tp.all_gather_sequence(self.norm(x_BlD), L)

    def _encode(self, images: Images) -> tuple[Tensor, list[Tensor]]:
        patches_NC, spots = images.patches_NC, images.spots
        if not spots:
            # A rank without pictures still takes part in what the others' encoders communicate. No feature of this
            # empty picture is used, so the gradients that it gives are zeros.
            spots = (Spot(row=0, start=0, height=2, width=2),)
            patches_NC = patches_NC.new_zeros(spots[0].num_patches, patches_NC.shape[1])
        return self.vision(patches_NC.to(self.compute_dtype), spots)

    def _own_features(self, spots: tuple[Spot, ...], B: int, L: int) -> tuple[Tensor, Tensor]:
        """Which of this rank's B * l positions hold a feature, and which feature that is."""
        group = self.tp.group
        shard = SequenceShard(L, 1 if group is None else group.size(), self.tp.rank)
        feature_X = shard.shard(feature_of_position(spots, B, L), dim=1).flatten()
        position_M = (feature_X >= 0).nonzero().squeeze(1)
        return position_M, feature_X[position_M]

    def _rope_of_axes(self, position_ABL: Tensor) -> Rope:
        """Each pair of channels turns with time, height or width: (3, B, L) -> two of (B, L, P)."""
        axis_P = torch.tensor(self.pairs_of_axis, device=position_ABL.device)
        is_axis_A11P = (torch.arange(3, device=axis_P.device).unsqueeze(1) == axis_P)[:, None, None]
        cos_ABLP, sin_ABLP = self.rope(position_ABL)
        return (cos_ABLP * is_axis_A11P).sum(0), (sin_ABLP * is_axis_A11P).sum(0)
