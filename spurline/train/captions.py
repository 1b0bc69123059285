"""Captions that a vision-language model writes for held-out pictures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spurline.data import DataSets
from spurline.data.batch import Images
from spurline.data.patches import to_patches
from spurline.data.pictures import PictureWindows, prompt_of, spot_of
from spurline.models.common.generate import generate, printable
from spurline.models.common.sampling import GREEDY

_MAX_TOKENS = 64  # of a caption: generation with pictures has no cache, so each token costs a full forward pass


@dataclass(frozen=True)
class Caption:
    written: str
    true: str


class _WithImages(nn.Module):
    """The model with fixed images for its prompts: tokens (B, L) -> logits (B, L, V)."""

    def __init__(self, model: nn.Module, images: Images) -> None:
        super().__init__()
        self.model = model
        self.images = images
        self.tp: Any = model.tp

    def forward(self, tokens_BL: Tensor) -> Tensor:
        return self.model(tokens_BL, images=self.images)


def write_captions(model: nn.Module, data: DataSets, device: torch.device, most: int = 3) -> Iterator[Caption]:
    """Greedy captions of at most `most` held-out pictures; none without held-out pictures."""
    windows = None if data.validation is None else data.validation.windows
    if not isinstance(windows, PictureWindows):
        return
    samples = [sample for sample in windows.samples if sample.picture is not None][:most]
    if not samples:
        return
    pictures = [sample.picture for sample in samples if sample.picture is not None]
    patches_NC = torch.cat([torch.from_numpy(to_patches(picture.load())) for picture in pictures])
    spots = tuple(spot_of(picture, row, start=0) for row, picture in enumerate(pictures))
    prompts = [prompt_of(sample, windows.tokenizer) for sample in samples]
    num_tokens = min(max(len(windows.tokenizer.encode(sample.text)) for sample in samples) + 1, _MAX_TOKENS)
    texts = generate(
        _WithImages(model, Images(patches_NC, spots).to(device)),
        prompts,
        num_tokens,
        sampling=GREEDY,
        max_context=max(map(len, prompts)) + num_tokens,
    )
    for sample, ids in zip(samples, texts, strict=True):
        until = ids.index(windows.tokenizer.boundary_id) if windows.tokenizer.boundary_id in ids else len(ids)
        yield Caption(printable(windows.tokenizer.decode(ids[:until])), printable(sample.text))
