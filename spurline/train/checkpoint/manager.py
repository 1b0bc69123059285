"""Checkpoints of a run: `<run folder>/checkpoints/step-00000100`, complete or not there."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spurline.train.checkpoint.compatibility import config_differences, tensor_differences
from spurline.train.checkpoint.folder import CheckpointFolder
from spurline.train.checkpoint.random_state import random_state, restore_random_state, seed_random
from spurline.train.checkpoint.ranks import DiskError, Ranks
from spurline.train.checkpoint.record import CheckpointRecord
from spurline.train.checkpoint.staging import Staging
from spurline.train.checkpoint.state import (
    empty_optimizer_tensors,
    load_optimizer_tensors,
    model_tensors,
    optimizer_tensors,
)

# `torch.distributed.checkpoint` takes most of a second to import, so only runs that save or load import it.


class CheckpointManager:
    """The checkpoints of one run, written and read by all of its ranks together; an error on one is raised on all.

    A checkpoint is one flat dict: `model.<name>` is a parameter or a persistent buffer, `optimizer.<state>.<name>` the
    optimizer's state of a parameter, `random.<rank>` the random state of a rank, and `extra` belongs to the caller; its
    `tokens_seen` and `validation_loss` are in checkpoint.json too. The optimizer's settings (learning rate, betas,
    decay) are not saved: they come from the config, also when a run is resumed.
    """

    def __init__(
        self,
        run_folder: str | os.PathLike[str],
        interval: int,
        keep_latest_k: int,
        keep_best: bool = False,
        in_background: bool = False,
        model_config: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`model_config` is stored, and compared when a checkpoint is loaded; `say` shows a line to the user."""
        self._files = CheckpointFolder(run_folder)
        self.folder = self._files.path
        self.interval = interval
        self.keep_latest_k = keep_latest_k
        self.keep_best = keep_best
        # As JSON returns it: tuples become lists.
        self._model_config = json.loads(json.dumps(model_config))
        self._say = say
        self._best_validation_loss: float | None = None
        self._background = ThreadPoolExecutor(1, "checkpoint") if in_background else None
        self._staging = Staging()
        self._pending: Future[None] | None = None
        self._ranks: Ranks | None = None

    def is_due(self, step: int, last_step: int) -> bool:
        return step % self.interval == 0 or step == last_step

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return max(self._files.steps(), default=None)

    # Writing.

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, extra: dict[str, Any]) -> None:
        """Write the checkpoint of `step`, then remove older ones except the latest keep_latest_k (0: keep all).

        In the background, this only copies the state to host memory; it is on the disk when `wait` returns.
        """
        self.wait()
        ranks = self._joined_ranks()
        loss = extra.get("validation_loss")
        self._best_validation_loss = min((x for x in (self._best_validation_loss, loss) if x is not None), default=None)
        best, config = self._best_validation_loss, self._model_config
        record = CheckpointRecord(step, ranks.size, extra.get("tokens_seen"), loss, best, config, files=[])
        # In a tuple, a dict is stored as one object; otherwise each of its items would become an entry.
        state = {
            **model_tensors(model),
            **optimizer_tensors(model, optimizer),
            f"random.{ranks.rank}": (random_state(),),
            "extra": (extra,),
        }
        _ignore_warning_about_one_process()
        if self._background:
            self._pending = self._background.submit(self._write, record, self._staging.copy(state), ranks)
        else:
            self._write(record, state, ranks)

    @property
    def failed(self) -> bool:
        """Whether writing in the background has failed on this rank; `wait` raises the error."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def wait(self) -> None:
        """Wait until the checkpoint written in the background is on the disk; raises the error if that failed."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Let the background finish; an error there is only shown, as another one may be on its way already."""
        try:
            self.wait()
        except Exception as error:
            self._say(str(error))
        if self._background:
            self._background.shutdown()

    def _joined_ranks(self) -> Ranks:
        """All ranks, with a separate group if the background communicates at the same time as the training."""
        if self._ranks is None:
            separate = self._background is not None and dist.is_initialized()
            self._ranks = Ranks(dist.new_group(backend="gloo") if separate else None)
        return self._ranks

    def _write(self, record: CheckpointRecord, state: dict[str, Any], ranks: Ranks, **options: Any) -> None:
        from spurline.train.checkpoint.writer import write_state

        try:
            ranks.first(self._prepare_folder)
            files = write_state(state, self._files.temporary(record.step), ranks, **options)
            ranks.first(lambda: self._publish(replace(record, files=files)))
        except Exception as error:
            if ranks.rank == 0:  # no rank is writing any more
                shutil.rmtree(self._files.temporary(record.step), ignore_errors=True)
            if not isinstance(error, DiskError):
                raise
            raise ValueError(
                f"can't write the checkpoint of step {record.step}: {error}. Older checkpoints are unchanged"
            ) from error

    def _prepare_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files.clean()

    def _publish(self, record: CheckpointRecord) -> None:
        self._files.publish(record)
        if self.keep_latest_k:
            up_to_this = [step for step in self._files.steps() if step <= record.step]
            best = self._files.best() if self.keep_best else None
            for step in up_to_this[: -self.keep_latest_k]:
                if step != best:
                    self._files.remove(step)

    # Reading.

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Load the model, and the optimizer if there is one, in place from `step`; returns the checkpoint's `extra`.

        A checkpoint that is damaged or of another model raises a ValueError before anything is changed.
        """
        ranks = Ranks()
        ranks.first(lambda: self._files.complete(step))
        if problems := self._problems(step, ranks):
            raise ValueError(f"the checkpoint of step {step} is damaged: {'; '.join(problems)}")
        return self._load(step, model, optimizer, ranks)

    def load_newest(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, dict[str, Any]] | None:
        """Load the newest intact checkpoint: its step and `extra`; None if there is no checkpoint at all."""
        ranks = Ranks()
        damaged: list[str] = []
        for step in reversed(ranks.first(self._cleaned_steps)):
            problems = self._problems(step, ranks)
            if not problems:
                if damaged:
                    self._say(f"falling back to the checkpoint of step {step}: {'; '.join(damaged)}")
                return step, self._load(step, model, optimizer, ranks)
            damaged.append(f"that of step {step} is damaged, {'; '.join(problems)}")
        if damaged:
            raise ValueError(
                f"no checkpoint in {self.folder} is intact: {'; '.join(damaged)}."
                " Restore one, or remove that folder to start from step 1"
            )
        return None

    def restore_random(self, step: int, seed: int) -> None:
        """Restore this rank's random state of `step`, or seed it anew if the number of ranks has changed."""
        ranks = Ranks()
        if self._files.record(step).num_ranks != ranks.size:
            seed_random(seed, step, ranks.rank)
            return
        state: dict[str, Any] = {f"random.{ranks.rank}": None}
        self._read(state, step, ranks)
        restore_random_state(state[f"random.{ranks.rank}"][0])

    def _cleaned_steps(self) -> list[int]:
        self._files.clean()
        return self._files.named_steps()

    def _problems(self, step: int, ranks: Ranks) -> list[str]:
        """What is wrong with a checkpoint; each rank checks a share of its files."""
        by_rank = ranks.gather(lambda: self._files.problems(step, ranks.rank, ranks.size))
        return list(dict.fromkeys(problem for problems in by_rank for problem in problems))

    def _load(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: Ranks
    ) -> dict[str, Any]:
        tensors = model_tensors(model)
        saved: dict[str, Any] = {}

        def check() -> None:
            saved.update(self._saved(step))
            self._check_model(step, tensor_differences(saved, tensors))

        ranks.gather(check)
        of_optimizer = empty_optimizer_tensors(saved, model) if optimizer else {}
        state: dict[str, Any] = {**tensors, **of_optimizer, "extra": None}
        self._read(state, step, ranks)
        model.load_state_dict({name.removeprefix("model."): state[name] for name in tensors})
        if optimizer:
            load_optimizer_tensors(model, optimizer, of_optimizer)
            self._best_validation_loss = self._files.record(step).best_validation_loss
        return state["extra"][0]

    def _check_model(self, step: int, wrong_tensors: list[str]) -> None:
        stored = self._files.record(step).model
        both_known = stored is not None and self._model_config is not None
        differences = config_differences(stored, self._model_config) if both_known else []
        if wrong_tensors:
            shown = differences or wrong_tensors[:5]
            more = f"; and {len(wrong_tensors) - 5} more" if not differences and len(wrong_tensors) > 5 else ""
            raise ValueError(
                f"checkpoint {self._files.at(step)} is of another model: {'; '.join(shown)}{more}."
                " Use the model options it was written with, or another --job.dump_folder"
            )
        if differences:
            self._say(f"the checkpoint was written with other model options: {'; '.join(differences)}")

    def _read(self, state: dict[str, Any], step: int, ranks: Ranks, alone: bool = False) -> None:
        import torch.distributed.checkpoint as dcp

        _ignore_warning_about_one_process()
        try:
            dcp.load(state, checkpoint_id=self._files.at(step), no_dist=alone)
        except dcp.api.CheckpointException as error:
            ranks.raise_failure(error)

    def _saved(self, step: int) -> dict[str, Any]:
        """The metadata of each entry of a checkpoint."""
        import torch.distributed.checkpoint as dcp

        return dcp.FileSystemReader(self._files.at(step)).read_metadata().state_dict_metadata

    # Models without optimizer state, one tensor at a time.

    def write_tensors(
        self, step: int, tensors: dict[str, Tensor], read: Callable[[str], Tensor], extra: dict[str, Any]
    ) -> None:
        """Write a checkpoint of a model alone; `read` returns a tensor by its name just before it is written.

        `tensors` are on the meta device: at most two of those that `read` returns are in memory at a time.
        """
        import torch.distributed.checkpoint as dcp

        class ReadingPlanner(dcp.DefaultSavePlanner):
            def lookup_object(self, index: Any) -> Any:
                is_tensor = index.fqn.startswith("model.")
                return read(index.fqn.removeprefix("model.")) if is_tensor else super().lookup_object(index)

        state = {**{f"model.{name}": tensor for name, tensor in tensors.items()}, "extra": (extra,)}
        record = CheckpointRecord(step, 0, extra.get("tokens_seen"), None, None, self._model_config, files=[])
        _ignore_warning_about_one_process()
        # A file for each tensor: the writer keeps all tensors of a file in memory until the file is complete.
        self._write(record, state, Ranks(), planner=ReadingPlanner(), single_file_per_rank=False)

    def tensors(self, step: int) -> dict[str, Tensor]:
        """The model's tensors in the checkpoint of `step`, by name, on the meta device."""
        self._files.complete(step)
        return {
            name.removeprefix("model."): torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for name, entry in self._saved(step).items()
            if name.startswith("model.")
        }

    def read_tensor(self, step: int, name: str, like: Tensor) -> Tensor:
        """One full tensor of the model, with the shape and dtype of `like`, however it was sharded."""
        self._files.complete(step)
        state = {f"model.{name}": torch.empty(like.shape, dtype=like.dtype)}
        self._read(state, step, Ranks(), alone=True)
        return state[f"model.{name}"]


def _ignore_warning_about_one_process() -> None:
    # Never restored: warning filters belong to all threads, and restoring them in one would change another's.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
