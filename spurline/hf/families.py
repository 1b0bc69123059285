"""Map Hugging Face architectures to our model families, and choose a preset for an imported model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

from spurline.config import Data, Job, RunConfig
from spurline.config_io import ConfigError
from spurline.models import family_configs, family_names, family_package
from spurline.models.common.hf import Architecture
from spurline.models.common.hf_values import TheirConfig
from spurline.moe.config import MoEConfig

_EXPERT_BIAS = "layers.{layer}.moe.router.expert_bias_E"


def find_architecture(their_config: dict[str, Any], where: str) -> Architecture:
    """The architecture named in a config.json; raises a ValueError if no family supports it."""
    names = their_config.get("architectures") or []
    known = {architecture.name: architecture for _, architecture in _architectures()}
    for name in names:
        if name in known:
            return known[name]
    what = ", ".join(map(str, names)) or "(none)"
    raise ValueError(f"{where}: architecture {what} is not supported; supported are {', '.join(sorted(known))}")


def _architectures() -> Iterator[tuple[str, Architecture]]:
    for family in family_names():
        if module := _hf_module(family):
            yield from ((family, architecture) for architecture in module.ARCHITECTURES)


def _hf_module(family: str) -> Any:
    name = f"{family_package(family)}.hf"
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None  # not every family has a Hugging Face equivalent


def read_model_config(architecture: Architecture, their_config: dict[str, Any], where: str) -> Any:
    """Our model config for a config.json; raises a ConfigError with every key that is not supported."""
    theirs = TheirConfig(their_config)
    model = architecture.read(theirs)
    theirs.refuse_unknown()
    problems = theirs.problems or model.problems()
    if problems:
        raise ConfigError([f"{where}: {problem}" for problem in problems])
    return model


def architecture_for(family: str, model: Any) -> Architecture:
    """The architecture to export a model as; raises a ConfigError with everything it can't represent."""
    module = _hf_module(family)
    if module is None:
        raise ValueError(f"the family {family} can't be exported: it has no hf.py with its Hugging Face architectures")
    architecture: Architecture = module.architecture_for(model)
    if obstacles := architecture.obstacles(model):
        raise ConfigError(obstacles)
    return architecture


def _balanced_like(preset: MoEConfig, moe: MoEConfig, architecture: Architecture) -> MoEConfig:
    """`moe` with the load balancing of the preset; by a loss if the architecture has no selection bias."""
    has_bias = architecture.names.get(_EXPERT_BIAS) is not None
    by_bias_alone = preset.bias_update_rate > 0 and preset.aux_loss == "none"
    return replace(
        moe,
        bias_update_rate=preset.bias_update_rate if has_bias else 0.0,
        aux_loss="sequence" if by_bias_alone and not has_bias else preset.aux_loss,
        aux_loss_weight=preset.aux_loss_weight,
        z_loss_weight=preset.z_loss_weight,
    )


def run_config_like_a_preset(
    architecture: Architecture, model: Any, folder: str, max_length: int | None
) -> tuple[str, str, RunConfig[Any]]:
    """(family, preset, config) to train `model` with the settings of the preset closest in size.

    Presets with a tokenizer of their own are left out, since it is not the model's.
    """
    candidates = [
        (family, name, preset())
        for family, known in _architectures()
        if known.name == architecture.name
        for name, preset in family_configs(family).items()
    ]
    distance = {
        (family, name): abs(math.log(run.model.num_params() / model.num_params()))
        for family, name, run in candidates
        if type(run.model) is type(model) and run.data.tokenizer == Data.tokenizer
    }
    family, name = min(distance, key=distance.__getitem__)
    run = family_configs(family)[name]()
    if hasattr(model, "moe"):
        model = replace(model, moe=_balanced_like(run.model.moe, model.moe, architecture))
    seq_len = min(run.training.seq_len, max_length or run.training.seq_len)
    return (
        family,
        name,
        replace(
            run,
            model=model,
            job=Job(dump_folder=folder),
            training=replace(run.training, seq_len=seq_len),
            checkpoint=replace(run.checkpoint, enable=True),
        ),
    )
