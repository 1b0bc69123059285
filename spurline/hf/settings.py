"""The model and training settings for a Hugging Face folder, from its config.json alone. No torch import."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from spurline import untrusted
from spurline.config import RunConfig
from spurline.hf.families import find_architecture, read_model_config, run_config_like_a_preset
from spurline.models.common.hf import Architecture
from spurline.moe.config import SAME_WEIGHTS

CONFIG = "config.json"
# Options that change how a model is trained or computed, but not what it computes.
_FREE = {
    *("num_mtp_layers", "mtp_loss_weight"),
    *("moe.dim", "moe.bias_update_rate", "moe.aux_loss", "moe.aux_loss_weight", "moe.z_loss_weight"),
    "moe.force_load_balance",
    *(f"moe.{name}" for name in SAME_WEIGHTS),
}


class FolderModel(NamedTuple):
    """What the config.json of a Hugging Face folder describes."""

    their_config: dict[str, Any]
    architecture: Architecture
    model: Any
    """Our model config."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises a one-line ValueError if it can't be read."""
    try:
        content = untrusted.read_json(path)
    except OSError as error:
        raise ValueError(f"{path}: can't read the file: {untrusted.reason(error)}") from None
    except ValueError as error:
        raise ValueError(f"{path} is {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


def read_folder_model(folder: Path) -> FolderModel:
    """The model of a folder; raises a ConfigError with everything in its config.json that is not supported."""
    where = f"{folder / CONFIG}"
    their_config = read_json(folder / CONFIG)
    architecture = find_architecture(their_config, where)
    return FolderModel(their_config, architecture, read_model_config(architecture, their_config, where))


def run_config_for(folder: Path, out: str) -> tuple[str, str, RunConfig[Any]]:
    """(family, preset, config) to train the model of a folder in the run folder `out`, with the folder's tokenizer."""
    their_config, architecture, model = read_folder_model(folder)
    max_length = their_config.get("max_position_embeddings")
    family, preset, run = run_config_like_a_preset(architecture, model, out, max_length)
    if (folder / "tokenizer.json").is_file():
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, tokenizer=f"{folder}"))
    return family, preset, run


def mismatch(theirs: Any, ours: Any) -> str:
    """Why the weights of a folder are not those of our model; empty if they are."""
    if type(theirs) is not type(ours):
        differences = [f"the model is a {type(ours).__name__} (the folder: {type(theirs).__name__})"]
    else:
        differences = _differences(theirs, ours, "")
    if not differences:
        return ""
    return (
        f"is of another model: {'; '.join(differences)}."
        " Omit --module, --config and these options to take the model from the folder"
    )


def _differences(theirs: Any, ours: Any, prefix: str) -> list[str]:
    """Options that make our model compute something other than the folder's: `model.dim 32 (the folder: 64)`."""
    found = []
    for field in dataclasses.fields(ours):
        name, own, other = prefix + field.name, getattr(ours, field.name), getattr(theirs, field.name)
        if dataclasses.is_dataclass(own):
            found += _differences(other, own, f"{name}.")
        elif own != other and name not in _FREE:
            found.append(f"model.{name} {own} (the folder: {other})")
    return found
