"""The base model of a run with adapters: its weights are in another run folder, and identified by a fingerprint."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spurline import config_io
from spurline.config import RunConfig
from spurline.config_io import ConfigError
from spurline.run_folders import find_run
from spurline.train.checkpoint.folder import CheckpointFolder

if TYPE_CHECKING:
    import torch
    from torch import nn

# Free of torch until weights are loaded: the command line checks its options here.


def base_problems(config: RunConfig[Any]) -> list[str]:
    """Why the base model of this run can't be loaded, as far as can be told without reading weights."""
    lora = config.lora
    if not lora.rank or not lora.base:
        return []
    about, folder = f"lora.base {lora.base}:", find_run(lora.base)
    if not (folder / "config.json").is_file():
        return [f"{about} not a run folder; import a Hugging Face model with `spurline convert from-hf`"]
    own = config.job.dump_folder
    if own and os.path.realpath(folder) == os.path.realpath(own):
        return [f"{about} adapters need a run folder of their own: choose another --job.dump_folder"]
    try:
        _, _, of_base = config_io.load(folder / "config.json")
        if of_base.lora.rank:
            return [f"{about} that run has adapters itself; fold them in with `spurline convert merge`"]
        base_step(config)
    except ConfigError as error:
        return [f"{about} {error.problems[0]}"]
    except ValueError as error:
        return [f"{about} {error}"]
    return []


def base_step(config: RunConfig[Any]) -> int:
    """The step of the base model's checkpoint; a ValueError if there is none."""
    files = CheckpointFolder(find_run(config.lora.base))
    if config.lora.base_step >= 0:
        files.complete(config.lora.base_step)
        return config.lora.base_step
    step = max(files.steps(), default=None)
    if step is None:
        raise ValueError(f"{files.path} has no complete checkpoint")
    return step


def load_base(model: nn.Module, config: RunConfig[Any]) -> dict[str, Any]:
    """Load the base weights; returns the entry that identifies them in checkpoints. All ranks together."""
    from spurline.train.checkpoint.fingerprint import fingerprint
    from spurline.train.checkpoint.manager import CheckpointManager
    from spurline.train.checkpoint.state import base_tensors

    step = base_step(config)
    base = find_run(config.lora.base)
    checkpoints = CheckpointManager(base, interval=1, keep_latest_k=0, model_config=asdict(config.model))
    checkpoints.load(step, model, None, base_tensors)
    return {"base": {"folder": config.lora.base, "step": step, "fingerprint": fingerprint(base_tensors(model))}}


def check_base(saved: dict[str, Any], loaded: dict[str, Any], where: str) -> None:
    """Raise a ValueError if a checkpoint's adapters, according to its `extra`, were trained on other weights."""
    then, now = saved.get("base"), loaded["base"]
    if not isinstance(then, dict) or then.get("fingerprint") != now["fingerprint"]:
        was = f"step {then.get('step')} of {then.get('folder')}" if isinstance(then, dict) else "an unknown base model"
        raise ValueError(
            f"{where}: the adapters were trained on other weights, {was}, than those of step {now['step']} of"
            f" {now['folder']}: choose the same by --lora.base and --lora.base_step"
        )


def load_with_base(run: Path, config: RunConfig[Any], step: int, device: torch.device, sign_key: bytes | None) -> Any:
    """The model of a run with adapters, on one device, with the adapters folded into its weights."""
    import torch

    from spurline.lora.attach import attach_adapters, fold_adapters
    from spurline.models.common.init import initialize_buffers
    from spurline.train.checkpoint.manager import CheckpointManager

    if problems := base_problems(config):
        raise ConfigError(problems)
    with torch.device("meta"):
        model = config.model.build()
    attach_adapters(model, config.lora.rank, config.lora.alpha, config.lora.targets)
    model.to_empty(device=device)
    initialize_buffers(model)
    base = load_base(model, config)
    extra = CheckpointManager(run, interval=1, keep_latest_k=0, sign_key=sign_key).load(step, model, None)
    check_base(extra, base, f"{run}")
    fold_adapters(model)
    return model
