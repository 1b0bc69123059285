"""Load a run's initial weights from a Hugging Face folder or a checkpoint, without optimizer state and step."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from spurline.config_io import ConfigError
from spurline.hf.loading import FolderWeights
from spurline.train.checkpoint.finite import non_finite_names
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.checkpoint.ranks import Ranks
from spurline.train.checkpoint.signature import read_key
from spurline.train.checkpoint.state import model_tensors
from spurline.train.initial_load import OPTION, WeightSource, find_source

if TYPE_CHECKING:
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
        lines = _load_folder(trainer, source, ranks)
    else:
        lines = _load_checkpoint(trainer, source)
    if config.optimizer.lr >= _FROM_SCRATCH:
        lines.append(
            f"optimizer.lr {config.optimizer.lr:g} suits random weights; for trained ones, --preset finetune has"
            " a rate, a schedule and a router to begin with"
        )
    return lines


def _load_folder(trainer: Trainer, source: WeightSource, ranks: Ranks) -> list[str]:
    opened: list[FolderWeights] = []

    def open_folder() -> None:
        try:
            opened.append(FolderWeights(source.path, trainer.config.model, compare_copies=ranks.rank == 0))
        except ConfigError as error:  # which may have many lines
            more = f"; and {len(error.problems) - 3} more" if len(error.problems) > 3 else ""
            raise ValueError(f"{OPTION}: {'; '.join(error.problems[:3])}{more}") from None

    def load() -> list[str]:
        opened[0].load(trainer.model)
        return non_finite_names(model_tensors(trainer.model).items())

    ranks.gather(open_folder)
    if broken := sorted({name for of_rank in ranks.gather(load) for name in of_rank}):
        raise ValueError(f"{OPTION} {source.path}: {broken[0]} is not finite")
    (weights,) = opened
    about = f"{weights.architecture.name}, {weights.num_tensors} tensors"
    return [f"weights of {source.path} ({about}); a fresh optimizer, step 0", *weights.left_out]


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
