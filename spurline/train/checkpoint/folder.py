"""The folder of a run's checkpoints: what is in it, and how one is published or removed. Free of torch.

step-00000100/                 a checkpoint: renamed to this when it was complete
  checkpoint.json              its record, with the size and checksum of every other file
  metadata.json                which part of which tensor lies where
  rank-00000-00000.tensors     the tensors, in one or more files per rank
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

    def __init__(self, run_folder: str | os.PathLike[str], sign_key: bytes | None = None) -> None:
        """With a key, records are signed, and those without a valid signature are not read."""
        self.path = Path(run_folder) / "checkpoints"
        self._sign_key = sign_key

    def named_steps(self) -> list[int]:
        """The steps of all folders with the name of a checkpoint, intact or not, ascending."""
        names = [path.name for path in self.path.glob("step-*")]
        return sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-[0-9]{8,18}", name))

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
        record = read_record(self.at(step), self._sign_key)
        if record.step != step:
            raise ValueError(f"'{self.at(step)}' holds the checkpoint of step {record.step}: was the folder renamed?")
        return record

    def problems(self, step: int, share: int = 0, num_shares: int = 1) -> list[str]:
        """What is wrong with the files of a checkpoint, or with every num_shares-th of them from number `share` on."""
        try:
            record = self.record(step)
        except ValueError as error:
            return [str(error)]
        by_size = sorted(record.files, key=lambda stored: -stored.num_bytes)
        found = [self._content_problem(step, stored) for stored in by_size[share::num_shares]]
        return [problem for problem in found if problem]

    def metadata_problem(self, step: int) -> str:
        """What is wrong with the file that says where the tensors are, or ""."""
        record = self.record(step)
        stored = [stored for stored in record.files if stored.name == record.metadata_file]
        missing = f"'{self.at(step)}' is damaged: its record does not list {record.metadata_file}"
        return self._content_problem(step, stored[0]) if stored else missing

    def _content_problem(self, step: int, stored: StoredFile) -> str:
        return content_problem(str(self.at(step)), stored)

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
        write_record(temporary, record, self._sign_key)
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
