"""Whether a checkpoint fits a model: tensors and config options that differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import Any

from torch import Tensor

from spurline.train.checkpoint.layout import TensorLayout
from spurline.typed_json import shown
from spurline.untrusted import printable


def tensor_differences(
    saved: Mapping[str, TensorLayout], tensors: dict[str, Tensor], elsewhere: Set[str] = frozenset()
) -> list[str]:
    """One phrase for each tensor that differs between the checkpoint and the model, sorted by name.

    `elsewhere` holds the names of tensors that only other ranks have, in other pipeline stages.
    """
    found = []
    for name in sorted(tensors.keys() | {name for name in saved if name.startswith("model.")} - elsewhere):
        bare_name = name.removeprefix("model.")
        if name not in saved:
            found.append(f"{bare_name} is not in the checkpoint")
        elif name not in tensors:
            found.append(f"{bare_name} is not in the model")
        elif saved[name].shape != tuple(tensors[name].shape):
            found.append(
                f"{bare_name} is {saved[name].shape} in the checkpoint, {tuple(tensors[name].shape)} in the model"
            )
    return found


def config_differences(old: Any, new: Any, name: str = "model") -> list[str]:
    """The options of two configs that differ, by dotted name: `model.dim 16 -> 24`."""
    if isinstance(old, dict) and isinstance(new, dict):
        missing = "(none)"
        return [
            difference
            for field in dict.fromkeys((*old, *new))
            for difference in config_differences(old.get(field, missing), new.get(field, missing), f"{name}.{field}")
        ]
    # The stored config may be a stranger's.
    return [] if json.dumps(old) == json.dumps(new) else [f"{printable(name, 100)} {shown(old)} -> {shown(new)}"]
