"""Batches of images with captions: samples packed into windows of equal length.

A sample is a boundary token, an optional image (start token, one token per feature, end token) and its text. Samples
are never split across windows. B windows of L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from spurline.config import Data
from spurline.data.batch import IGNORE_INDEX, Batch, Images, Spot
from spurline.data.loader import TrainBatches, ValidationBatches
from spurline.data.packing import first_fit
from spurline.data.patch_sizes import PATCH_DIM, PATCH_SIZE
from spurline.data.patches import to_patches
from spurline.data.picture_samples import Picture, Sample, read_samples
from spurline.data.picture_tokenizer import PictureTokenizer
from spurline.data.sources import combined_hash, stable_hash
from spurline.data.tokenizer import tokenizer_for

if TYPE_CHECKING:
    from spurline.data import DataSets


class PictureWindows:
    """Samples packed into windows of seq_len + 1 tokens; padding is excluded from the loss."""

    def __init__(self, samples: Sequence[Sample], tokenizer: PictureTokenizer, seq_len: int) -> None:
        self.samples = samples
        self.seq_len = seq_len
        self.tokenizer = tokenizer
        self._tokens = [_encode(sample, tokenizer) for sample in samples]
        for sample, tokens in zip(samples, self._tokens, strict=True):
            _check_length(sample, len(tokens), seq_len + 1)
        self._windows = first_fit([len(tokens) for tokens in self._tokens], seq_len + 1)

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._tokens))

    def batch(self, window_ids: Sequence[int]) -> Batch:
        window_BL = np.full((len(window_ids), self.seq_len + 1), self.tokenizer.boundary_id, np.int64)
        label_BL = np.full((len(window_ids), self.seq_len), IGNORE_INDEX, np.int64)
        spots: list[Spot] = []
        patches: list[npt.NDArray[np.float32]] = [np.empty((0, PATCH_DIM), np.float32)]
        for row, window_id in enumerate(window_ids):
            stop = 0
            for sample_id in self._windows[window_id]:
                start, stop = stop, stop + len(self._tokens[sample_id])
                window_BL[row, start:stop] = self._tokens[sample_id]
                if (picture := self.samples[sample_id].picture) is not None:
                    spots.append(spot_of(picture, row, start))
                    patches.append(to_patches(picture.load()))
            # The boundary after the last sample is a label too, as the end of its text.
            label_BL[row, :stop] = window_BL[row, 1 : stop + 1]
        label_BL[np.isin(label_BL, self.tokenizer.picture_ids)] = IGNORE_INDEX
        # A step consisting only of windows without labels would have no token to average its loss over.
        if len(without := np.flatnonzero((label_BL == IGNORE_INDEX).all(axis=1))):
            names = ", ".join(self.samples[sample_id].name for sample_id in self._windows[window_ids[without[0]]])
            raise ValueError(f"data.path: there is no token to learn from in {names}: give it a text")
        images = Images(torch.from_numpy(np.concatenate(patches)), tuple(spots))
        return Batch(torch.from_numpy(window_BL[:, :-1].copy()), torch.from_numpy(label_BL), images)


def open_pictures(data: Data, seq_len: int, seed: int) -> DataSets:
    """Read, split and pack the image dataset; raises a ValueError if it is invalid."""
    from spurline.data import DataSets

    tokenizer = PictureTokenizer(tokenizer_for(data))
    samples = sorted(read_samples(data), key=lambda sample: stable_hash("split", sample.name))
    if not data.path:  # generated samples that are too long can be dropped
        samples = [sample for sample in samples if len(_encode(sample, tokenizer)) <= seq_len + 1]
        if not samples:
            raise ValueError(f"training.seq_len {seq_len} is too short for any generated image with caption: raise it")
    num_held_out = min(round(len(samples) * data.validation_fraction), len(samples) - 1)
    held_out, samples = samples[:num_held_out], samples[num_held_out:]
    train = PictureWindows(samples, tokenizer, seq_len)
    validation = PictureWindows(held_out, tokenizer, seq_len)
    return DataSets(
        tokenizer=tokenizer,
        train=TrainBatches(train, seed, PictureWindows.batch),
        validation=ValidationBatches(validation, PictureWindows.batch) if held_out else None,
        num_documents=len(samples) + len(held_out),
        num_tokens=train.num_tokens + validation.num_tokens,
        fingerprint=lambda: combined_hash(
            f"{sample.name} {sample.text} {sample.picture and sample.picture.size}" for sample in [*samples, *held_out]
        ),
    )


def _encode(sample: Sample, tokenizer: PictureTokenizer) -> npt.NDArray[np.int64]:
    return np.array([*prompt_of(sample, tokenizer), *tokenizer.encode(sample.text)], np.int64)


def spot_of(picture: Picture, row: int, start: int) -> Spot:
    """The location of the image in a sample that begins at position `start`: after boundary and start token."""
    height, width = picture.size
    return Spot(row, start + 2, height // PATCH_SIZE, width // PATCH_SIZE)


def prompt_of(sample: Sample, tokenizer: PictureTokenizer) -> list[int]:
    """The tokens before the text: boundary and image."""
    picture = [] if sample.picture is None else tokenizer.picture(sample.picture.num_features)
    return [tokenizer.boundary_id, *picture]


def _check_length(sample: Sample, num_tokens: int, room: int) -> None:
    if num_tokens > room:
        num_features = sample.picture.num_features if sample.picture else 0
        raise ValueError(
            f"data.path: {sample.name} has {num_tokens} tokens ({num_features} of them image features), but a window"
            f" holds {room} (training.seq_len + 1): raise training.seq_len or lower data.max_pixels"
        )
