"""Every tensor accounted for: what our model needs, and what the files hold, must be the same tensors.

Names say which tensor is which, and how its dims are ordered. Shapes confirm it, but a square matrix has the shape of
its transpose: that the logits are those of `transformers` is the proof (`verify.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from spurline.config_io import ConfigError
from spurline.hf.folder import at_most
from spurline.hf.safetensors_file import FLOATS, Stored, read_whole
from spurline.models.common.hf import Architecture, Slot

Shape = tuple[int, ...]
_OUTPUT, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def model_shapes(model: Any) -> dict[str, Shape]:
    """Name and shape of each parameter and persistent buffer of the model with this config; nothing is allocated."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in model.build().state_dict().items()}


def target_dtype(name: str, own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype that one of our tensors is converted to; None keeps its own."""
    # The selection bias decides by tiny differences, and nobody rounds it.
    return own if wanted is None or name.endswith("expert_bias_E") else wanted


def account(
    architecture: Architecture, model: Any, their_config: Mapping[str, Any], stored: Mapping[str, Stored], where: str
) -> tuple[list[Slot], list[str]]:
    """How our tensors are made of the stored ones, and a line for each kind of tensor that is left out.

    A ConfigError lists what is missing, left over, or of a wrong shape or type.
    """
    shapes = model_shapes(model)
    slots = architecture.slots(shapes, stored)
    expected = {piece.name: piece.shape for slot in slots for piece in slot.pieces}
    problems = [f"tensor {name} is missing" for name in expected if name not in stored]
    for name in expected.keys() & stored.keys():
        problems += _misfits(name, stored[name], expected[name])
    problems += [problem for slot in slots for problem in _mixed_types(slot, stored)]

    for copy, original in architecture.copies(shapes).items():
        problems += _unless_copy(stored, copy, original, "a model has only one of them")

    left_out: dict[str, list[str]] = {}
    harmless = architecture.harmless(their_config, stored)
    for name in stored.keys() - expected.keys():
        meanings = [meaning for pattern, meaning in harmless.items() if re.fullmatch(pattern, name)]
        if meanings:
            left_out.setdefault(meanings[0], []).append(name)
        elif name == _OUTPUT and model.tied_embeddings:
            problems += _unless_copy(stored, _OUTPUT, _EMBEDDING, "config.json says that they are tied")
            left_out.setdefault("the embedding once more, which is the output head too", []).append(name)
        else:
            problems.append(f"tensor {name} {stored[name].shape} has no place in the model that config.json describes")
    if problems:
        raise ConfigError(at_most([f"{where}: {problem}" for problem in sorted(problems)]))
    return slots, [f"left out: {_few(names)} ({meaning})" for meaning, names in left_out.items()]


def _misfits(name: str, stored: Stored, shape: Shape) -> Iterable[str]:
    if stored.shape != shape:
        transposed = stored.shape == shape[::-1]
        yield f"tensor {name} is {stored.shape}, not {shape}{': it is transposed' if transposed else ''}"
    if stored.dtype not in FLOATS:
        yield f"tensor {name} is of type {stored.dtype}, and weights must be one of {', '.join(FLOATS)}"


def _mixed_types(slot: Slot, stored: Mapping[str, Stored]) -> Iterable[str]:
    """Our tensor has one type, so those that it stacks must have it too."""
    types = {stored[piece.name].dtype: piece.name for piece in slot.pieces if piece.name in stored}
    if len(types) > 1:
        yield " and ".join(f"tensor {name} is {dtype}" for dtype, name in types.items()) + ": they must be of one type"


def _unless_copy(stored: Mapping[str, Stored], copy: str, original: str, why: str) -> Iterable[str]:
    if all(name in stored and stored[name].dtype in FLOATS for name in (copy, original)):
        copied, first = read_whole(stored[copy]), read_whole(stored[original])
        if copied.dtype != first.dtype or not torch.equal(copied, first):
            yield f"tensor {copy} differs from {original}, and {why}"


def _few(names: list[str]) -> str:
    first = sorted(names)[0]
    return first if len(names) == 1 else f"{len(names)} tensors like {first}"
