"""The folder of a run's checkpoints: what is in it, and how one is published or removed. Free of torch.

step-00000100/                 a checkpoint: renamed to this when it was complete
  checkpoint.json              its record, with the size and checksum of every other file
  .metadata, __0_0.distcp      the files of torch.distributed.checkpoint, one or more per rank
.step-00000200.tmp/            a checkpoint that is being written, or was when the run was killed
.step-00000100.replaced.tmp/   the old checkpoint while a new one of the same step is renamed
.step-00000100.removed.tmp/    a checkpoint that is being removed
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from spurline.data.prepared_index import StoredFile, content_problem
from spurline.files import publish
from spurline.train.checkpoint.record import RECORD, CheckpointRecord, read_record, write_record


class CheckpointFolder:
    """The checkpoints of one run, by step. Only one process at a time may change them."""

    def __init__(self, run_folder: str | os.PathLike[str]) -> None:
        self.path = Path(run_folder) / "checkpoints"

    def named_steps(self) -> list[int]:
        """The steps of all folders with the name of a checkpoint, intact or not, ascending."""
        names = [path.name for path in self.path.glob("step-*")]
        return sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d{8,}", name))

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, ascending."""
        return [step for step in self.named_steps() if (self.at(step) / RECORD).exists()]

    def at(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def temporary(self, step: int) -> Path:
        return self.path / f".step-{step:08d}.tmp"

    def complete(self, step: int) -> Path:
        """The folder of the checkpoint of `step`; a ValueError that lists the steps there are if it does not exist."""
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise ValueError(f"there is no complete checkpoint {self.at(step)}; steps in that folder: {there}")
        return self.at(step)

    def record(self, step: int) -> CheckpointRecord:
        """A ValueError says why it can't be read."""
        return read_record(self.at(step))

    def problems(self, step: int, share: int = 0, num_shares: int = 1) -> list[str]:
        """What is wrong with the files of a checkpoint, or with every num_shares-th of them from number `share` on."""
        try:
            record = self.record(step)
        except ValueError as error:
            return [str(error)]
        by_size = sorted(record.files, key=lambda stored: -stored.num_bytes)
        found = [self._content_problem(step, stored) for stored in by_size[share::num_shares]]
        return [problem for problem in found if problem]

    def problem_of(self, step: int, name: str) -> str:
        """What is wrong with one file of a checkpoint whose record is intact, or ""."""
        (stored,) = (stored for stored in self.record(step).files if stored.name == name)
        return self._content_problem(step, stored)

    def _content_problem(self, step: int, stored: StoredFile) -> str:
        return content_problem(str(self.at(step)), stored, lambda num_bytes: None)

    def best(self) -> int | None:
        """The step with the lowest validation loss; the newest of several."""
        losses = {step: self._validation_loss(step) for step in self.steps()}
        known = [(loss, -step) for step, loss in losses.items() if loss is not None]
        return -min(known)[1] if known else None

    def _validation_loss(self, step: int) -> float | None:
        try:
            return self.record(step).validation_loss
        except ValueError:
            return None

    def publish(self, record: CheckpointRecord) -> None:
        """Turn the temporary folder of a step, with all files written, into its checkpoint."""
        temporary, path = self.temporary(record.step), self.at(record.step)
        write_record(temporary, record)
        if path.exists():
            path.rename(self._aside(record.step))
        publish(temporary, path)
        shutil.rmtree(self._aside(record.step), ignore_errors=True)

    def remove(self, step: int) -> None:
        """Rename it first, so that a kill during the removal leaves nothing that looks complete."""
        removed = self.path / f".step-{step:08d}.removed.tmp"
        if removed.exists():
            shutil.rmtree(removed)
        self.at(step).rename(removed)
        shutil.rmtree(removed)

    def clean(self) -> None:
        """Remove what a killed run left behind; not while another process writes."""
        for aside in self.path.glob(".step-*.replaced.tmp"):
            # Killed between two renames: the new checkpoint is not in place yet.
            path = self.path / aside.name.removeprefix(".").removesuffix(".replaced.tmp")
            if not path.exists():
                aside.rename(path)
        for path in self.path.glob(".step-*.tmp"):
            shutil.rmtree(path)

    def _aside(self, step: int) -> Path:
        return self.path / f".step-{step:08d}.replaced.tmp"
