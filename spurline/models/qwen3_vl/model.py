"""The Qwen3-VL models: Qwen3 with images in its sequences.

B sequences of L positions, of which this rank has l; D model width; M visual features of all images.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from spurline.accelerator import copy_to_device
from spurline.comm.sequence import HeadTailShard, SequenceShard
from spurline.data.batch import Images, Spot
from spurline.models.common.cache import KVCache
from spurline.models.common.context import BlockContext
from spurline.models.common.rope import Rope
from spurline.models.qwen3.model import Qwen3
from spurline.models.qwen3_vl.configs import Qwen3VLConfig
from spurline.models.qwen3_vl.geometry import feature_of_position, sequence_positions
from spurline.models.qwen3_vl.vision import VisionEncoder
from spurline.parallel.context import own

V = TypeVar("V", bound="Qwen3VL")


class Qwen3VL(Qwen3):
    """Vision-language model: tokens (B, L) and images among them -> logits (B, L, vocab_size).

    An image's features replace the embeddings of its placeholder tokens. DeepStack adds features from intermediate
    layers of the vision encoder to the hidden states at the same positions, after the first blocks of the text model.
    """

    config: Qwen3VLConfig
    vision: VisionEncoder | None

    def __init__(self, config: Qwen3VLConfig) -> None:
        super().__init__(config)
        self.vision = VisionEncoder(config.vision, config.dim)

    def blocks(self) -> list[nn.Module]:
        """The modules that activation checkpointing, compile and FSDP2 wrap individually."""
        vision = [] if self.vision is None else self.vision.layers.values()
        return [*vision, *self.layers.values()]

    def first_stage_modules(self) -> set[str]:
        return super().first_stage_modules() | {"vision"}

    def stage(
        self: V, first_layer: int, end_layer: int, *, is_first: bool | None = None, is_last: bool | None = None
    ) -> V:
        """One pipeline stage. The first has the vision encoder and all blocks after which DeepStack adds features."""
        num_deepstack = len(self.config.vision.deepstack_layers)
        has_all = first_layer == 0 and end_layer >= num_deepstack and is_first is not False
        if first_layer < num_deepstack and not has_all:
            raise ValueError(
                f"the first stage must have the first {num_deepstack} layers, behind which DeepStack adds the features"
                f" of the vision encoder: got a stage of layers {first_layer} to {end_layer - 1}"
            )
        return super().stage(first_layer, end_layer, is_first=is_first, is_last=is_last)

    def hidden_states(
        self,
        tokens_BL: Tensor,
        cache: KVCache | None = None,
        hidden_BlD: Tensor | None = None,
        *,
        images: Images | None = None,
        **extras: Any,
    ) -> Tensor:
        """(B, L) -> (B, l, D). A KV cache and document ids are supported only for text without images."""
        if images is None or self.vision is None:
            return super().hidden_states(tokens_BL, cache, hidden_BlD, images=images, **extras)
        context = self.block_context(tokens_BL, cache, images=images, **extras)
        position_M, feature_M = (
            copy_to_device(part, tokens_BL.device)
            for part in self._own_features(images.spots, tokens_BL, context.shard)
        )
        features_MD, deepstack = self._encode(self.vision, images)
        x_BlD = self.embed(own(tokens_BL, context.shard))
        x_XD = x_BlD.flatten(0, 1).index_copy(0, position_M, features_MD.index_select(0, feature_M))
        x_BlD = x_XD.view_as(x_BlD)
        for block, more_MD in zip_longest(self.layers.values(), deepstack):
            x_BlD = block(x_BlD, context)
            if more_MD is not None:
                x_XD = x_BlD.flatten(0, 1).index_add(0, position_M, more_MD.index_select(0, feature_M))
                x_BlD = x_XD.view_as(x_BlD)
        return x_BlD

    def block_context(
        self,
        tokens_BL: Tensor,
        cache: KVCache | None = None,
        documents_BL: Tensor | None = None,
        shard: HeadTailShard | None = None,
        images: Images | None = None,
    ) -> BlockContext:
        """With images, rotary positions have three axes, derived from the images' sizes and positions."""
        if images is None:
            return super().block_context(tokens_BL, cache, documents_BL, shard)
        assert cache is None, "a KV cache is for text without pictures"
        assert documents_BL is None, "document ids are for text without pictures"
        context = super().block_context(tokens_BL, shard=shard)
        position_ABL = copy_to_device(sequence_positions(images.spots, *tokens_BL.shape), tokens_BL.device)
        if context.shard is not None:
            position_ABL = context.shard.shard(position_ABL, 2)
        return replace(context, rope=self._rope_of_axes(position_ABL))

    def _encode(self, vision: VisionEncoder, images: Images) -> tuple[Tensor, list[Tensor]]:
        patches_NC, spots = images.patches_NC, images.spots
        if not spots:
            # A rank without images must still take part in the encoder's collectives. No feature of this blank image
            # is used, so the encoder's gradients are zeros.
            spots = (Spot(row=0, start=0, height=2, width=2),)
            patches_NC = patches_NC.new_zeros(spots[0].num_patches, patches_NC.shape[1])
        return vision(patches_NC.to(self.compute_dtype), spots)

    def _own_features(
        self, spots: tuple[Spot, ...], tokens_BL: Tensor, shard: HeadTailShard | None
    ) -> tuple[Tensor, Tensor]:
        """Which of this rank's B * l positions hold a visual feature, and which feature that is."""
        group = self.tp.group
        feature_BL = own(feature_of_position(spots, *tokens_BL.shape), shard)
        share = SequenceShard(feature_BL.shape[1], 1 if group is None else group.size(), self.tp.rank)
        feature_X = share.shard(feature_BL, dim=1).flatten()
        position_M = (feature_X >= 0).nonzero().squeeze(1)
        return position_M, feature_X[position_M]

    def _rope_of_axes(self, position_ABL: Tensor) -> Rope:
        """Each pair of channels rotates by its time, height or width: (3, B, L) -> two of (B, L, P)."""
        axis_P = copy_to_device(torch.tensor(self.config.pairs_of_axis()), position_ABL.device)
        is_axis_A11P = (torch.arange(3, device=axis_P.device).unsqueeze(1) == axis_P)[:, None, None]
        cos_ABLP, sin_ABLP = self.rope(position_ABL)
        return (cos_ABLP * is_axis_A11P).sum(0), (sin_ABLP * is_axis_A11P).sum(0)
