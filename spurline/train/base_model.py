"""The base model of a run with adapters: its weights are in another folder, and identified by a fingerprint."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from spurline import config_io
from spurline.config import RunConfig
from spurline.config_io import ConfigError
from spurline.hf.settings import CONFIG, mismatch, read_folder_model, read_json
from spurline.run_folders import find_run
from spurline.train.checkpoint.folder import CheckpointFolder
from spurline.train.initial_load import find_source
from spurline.untrusted import printable

if TYPE_CHECKING:
    import torch
    from torch import nn

OPTION = "lora.base"

# Free of torch until weights are loaded: the command line checks its options here.


class Base(NamedTuple):
    """The folder of the base weights."""

    folder: Path
    step: int | None
    """The step of a run's checkpoint; None for a Hugging Face folder."""

    @property
    def is_hugging_face(self) -> bool:
        return self.step is None


def base_problems(config: RunConfig[Any]) -> list[str]:
    """Why the base model of this run can't be loaded, as far as can be told without reading weights."""
    lora = config.lora
    if not lora.rank or not lora.base:
        return []
    about, folder, own = f"{OPTION} {lora.base}", find_run(lora.base), config.job.dump_folder
    if own and os.path.realpath(folder) == os.path.realpath(own):
        return [f"{about}: adapters need a run folder of their own: choose another --job.dump_folder"]
    try:
        if _has_adapters(folder):
            return [f"{about}: that run has adapters itself; fold them in with `spurline convert merge`"]
        base = find_base(config)
        why = mismatch(read_folder_model(base.folder).model, config.model) if base.is_hugging_face else ""
    except ConfigError as error:
        return [f"{about}: {error.problems[0]}"]
    except ValueError as error:
        return [str(error)]
    return [f"{about} {why}"] if why else []


def _has_adapters(folder: Path) -> bool:
    of_run = folder / CONFIG
    return of_run.is_file() and "module" in read_json(of_run) and config_io.load(of_run)[2].lora.rank > 0


def find_base(config: RunConfig[Any]) -> Base:
    """Where the base weights are; a one-line ValueError if they are not there."""
    lora = config.lora
    source = find_source(lora.base, OPTION)
    if lora.base_step < 0:
        return Base(source.run_folder or source.path, source.step)
    if source.run_folder is None or source.run_folder != source.path:
        raise ValueError(f"lora.base_step {lora.base_step} is for a run, and {OPTION} {lora.base} is not a run folder")
    CheckpointFolder(source.run_folder).complete(lora.base_step)
    return Base(source.run_folder, lora.base_step)


def load_base(model: nn.Module, config: RunConfig[Any]) -> dict[str, Any]:
    """Load the base weights; returns the entry that identifies them in checkpoints. All ranks together."""
    from spurline.train.checkpoint.fingerprint import fingerprint
    from spurline.train.checkpoint.manager import CheckpointManager
    from spurline.train.checkpoint.state import base_tensors
    from spurline.train.initial_weights import load_folder

    base = find_base(config)
    if base.step is None:
        load_folder(model, config.model, base.folder, OPTION)
    else:
        checkpoints = CheckpointManager(base.folder, interval=1, keep_latest_k=0, model_config=asdict(config.model))
        checkpoints.load(base.step, model, None, base_tensors)
    return described(config, base, fingerprint(base_tensors(model)))


def described(config: RunConfig[Any], base: Base, fingerprint: str) -> dict[str, Any]:
    """The entry of a checkpoint that identifies the base weights."""
    return {"base": {"folder": config.lora.base, "step": base.step, "fingerprint": fingerprint}}


def check_base(saved: dict[str, Any], loaded: dict[str, Any], where: str) -> None:
    """Raise a ValueError if a checkpoint's adapters, according to its `extra`, were trained on other weights."""
    then, now = saved.get("base"), loaded["base"]
    if not isinstance(then, dict) or then.get("fingerprint") != now["fingerprint"]:
        was = _place(then) if isinstance(then, dict) else "an unknown base model"
        raise ValueError(
            f"{where}: the adapters were trained on other weights, {was}, than those of {_place(now)}: choose the"
            " same by --lora.base and --lora.base_step"
        )


def _place(base: dict[str, Any]) -> str:
    step = "" if base.get("step") is None else f"step {base['step']} of "
    return printable(f"{step}{base.get('folder')}", 300)


def load_with_base(run: Path, config: RunConfig[Any], step: int, device: torch.device, sign_key: bytes | None) -> Any:
    """The model of a run with adapters, on one device, with the adapters folded into its weights."""
    from spurline.lora.attach import attach_adapters, fold_adapters
    from spurline.models.common.init import build_to_load
    from spurline.train.checkpoint.manager import CheckpointManager

    if problems := base_problems(config):
        raise ConfigError(problems)
    lora = config.lora
    model = build_to_load(
        config.model, device, lambda model: attach_adapters(model, lora.rank, lora.alpha, lora.targets)
    )
    base = load_base(model, config)
    extra = CheckpointManager(run, interval=1, keep_latest_k=0, sign_key=sign_key).load(step, model, None)
    check_base(extra, base, f"{run}")
    fold_adapters(model)
    return model
