"""Merge the adapters of a run into the weights of its base model, as a new run folder, one tensor at a time."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spurline import config_io
from spurline.config import Job, Lora, RunConfig
from spurline.config_io import ConfigError
from spurline.hf.accounting import target_dtype
from spurline.hf.folder import TOKENIZER_FOLDER, new_folder
from spurline.lora.adapters import A, B, LowRank
from spurline.run_folders import find_run
from spurline.train.base_model import base_problems, base_step, check_base
from spurline.train.checkpoint.fingerprint import fingerprint_by_name
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.checkpoint.reader import StoredCheckpoint


@dataclass(frozen=True)
class AdaptedRun:
    """A run with adapters: its config, its checkpoint and its base model's checkpoint."""

    family: str
    preset: str
    config: RunConfig[Any]
    step: int
    adapters: StoredCheckpoint
    base: StoredCheckpoint

    @property
    def scale(self) -> float:
        return self.config.lora.alpha / self.config.lora.rank

    def adapted_names(self) -> list[str]:
        """Parameter names of the weights that have adapters."""
        names = [name.removeprefix("model.") for name in self.adapters.layout.tensors if name.startswith("model.")]
        return [name.removesuffix(A) for name in names if name.endswith(A)]

    def adapter(self, name: str) -> tuple[Tensor, Tensor]:
        """A and B of a weight, in float32."""
        a, b = (self.adapters.read_tensor(f"model.{name}{part}").float() for part in (A, B))
        return a, b

    def weight(self, name: str) -> Tensor:
        """A tensor of the base model, merged with its adapter if it has one, in the base model's dtype."""
        tensor = self.base.read_tensor(f"model.{name}")
        if f"model.{name}{A}" not in self.adapters.layout.tensors:
            return tensor
        return LowRank(tensor.float(), *self.adapter(name), self.scale).sum().to(tensor.dtype)


def open_adapted_run(run: Path, step: int | None = None, sign_key: bytes | None = None) -> AdaptedRun:
    """Open a run; raises a ValueError if it has no adapters, or if its base model is missing or its weights changed."""
    family, preset, config = config_io.load(run / "config.json")
    if not config.lora.rank:
        raise ValueError(f"{run} has no adapters (lora.rank is 0): its checkpoints have all weights")
    if problems := base_problems(config):
        raise ConfigError(problems)
    checkpoints = CheckpointManager(run, interval=1, keep_latest_k=0, sign_key=sign_key)
    step = checkpoints.latest() if step is None else step
    if step is None:
        raise ValueError(f"{checkpoints.folder} has no complete checkpoint: train with --checkpoint.enable")
    adapters, of_base = checkpoints.open(step), base_step(config)
    base = CheckpointManager(find_run(config.lora.base), interval=1, keep_latest_k=0).open(of_base)
    shapes = {name: entry.shape for name, entry in base.layout.tensors.items() if name.startswith("model.")}
    of_weights = fingerprint_by_name(shapes, base.read_tensor)
    now = {"base": {"folder": config.lora.base, "step": of_base, "fingerprint": of_weights}}
    check_base(adapters.extra, now, f"{run}, step {step}")
    return AdaptedRun(family, preset, config, step, adapters, base)


def merge_run(
    run: Path, out: Path, step: int | None = None, dtype: torch.dtype | None = None, sign_key: bytes | None = None
) -> list[str]:
    """Write the run folder `out` with the merged weights as its checkpoint of step 0; returns messages for the user."""
    adapted = open_adapted_run(run, step, sign_key)
    names = [name.removeprefix("model.") for name in adapted.base.layout.tensors if name.startswith("model.")]
    stored = adapted.base.layout.tensors
    tensors = {
        name: torch.empty(
            stored[f"model.{name}"].shape,
            dtype=target_dtype(name, stored[f"model.{name}"].dtype, dtype),
            device="meta",
        )
        for name in names
    }
    config = replace(adapted.config, lora=Lora(), job=Job(dump_folder=f"{out}"))
    config = replace(config, checkpoint=replace(config.checkpoint, enable=True, initial_load_path=f"{out}"))
    tokenizer = find_run(adapted.config.lora.base) / TOKENIZER_FOLDER
    with new_folder(out) as folder:
        if tokenizer.is_dir():
            shutil.copytree(tokenizer, folder / TOKENIZER_FOLDER)
            if Path(config.data.tokenizer).resolve() == tokenizer.resolve():
                config = replace(config, data=replace(config.data, tokenizer=f"{out / TOKENIZER_FOLDER}"))
        config_io.save(folder / "config.json", adapted.family, adapted.preset, config)
        CheckpointManager(folder, interval=1, keep_latest_k=0).write_tensors(
            0, tensors, lambda name: adapted.weight(name).to(tensors[name].dtype), {"tokens_seen": 0}
        )
    num_adapted = len(adapted.adapted_names())
    return [
        f"step {adapted.step}: {num_adapted} of {len(names)} tensors had adapters",
        f"run folder: {out}, its weights are the checkpoint of step 0",
    ]
