"""Checkpoints of a run: `<run folder>/checkpoints/step-00000100`, either complete or absent."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spurline.remote import RemotePath, remove_probe, write_probe
from spurline.train.checkpoint.compatibility import config_differences, tensor_differences
from spurline.train.checkpoint.finite import is_finite, non_finite_names
from spurline.train.checkpoint.folder import CheckpointFolder
from spurline.train.checkpoint.random_state import random_state, restore_random_state, seed_random
from spurline.train.checkpoint.ranks import Ranks
from spurline.train.checkpoint.record import CheckpointRecord
from spurline.train.checkpoint.staging import Staging
from spurline.train.checkpoint.state import (
    empty_optimizer_tensors,
    load_optimizer_tensors,
    model_tensors,
    optimizer_tensors,
)
from spurline.train.exit_codes import DivergedError, RunError
from spurline.untrusted import reason

if TYPE_CHECKING:
    from torch.distributed.checkpoint import SavePlanner

    from spurline.train.checkpoint.reader import StoredCheckpoint

# `torch.distributed.checkpoint` takes most of a second to import, so only runs that save or load import it.


class CheckpointManager:
    """The checkpoints of one run, written and read by all of its ranks together; an error on one is raised on all.

    A checkpoint is a flat dict of tensors: `model.<name>` is a parameter or a persistent buffer,
    `optimizer.<state>.<name>` the optimizer state of a parameter, `random.<rank>` the random state of a rank as text.
    `extra` is the caller's plain data, in checkpoint.json; its `tokens_seen` and `validation_loss` have fields there.
    The optimizer's settings (learning rate, betas, decay) are not saved: they come from the config, even when a run is
    resumed. A model or optimizer with non-finite values is neither saved nor loaded.
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
        sign_key: bytes | None = None,
        elsewhere: str | None = None,
    ) -> None:
        """`model_config` is stored, and compared when a checkpoint is loaded; `say` shows a line to the user.

        With `sign_key`, checkpoints are signed, and those without a valid signature are not read. `elsewhere` is the
        option checkpoint.folder; None takes it from the run's config.json.
        """
        self._files = CheckpointFolder(run_folder, sign_key, elsewhere)
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

    def latest(self, before: int | None = None) -> int | None:
        """The step of the newest complete checkpoint, of all or only of those before a step."""
        return max((step for step in self._files.steps() if before is None or step < before), default=None)

    def remove_from(self, step: int) -> None:
        """Remove the checkpoints of `step` and later; only on the first rank, while nothing is being written."""
        for later in self._files.named_steps():
            if later >= step:
                self._files.remove(later)

    # Writing.

    def refuse_unless_writable(self) -> None:
        """Raise a ValueError on all ranks, before the first step, if one can't write to a remote folder or see it."""
        if not isinstance(self.folder, RemotePath):
            return
        folder, ranks = self.folder, Ranks()
        own, first = f".probe-{ranks.rank:05d}", ".probe-00000"
        ranks.gather(lambda: write_probe(folder, own))
        seen = ranks.gather((folder / first).exists)
        ranks.gather(lambda: remove_probe(folder, own))
        if not all(seen):
            raise ValueError(f"{folder}: rank {seen.index(False)} does not see there what rank 0 writes")

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, extra: dict[str, Any]) -> None:
        """Write the checkpoint of `step`, then remove older ones except the latest keep_latest_k (0: keep all).

        In the background, this only copies the state to host memory; it is on the disk when `wait` returns.
        """
        self.wait()
        ranks = self._joined_ranks()
        loss = extra.get("validation_loss")
        self._best_validation_loss = min((x for x in (self._best_validation_loss, loss) if x is not None), default=None)
        best, config = self._best_validation_loss, self._model_config
        plain = as_plain_data(extra)
        record = CheckpointRecord(step, ranks.size, extra.get("tokens_seen"), loss, best, config, [], plain)
        state = {
            **model_tensors(model),
            **optimizer_tensors(model, optimizer),
            f"random.{ranks.rank}": random_state(),
        }
        _ignore_warning_about_one_process()
        if self._background:
            self._pending = self._background.submit(self._write, record, self._staging.copy(state), ranks)
        else:
            self._write(record, state, ranks)

    def replace_extra(self, step: int, extra: dict[str, Any]) -> None:
        """Replace the caller's plain data in the checkpoint of `step`, on all ranks together."""
        plain = as_plain_data(extra)
        Ranks().first(lambda: self._files.replace_record(replace(self._files.record(step), extra=plain)))

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
        """Let the background finish; an error there is only shown, as another one may already be propagating."""
        try:
            self.wait()
        except Exception as error:
            self._say(str(error))
        if self._background:
            self._background.shutdown()

    def _joined_ranks(self) -> Ranks:
        """All ranks, with a separate group if the background communicates at the same time as training."""
        if self._ranks is None:
            separate = self._background is not None and dist.is_initialized()
            self._ranks = Ranks(dist.new_group(backend="gloo") if separate else None)
        return self._ranks

    def _write(
        self, record: CheckpointRecord, state: dict[str, Tensor], ranks: Ranks, planner: SavePlanner | None = None
    ) -> None:
        from spurline.train.checkpoint.writer import write_state

        try:
            if not_finite := self._not_finite(state, ranks):
                raise DivergedError(f"{not_finite}. The run has diverged: lower the learning rate, or look at the data")
            ranks.first(lambda: self._files.prepare(record.step))
            files = write_state(state, self._files.temporary(record.step), ranks, planner)
            ranks.first(lambda: self._publish(replace(record, files=files)))
        except Exception as error:
            if ranks.rank == 0:  # no rank is writing any more
                self._files.discard(record.step)
            if not isinstance(error, ValueError):
                raise
            kind = type(error) if isinstance(error, RunError) else ValueError
            raise kind(
                f"can't write the checkpoint of step {record.step}: {error}. Older checkpoints are unchanged"
            ) from error

    def _not_finite(self, tensors: Mapping[str, Tensor], ranks: Ranks) -> str:
        """A phrase that names a tensor with an infinity or a NaN on any rank, the same on all ranks; or "".

        Tensors on the meta device are materialized later, and checked then.
        """
        real = [(name, tensor) for name, tensor in tensors.items() if tensor.device.type != "meta"]
        by_rank = ranks.gather(lambda: non_finite_names(real))
        names = list(dict.fromkeys(name for names in by_rank for name in names))
        if not names:
            return ""
        rank = next(rank for rank, found in enumerate(by_rank) if names[0] in found)
        where = f" (rank {rank})" if ranks.size > 1 else ""
        more = f", nor are {len(names) - 1} more tensors" if len(names) > 1 else ""
        return f"{names[0]} is not finite{where}{more}"

    def _publish(self, record: CheckpointRecord) -> None:
        self._files.publish(record)
        try:
            self._files.prune(record.step, self.keep_latest_k, self.keep_best)
        except OSError as error:  # the new checkpoint is complete
            self._say(f"warning: {self.folder}: older checkpoints were not removed: {reason(error)}")

    # Reading.

    def open(self, step: int) -> StoredCheckpoint:
        """Open the checkpoint of `step` after verifying the checksums of all files; a ValueError if it is damaged."""
        ranks = Ranks()
        ranks.first(lambda: self._files.complete(step))
        checkpoint, problems = self._verified(step, ranks)
        if checkpoint is None:
            raise ValueError(f"the checkpoint of step {step} is damaged: {'; '.join(problems)}")
        return checkpoint

    def load(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        tensors_of: Callable[[nn.Module], dict[str, Tensor]] = model_tensors,
    ) -> dict[str, Any]:
        """Load the model, and the optimizer if there is one, in place from `step`; returns the checkpoint's `extra`.

        `tensors_of` selects the model's tensors to load: all that `save` writes, or its base alone. A checkpoint that
        is damaged or of another model raises a ValueError before anything is changed.
        """
        ranks = Ranks()
        extra, not_finite = self._load(self.open(step), model, optimizer, ranks, tensors_of=tensors_of)
        if not_finite:
            raise ValueError(f"the checkpoint of step {step} is of a run that has diverged: {not_finite}")
        return extra

    def load_newest(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        check: Callable[[int, dict[str, Any]], None] = lambda step, extra: None,
        pass_over: int = 0,
    ) -> tuple[int, dict[str, Any]] | None:
        """Load the newest intact and finite checkpoint; returns its step and `extra`, None if there are no checkpoints.

        `check` may reject these two with a ValueError before anything is changed. The newest `pass_over` checkpoints
        are skipped, as long as there are others. The run is to go on from there: the checkpoints that were passed over
        are set aside, as a later start would take one of them for the newest of this run.
        """
        ranks = Ranks()
        passed: list[str] = []
        steps = ranks.first(self._cleaned_steps)
        for step in reversed(steps[: max(1, len(steps) - pass_over)]):
            checkpoint, problems = self._verified(step, ranks)
            if checkpoint is None:
                passed.append(f"that of step {step} is damaged, {'; '.join(problems)}")
                continue
            extra, not_finite = self._load(checkpoint, model, optimizer, ranks, check)
            if not_finite:
                passed.append(f"that of step {step} is of a run that has diverged, {not_finite}")
                continue
            if passed:
                self._say(f"falling back to the checkpoint of step {step}: {'; '.join(passed)}")
            if newer := [later for later in steps if later > step]:
                aside = ranks.first(partial(self._files.pass_over, newer))
                self._say(f"set aside, as the run goes on without it: {', '.join(map(str, aside))}")
            return step, extra
        if passed:
            raise ValueError(
                f"no checkpoint in {self.folder} is intact: {'; '.join(passed)}."
                " Restore one, or remove that folder to start from step 1"
            )
        return None

    def restore_random(self, step: int, seed: int) -> None:
        """Restore this rank's random state of `step`, or reseed it if the number of ranks has changed."""
        ranks = Ranks()
        record = self._files.record(step)
        if record.num_ranks != ranks.size:
            seed_random(seed, step, ranks.rank)
            return
        ranks.gather(lambda: restore_random_state(self._stored(step).random_state(ranks.rank)))

    def _cleaned_steps(self) -> list[int]:
        self._files.clean()
        return self._files.named_steps()

    def _verified(self, step: int, ranks: Ranks) -> tuple[StoredCheckpoint | None, list[str]]:
        """The checkpoint, or what is wrong with it; each rank compares a share of the files with their checksums."""
        by_rank = ranks.gather(lambda: self._files.problems(step, ranks.rank, ranks.size))
        problems = list(dict.fromkeys(problem for problems in by_rank for problem in problems))
        checkpoint = None
        if not problems:
            try:
                checkpoint = self._stored(step)
            except ValueError as error:  # the same files on all ranks, so the same error
                problems = [str(error)]
        return checkpoint, problems

    def _stored(self, step: int) -> StoredCheckpoint:
        from spurline.train.checkpoint.reader import StoredCheckpoint

        return StoredCheckpoint(self._files.at(step), self._files.record(step))

    def _load(
        self,
        checkpoint: StoredCheckpoint,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        ranks: Ranks,
        check_extra: Callable[[int, dict[str, Any]], None] = lambda step, extra: None,
        tensors_of: Callable[[nn.Module], dict[str, Tensor]] = model_tensors,
    ) -> tuple[dict[str, Any], str]:
        """Load in place; returns `extra`, and which tensor is not finite (or "")."""
        tensors, saved = tensors_of(model), checkpoint.layout.tensors
        extra: dict[str, Any] = {}
        of_optimizer: dict[str, Tensor] = {}

        # With pipeline stages, each rank has only some of the model's tensors.
        everywhere = {name for names in ranks.gather(lambda: list(tensors)) for name in names}

        def check() -> None:
            self._check_model(checkpoint, tensor_differences(saved, tensors, everywhere - tensors.keys()))
            extra.update(checkpoint.extra)
            check_extra(checkpoint.record.step, extra)
            elsewhere = {name.removeprefix("model.") for name in everywhere}
            of_optimizer.update(empty_optimizer_tensors(saved, model, elsewhere) if optimizer else {})

        ranks.gather(check)
        state = {**tensors, **of_optimizer}
        self._read(checkpoint, state, ranks)
        # Not strict, as the adapters of a model or its base may be loaded alone; names have been compared above.
        model.load_state_dict({name.removeprefix("model."): state[name] for name in tensors}, strict=False)
        if optimizer:
            load_optimizer_tensors(model, optimizer, of_optimizer)
            self._best_validation_loss = checkpoint.record.best_validation_loss
        return extra, self._not_finite(state, ranks)

    def _check_model(self, checkpoint: StoredCheckpoint, wrong_tensors: list[str]) -> None:
        stored = checkpoint.record.model
        both_known = stored is not None and self._model_config is not None
        differences = config_differences(stored, self._model_config) if both_known else []
        if wrong_tensors:
            shown = differences or wrong_tensors[:5]
            more = f"; and {len(wrong_tensors) - 5} more" if not differences and len(wrong_tensors) > 5 else ""
            raise ValueError(
                f"checkpoint {checkpoint.folder} is of another model: {'; '.join(shown)}{more}."
                " Use the model options it was written with, or another --job.dump_folder"
            )
        if differences:
            self._say(f"the checkpoint was written with other model options: {'; '.join(differences)}")

    def _read(self, checkpoint: StoredCheckpoint, state: dict[str, Tensor], ranks: Ranks) -> None:
        import torch.distributed.checkpoint as dcp

        _ignore_warning_about_one_process()
        try:
            checkpoint.load(state, ranks.group)
        except dcp.api.CheckpointException as error:
            ranks.raise_failure(error)

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
                tensor = read(index.fqn.removeprefix("model."))
                if not is_finite(tensor):
                    raise ValueError(f"{index.fqn} is not finite")
                return tensor

        state = {f"model.{name}": tensor for name, tensor in tensors.items()}
        plain = as_plain_data(extra)
        record = CheckpointRecord(step, 0, extra.get("tokens_seen"), None, None, self._model_config, [], plain)
        _ignore_warning_about_one_process()
        self._write(record, state, Ranks(), ReadingPlanner())


def as_plain_data(extra: dict[str, Any]) -> dict[str, Any]:
    """Round-trip `extra` through JSON, which has no tensors and turns tuples into lists."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(extra))
    except TypeError as error:
        raise ValueError(f"the extra of a checkpoint must be plain data (JSON): {error}") from None
    return plain


def _ignore_warning_about_one_process() -> None:
    # Never restored: all threads share the warning filters, and restoring them in one would change another's.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
