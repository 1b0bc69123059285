"""Load a run's initial weights from a Hugging Face folder or a checkpoint, without optimizer state and step."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spurline.config_io import ConfigError
from spurline.hf.loading import FolderWeights
from spurline.train.checkpoint.finite import non_finite_names
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.checkpoint.ranks import Ranks
from spurline.train.checkpoint.signature import read_key
from spurline.train.checkpoint.state import base_tensors
from spurline.train.initial_load import OPTION, WeightSource, find_source

if TYPE_CHECKING:
    from torch import nn

    from spurline.train.trainer import Trainer

_FROM_SCRATCH = 1e-4
"""Learning rates from here on are meant for models that start from random weights."""


def load_initial_weights(trainer: Trainer) -> list[str]:
    """Fill the model from checkpoint.initial_load_path; returns lines about it. An error on one rank is raised on all.

    Each rank reads only its own shards; parameters need not be initialized before.
    """
    config, ranks = trainer.config, Ranks()
    (source, *_) = ranks.gather(lambda: find_source(config.checkpoint.initial_load_path))
    if source.kind == "hugging_face":
        weights = load_folder(trainer.model, config.model, source.path, OPTION)
        about = f"{weights.architecture.name}, {weights.num_tensors} tensors"
        lines = [f"weights of {source.path} ({about}); a fresh optimizer, step 0", *weights.left_out]
    else:
        lines = _load_checkpoint(trainer, source)
    if config.optimizer.lr >= _FROM_SCRATCH:
        lines.append(
            f"optimizer.lr {config.optimizer.lr:g} suits random weights; for trained ones, --preset finetune has"
            " a rate, a schedule and a router to begin with"
        )
    return lines


def load_folder(model: nn.Module, model_config: Any, folder: Path, option: str) -> FolderWeights:
    """Fill the model, except adapters, from the Hugging Face folder that `option` names. All ranks together."""
    ranks, opened = Ranks(), []

    def open_folder() -> None:
        try:
            opened.append(FolderWeights(folder, model_config, compare_copies=ranks.rank == 0))
        except ConfigError as error:  # which may have many lines
            more = f"; and {len(error.problems) - 3} more" if len(error.problems) > 3 else ""
            raise ValueError(f"{option}: {'; '.join(error.problems[:3])}{more}") from None

    def load() -> list[str]:
        opened[0].load(model)
        return non_finite_names(base_tensors(model).items())

    ranks.gather(open_folder)
    if broken := sorted({name for of_rank in ranks.gather(load) for name in of_rank}):
        raise ValueError(f"{option} {folder}: {broken[0]} is not finite")
    return opened[0]


def _load_checkpoint(trainer: Trainer, source: WeightSource) -> list[str]:
    config = trainer.config
    assert source.run_folder is not None
    assert source.step is not None
    checkpoints = CheckpointManager(
        source.run_folder,
        interval=1,
        keep_latest_k=0,
        model_config=asdict(config.model),
        sign_key=read_key(config.checkpoint.sign_key_file),
    )
    try:
        checkpoints.load(source.step, trainer.model, optimizer=None)
    except ValueError as error:
        raise ValueError(f"{OPTION}: {error}") from None
    return [f"weights of {source.run_folder}, step {source.step}; a fresh optimizer, step 0"]
