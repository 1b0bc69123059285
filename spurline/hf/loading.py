"""Load a Hugging Face folder directly into a distributed model: each rank reads only its shards.

In every layout, a rank's shard of a tensor is a box: a range along every dim. The box is read in chunks of a few
megabytes, from the stored pieces of the tensor, to keep memory use low.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spurline.comm.own_part import own_indices
from spurline.config_io import ConfigError
from spurline.hf.accounting import account
from spurline.hf.folder import find_tensors
from spurline.hf.quantized import AnyStored, dequantized
from spurline.hf.settings import mismatch, read_folder_model
from spurline.hf.slots import dtype_of, read_slot
from spurline.lora.adapters import is_adapter
from spurline.models.common.hf import Piece, Slot

CHUNK_ELEMENTS = 2**21
Box = tuple[range, ...]


class FolderWeights:
    """The weights of a Hugging Face folder, for a model with the same config in any layout."""

    def __init__(self, folder: Path, model: Any, compare_copies: bool = True) -> None:
        """Reads config.json and the headers of all files; raises a ConfigError with everything that does not fit.

        `compare_copies`: also read tensors that are stored twice and check that they are equal.
        """
        their_config, self.architecture, their_model = read_folder_model(folder)
        if why := mismatch(their_model, model):
            raise ConfigError([f"{folder} {why}"])
        with_mtp = {"num_mtp_layers": model.num_mtp_layers} if hasattr(model, "num_mtp_layers") else {}
        whole = replace(their_model, **with_mtp)
        self._stored = dequantized(find_tensors(folder), their_config, f"{folder}")
        slots, self.left_out = account(
            self.architecture, whole, their_config, self._stored, f"{folder}", compare_copies=compare_copies
        )
        self._slots = {slot.name: slot for slot in slots}

    @property
    def num_tensors(self) -> int:
        return len({piece.name for slot in self._slots.values() for piece in slot.pieces})

    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each of our tensors, by name."""
        return {name: (slot.shape, dtype_of(slot, self._stored)) for name, slot in self._slots.items()}

    def read(self, name: str) -> Tensor:
        """One of our tensors as a whole, in float32: quantized values are not rounded."""
        return read_slot(self._slots[name], self._stored, torch.float32)

    @torch.no_grad()
    def load(self, model: nn.Module) -> None:
        """Fill this rank's shard of every parameter and persistent buffer, except adapters."""
        tensors = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if not is_adapter(name)}
        if unknown := sorted(tensors.keys() - self._slots.keys()):
            raise ValueError(f"the model has {unknown[0]}, and a Hugging Face folder can't have it")
        for name, tensor in tensors.items():
            part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if part.numel():
                fill_box(part, self._slots[name], own_box(tensor), self._stored)
            # A DTensor does not notice in-place writes to its local tensor, and caches depend on its version.
            torch.autograd.graph.increment_version(tensor)


def own_box(tensor: Tensor) -> Box:
    """The range of this rank's shard along each dim of the full tensor."""
    return tuple(range(int(index[0]), int(index[-1]) + 1) for index in own_indices(tensor))


def fill_box(part: Tensor, slot: Slot, box: Box, stored: Mapping[str, AnyStored]) -> None:
    """Fill `part`, on any device, with a box of one of our tensors."""
    if not slot.pieces:
        part.zero_()
        return
    shape = slot.shape or (1,)
    part, box = (part, box) if slot.shape else (part.view(1), (range(1),))
    size, rest = divmod(shape[0], len(slot.pieces))
    assert not rest, f"{slot.name} {shape} has {len(slot.pieces)} pieces"
    for number in range(box[0].start // size, -(-box[0].stop // size)):
        inside = _overlap(box[0], range(number * size, (number + 1) * size))
        target = part[inside.start - box[0].start : inside.stop - box[0].start]
        rows = range(inside.start - number * size, inside.stop - number * size)
        piece = slot.pieces[number]
        if size == 1 and len(shape) > 1:  # the piece is a separate matrix, such as one expert's
            _fill(target[0], piece, shape[1:], box[1:], stored[piece.name])
        else:
            _fill(target, piece, (size, *shape[1:]), (rows, *box[1:]), stored[piece.name])


def _fill(target: Tensor, piece: Piece, shape: tuple[int, ...], box: Box, stored: AnyStored) -> None:
    """Fill the target with a box of one piece; `shape` is the piece's shape in our tensor."""
    if piece.columns is not None:
        _fill_columns(target, piece, box, stored)
    elif len(shape) == 1:
        target.copy_(stored.read_box(piece.start, shape[0], range(1), box[0])[0])
    else:
        num_columns = prod(shape[1:])
        columns = box[1] if len(shape) == 2 else range(num_columns)
        for rows, own in _chunks(box[0], len(columns)):
            read = stored.read_box(piece.start, num_columns, rows, columns)
            if len(shape) > 2:
                read = read.view(len(rows), *shape[1:])[(slice(None), *(slice(r.start, r.stop) for r in box[1:]))]
            target[own].copy_(read)


def _fill_columns(target: Tensor, piece: Piece, box: Box, stored: AnyStored) -> None:
    """The same for a piece that is some columns of a stored matrix, which may be our rows."""
    assert piece.columns is not None
    _, num_columns = piece.columns.shape
    our_columns, rows = box if piece.columns.transposed else (box[1], box[0])
    chosen = range(num_columns)[piece.columns.chosen][our_columns.start : our_columns.stop]
    columns = range(chosen[0], chosen[-1] + 1)
    by_their_rows = target.mT if piece.columns.transposed else target
    for chunk, own in _chunks(rows, len(columns)):
        read = stored.read_box(piece.start, num_columns, chunk, columns)
        by_their_rows[own].copy_(read[:, :: chosen.step])


def _chunks(rows: range, num_columns: int) -> Iterator[tuple[range, slice]]:
    """Ranges of rows with at most CHUNK_ELEMENTS elements, and their slices relative to the first row."""
    height = max(1, CHUNK_ELEMENTS // max(1, num_columns))
    for first in range(rows.start, rows.stop, height):
        stop = min(first + height, rows.stop)
        yield range(first, stop), slice(first - rows.start, stop - rows.start)


def _overlap(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))
