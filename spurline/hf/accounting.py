"""Check that the tensors in the files are exactly those that the model needs.

Tensors are matched by name, and their shapes are checked. A transposed square matrix would pass this check; comparing
logits with `transformers` (`verify.py`) detects it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import torch

from spurline.config_io import ConfigError
from spurline.hf.folder import at_most
from spurline.hf.quantized import AnyStored
from spurline.hf.safetensors_file import FLOATS
from spurline.models.common.decoder_config import portable
from spurline.models.common.hf import Architecture, Slot

Shape = tuple[int, ...]
_OUTPUT, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_COMPARED_ELEMENTS = 2**21


def model_shapes(model: Any) -> dict[str, Shape]:
    """Shape of each parameter and persistent buffer by name, from a model on the meta device."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in portable(model).build().state_dict().items()}


def target_dtype(name: str, own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype that a tensor of ours is converted to; `wanted=None` keeps its own."""
    # Small differences in the selection bias change which experts are selected, so it is never rounded.
    return own if wanted is None or name.endswith("expert_bias_E") else wanted


def account(
    architecture: Architecture,
    model: Any,
    their_config: Mapping[str, Any],
    stored: Mapping[str, AnyStored],
    where: str,
    compare_copies: bool = True,
) -> tuple[list[Slot], list[str]]:
    """How our tensors map to the stored ones, and a message for each kind of stored tensor that is not needed.

    Raises a ConfigError with all tensors that are missing, unexpected, or have the wrong shape or dtype, and with
    duplicates that differ, unless compare_copies is False (because another rank compares them).
    """
    shapes = model_shapes(model)
    slots = architecture.slots(shapes, stored)
    expected = {piece.name: piece.shape for slot in slots for piece in slot.pieces}
    problems = [f"tensor {name} is missing" for name in expected if name not in stored]
    for name in expected.keys() & stored.keys():
        problems += _mismatches(name, stored[name], expected[name])
    problems += [problem for slot in slots for problem in _mixed_types(slot, stored)]

    for copy, original in architecture.copies(shapes).items() if compare_copies else ():
        problems += _unless_equal(stored, copy, original, "the model has only one of them")

    left_out: dict[str, list[str]] = {}
    harmless = architecture.harmless(their_config, stored)
    for name in stored.keys() - expected.keys():
        meanings = [meaning for pattern, meaning in harmless.items() if re.fullmatch(pattern, name)]
        if meanings:
            left_out.setdefault(meanings[0], []).append(name)
        elif name == _OUTPUT and model.tied_embeddings:
            if compare_copies:
                problems += _unless_equal(stored, _OUTPUT, _EMBEDDING, "config.json says that they are tied")
            left_out.setdefault("tied to the embedding", []).append(name)
        else:
            problems.append(f"tensor {name} {stored[name].shape} is unexpected in the model of config.json")
    if problems:
        raise ConfigError(at_most([f"{where}: {problem}" for problem in sorted(problems)]))
    return slots, [f"left out: {_summary(names)} ({meaning})" for meaning, names in left_out.items()]


def _mismatches(name: str, stored: AnyStored, shape: Shape) -> Iterable[str]:
    if stored.shape != shape:
        transposed = stored.shape == shape[::-1]
        yield f"tensor {name} has shape {stored.shape}, not {shape}{': it is transposed' if transposed else ''}"
    if stored.dtype not in FLOATS:
        yield f"tensor {name} has dtype {stored.dtype}, but weights must be one of {', '.join(FLOATS)}"


def _mixed_types(slot: Slot, stored: Mapping[str, AnyStored]) -> Iterable[str]:
    """An error if the tensors that are stacked into one of ours have different dtypes."""
    types = {stored[piece.name].dtype: piece.name for piece in slot.pieces if piece.name in stored}
    if len(types) > 1:
        yield " and ".join(f"tensor {name} is {dtype}" for dtype, name in types.items()) + ": dtypes must be equal"


def _unless_equal(stored: Mapping[str, AnyStored], copy: str, original: str, why: str) -> Iterable[str]:
    if all(name in stored and stored[name].dtype in FLOATS for name in (copy, original)):
        first, second = stored[copy], stored[original]
        if (first.shape, first.dtype) != (second.shape, second.dtype) or not _are_equal(first, second):
            yield f"tensor {copy} differs from {original}, but {why}"


def _are_equal(first: AnyStored, second: AnyStored) -> bool:
    """Compare two stored tensors of the same shape, some rows at a time."""
    num_columns = first.shape[-1]
    height = max(1, _COMPARED_ELEMENTS // max(1, num_columns))
    num_rows = prod(first.shape) // max(1, num_columns)
    for row in range(0, num_rows, height):
        rows = range(row, min(row + height, num_rows))
        boxes = (stored.read_box(0, num_columns, rows, range(num_columns)) for stored in (first, second))
        if not torch.equal(*boxes):
            return False
    return True


def _summary(names: list[str]) -> str:
    first = sorted(names)[0]
    return first if len(names) == 1 else f"{len(names)} tensors like {first}"
