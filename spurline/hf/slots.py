"""Build our tensors from pieces of theirs, and theirs from pieces of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from spurline.hf.quantized import AnyStored
from spurline.hf.safetensors_file import FLOATS
from spurline.models.common.hf import Piece, Slot

Read = Callable[[Tensor, str, int], None]
"""read(target, name, start): fill a contiguous tensor with elements of their tensor `name`, from `start` on."""


def assemble(slot: Slot, dtype: torch.dtype, read: Read) -> Tensor:
    """Assemble one of our tensors piece by piece; zeros if they have no such tensor."""
    if not slot.pieces:
        return torch.zeros(slot.shape, dtype=dtype)
    tensor = torch.empty(slot.shape, dtype=dtype)
    for target, piece in zip(tensor.view(-1).split(slot.piece_size), slot.pieces, strict=True):
        if piece.columns is None:
            read(target, piece.name, piece.start)
        else:
            run = torch.empty(slot.stored_size(piece), dtype=dtype)
            read(run, piece.name, piece.start)
            chosen = _chosen(run, piece)
            target.view(chosen.shape).copy_(chosen)
    return tensor


def read_slot(slot: Slot, stored: Mapping[str, AnyStored], dtype: torch.dtype) -> Tensor:
    """Assemble one of our tensors from its stored pieces."""
    return assemble(slot, dtype, lambda target, name, start: stored[name].read_into(target, start))


def dtype_of(slot: Slot, stored: Mapping[str, AnyStored]) -> torch.dtype:
    """The dtype in which one of our tensors is stored; float32 if they have no such tensor."""
    return FLOATS[stored[slot.pieces[0].name].dtype] if slot.pieces else torch.float32


def place(slot: Slot, number: int, ours: Tensor, theirs: Tensor) -> None:
    """Copy piece number `number` of our tensor to its place in theirs; both are full, contiguous tensors."""
    piece = slot.pieces[number]
    source = ours.view(-1)[number * slot.piece_size :][: slot.piece_size]
    run = theirs.view(-1)[piece.start :][: slot.stored_size(piece)]
    if piece.columns is None:
        run.copy_(source)
    else:
        chosen = _chosen(run, piece)
        chosen.copy_(source.view(chosen.shape))


def _chosen(run: Tensor, piece: Piece) -> Tensor:
    """A view of the columns of a stored matrix that form a piece of ours, in our shape."""
    assert piece.columns is not None
    chosen = run.view(piece.columns.shape)[:, piece.columns.chosen]
    return chosen.mT if piece.columns.transposed else chosen
