"""Merge the adapters of a run into the weights of its base model, as a new run folder, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spurline import config_io
from spurline.config import Job, Lora, RunConfig
from spurline.config_io import ConfigError
from spurline.hf.accounting import target_dtype
from spurline.hf.folder import TOKENIZER_FOLDER, import_tokenizer, new_folder
from spurline.hf.loading import FolderWeights
from spurline.lora.adapters import A, B, LowRank
from spurline.train.base_model import Base, base_problems, check_base, described, find_base
from spurline.train.checkpoint.fingerprint import fingerprint_by_name
from spurline.train.checkpoint.folder import WHY_NONE
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.checkpoint.reader import StoredCheckpoint


@dataclass(frozen=True)
class BaseWeights:
    """The tensors of a base model by name, of a run or of a Hugging Face folder."""

    at: Base
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]]
    """Shape and dtype of each."""
    read: Callable[[str], Tensor]

    def fingerprint(self) -> str:
        shapes = {f"model.{name}": shape for name, (shape, _) in self.layout.items()}
        return fingerprint_by_name(shapes, lambda name: self.read(name.removeprefix("model.")))

    @property
    def tokenizer(self) -> Path:
        """The folder with the tokenizer of an imported model, which need not exist."""
        return self.at.folder if self.at.is_hugging_face else self.at.folder / TOKENIZER_FOLDER


def open_base(config: RunConfig[Any]) -> BaseWeights:
    base = find_base(config)
    if base.step is None:
        weights = FolderWeights(base.folder, config.model)
        return BaseWeights(base, weights.layout(), weights.read)
    stored = CheckpointManager(base.folder, interval=1, keep_latest_k=0).open(base.step)
    entries = {name: entry for name, entry in stored.layout.tensors.items() if name.startswith("model.")}
    layout = {name.removeprefix("model."): (entry.shape, entry.dtype) for name, entry in entries.items()}
    return BaseWeights(base, layout, lambda name: stored.read_tensor(f"model.{name}"))


@dataclass(frozen=True)
class AdaptedRun:
    """A run with adapters: its config, its checkpoint and the weights of its base model."""

    family: str
    preset: str
    config: RunConfig[Any]
    step: int
    adapters: StoredCheckpoint
    base: BaseWeights

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
        """A tensor of the base model; if it has an adapter, merged with it in float32."""
        tensor = self.base.read(name)
        if f"model.{name}{A}" not in self.adapters.layout.tensors:
            return tensor
        return LowRank(tensor.float(), *self.adapter(name), self.scale).sum()


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
        raise ValueError(f"{checkpoints.folder} has no complete checkpoint: {WHY_NONE}")
    adapters, base = checkpoints.open(step), open_base(config)
    check_base(adapters.extra, described(config, base.at, base.fingerprint()), f"{run}, step {step}")
    return AdaptedRun(family, preset, config, step, adapters, base)


def merge_run(
    run: Path, out: Path, step: int | None = None, dtype: torch.dtype | None = None, sign_key: bytes | None = None
) -> list[str]:
    """Write the run folder `out` with the merged weights as its checkpoint of step 0; returns messages for the user."""
    adapted = open_adapted_run(run, step, sign_key)
    tensors = {
        name: torch.empty(shape, dtype=target_dtype(name, own, dtype), device="meta")
        for name, (shape, own) in adapted.base.layout.items()
    }
    config = replace(adapted.config, lora=Lora(), job=Job(dump_folder=f"{out}"))
    config = replace(config, checkpoint=replace(config.checkpoint, enable=True, initial_load_path=f"{out}"))
    tokenizer = adapted.base.tokenizer
    with new_folder(out) as folder:
        if tokenizer.is_dir():
            import_tokenizer(tokenizer, folder)
            if Path(config.data.tokenizer).resolve() == tokenizer.resolve():
                config = replace(config, data=replace(config.data, tokenizer=f"{out / TOKENIZER_FOLDER}"))
        config_io.save(folder / "config.json", adapted.family, adapted.preset, config)
        CheckpointManager(folder, interval=1, keep_latest_k=0).write_tensors(
            0, tensors, lambda name: adapted.weight(name).to(tensors[name].dtype), {"tokens_seen": 0}
        )
    num_adapted = len(adapted.adapted_names())
    return [
        f"step {adapted.step}: {num_adapted} of {len(tensors)} tensors had adapters",
        f"run folder: {out}, its weights are the checkpoint of step 0",
    ]
