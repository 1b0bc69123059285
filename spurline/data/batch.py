"""What one forward pass takes: tokens, what they predict, and the pictures among them.

B sequences of L tokens; N patches of all pictures together, of C numbers each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spurline.data.patch_sizes import MERGE

IGNORE_INDEX = -100
"""The label of a position that predicts nothing."""


@dataclass(frozen=True)
class Spot:
    """Where a picture stands: in sequence `row`, from position `start`; it is height x width patches large."""

    row: int
    start: int
    height: int
    width: int

    @property
    def num_patches(self) -> int:
        return self.height * self.width

    @property
    def num_features(self) -> int:
        """Positions it takes in its sequence."""
        return self.num_patches // MERGE**2


@dataclass(frozen=True)
class Images:
    """The pictures of a batch, one after the other; a batch may have none while others of the data set do."""

    patches_NC: Tensor
    spots: tuple[Spot, ...]

    def to(self, device: torch.device) -> Images:
        return replace(self, patches_NC=self.patches_NC.to(device))

    def take(self, rows: Sequence[int]) -> Images:
        """The pictures of some sequences, which become sequences 0, 1, ..; one may be taken twice."""
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
    """The token that follows each one, or IGNORE_INDEX."""
    images: Images | None = None
    """None where the data set has no pictures at all."""
    documents_BL: Tensor | None = None
    """Which document each token is of, where attention shall not go from one to another."""

    @property
    def extras(self) -> dict[str, Any]:
        """What a model is given besides the tokens, by name."""
        extras = {"images": self.images, "documents_BL": self.documents_BL}
        return {name: extra for name, extra in extras.items() if extra is not None}

    def to(self, device: torch.device) -> Batch:
        images = None if self.images is None else self.images.to(device)
        documents_BL = None if self.documents_BL is None else self.documents_BL.to(device)
        return Batch(self.tokens_BL.to(device), self.labels_BL.to(device), images, documents_BL)

    def take(self, rows: Sequence[int]) -> Batch:
        """The given sequences; one may be taken twice."""
        images = None if self.images is None else self.images.take(rows)
        documents_BL = None if self.documents_BL is None else self.documents_BL[list(rows)]
        return Batch(self.tokens_BL[list(rows)], self.labels_BL[list(rows)], images, documents_BL)
