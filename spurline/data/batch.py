"""The inputs of one forward pass: tokens, labels, and image patches.

B sequences of L tokens; N patches over all images, with C values each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spurline.data.patch_sizes import MERGE

IGNORE_INDEX = -100
"""Label of positions that are excluded from the loss."""


@dataclass(frozen=True)
class Spot:
    """The location of an image of height x width patches: sequence `row`, starting at position `start`."""

    row: int
    start: int
    height: int
    width: int

    @property
    def num_patches(self) -> int:
        return self.height * self.width

    @property
    def num_features(self) -> int:
        """Number of positions the image occupies in its sequence."""
        return self.num_patches // MERGE**2


@dataclass(frozen=True)
class Images:
    """The images of a batch, concatenated; may be empty."""

    patches_NC: Tensor
    spots: tuple[Spot, ...]

    def to(self, device: torch.device) -> Images:
        return replace(self, patches_NC=self.patches_NC.to(device, non_blocking=True))

    def pin_memory(self) -> Images:
        return replace(self, patches_NC=self.patches_NC.pin_memory())

    def take(self, rows: Sequence[int]) -> Images:
        """The images of the given sequences, renumbered 0, 1, ...; `rows` may repeat."""
        parts = self.patches_NC.split([spot.num_patches for spot in self.spots])
        taken = [
            (replace(spot, row=new), part_NC)
            for new, old in enumerate(rows)
            for spot, part_NC in zip(self.spots, parts, strict=True)
            if spot.row == old
        ]
        patches_NC = torch.cat([self.patches_NC[:0], *(part_NC for _, part_NC in taken)])
        return Images(patches_NC, tuple(spot for spot, _ in taken))


@dataclass(frozen=True)
class Batch:
    tokens_BL: Tensor
    labels_BL: Tensor
    """The next token at each position, or IGNORE_INDEX."""
    images: Images | None = None
    """None for text-only datasets."""
    documents_BL: Tensor | None = None
    """Document id of each token if attention is masked by document, else None."""

    @property
    def extras(self) -> dict[str, Any]:
        """Keyword arguments of the model besides the tokens."""
        extras = {"images": self.images, "documents_BL": self.documents_BL}
        return {name: extra for name, extra in extras.items() if extra is not None}

    def to(self, device: torch.device) -> Batch:
        """The batch on a device; copies from pinned memory are asynchronous."""
        images = None if self.images is None else self.images.to(device)
        return self._each(lambda tensor: tensor.to(device, non_blocking=True), images)

    def pin_memory(self) -> Batch:
        """The batch in pinned memory, for asynchronous copies to an accelerator."""
        images = None if self.images is None else self.images.pin_memory()
        return self._each(Tensor.pin_memory, images)

    def _each(self, change: Callable[[Tensor], Tensor], images: Images | None) -> Batch:
        documents_BL = None if self.documents_BL is None else change(self.documents_BL)
        return Batch(change(self.tokens_BL), change(self.labels_BL), images, documents_BL)

    def take(self, rows: Sequence[int]) -> Batch:
        """The given sequences as a batch; `rows` may repeat."""
        images = None if self.images is None else self.images.take(rows)
        documents_BL = None if self.documents_BL is None else self.documents_BL[list(rows)]
        return Batch(self.tokens_BL[list(rows)], self.labels_BL[list(rows)], images, documents_BL)
