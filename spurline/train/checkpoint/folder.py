"""The folder of a run's checkpoints: what is in it, and how one is published or removed. Free of torch.

step-00000100/                 a checkpoint, renamed to this when complete
  checkpoint.json              its record, with the size and checksum of every other file
  metadata.json                where each part of each tensor is stored
  rank-00000-00000.tensors     the tensors, in one or more files per rank
.step-00000200.tmp/            a checkpoint that is being written, or was when the run was killed
.step-00000100.replaced.tmp/   the old checkpoint while a new one of the same step is renamed
.step-00000100.removed.tmp/    a checkpoint that is being removed
.step-00000100.passed/         a checkpoint that the run has passed over: it went on from an older one

In a remote folder (s3://...), which has no rename, a checkpoint is written in place: it is complete once its last file,
checkpoint.json, exists, and no longer a checkpoint as soon as that file is removed. There `.step-00000100.passed` is a
small file beside the checkpoint that was passed over.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import shutil
from pathlib import Path

from spurline.data.prepared_index import StoredFile, content_problem
from spurline.files import publish, remove_path
from spurline.remote import RemotePath, is_remote
from spurline.train.checkpoint.record import RECORD, CheckpointRecord, read_record, write_record
from spurline.untrusted import read_json, reason

WHY_NONE = "the run has not saved one yet, or was started with --checkpoint.no_enable"
"""Why a run may have no checkpoint, for messages about it."""
_CHUNK_BYTES = 2**24
_STEP_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})")
_PASSED_NAME = re.compile(rf"\.{_STEP_NAME.pattern}\.passed")


class CheckpointFolder:
    """The checkpoints of one run, by step. Only one process at a time may change them."""

    def __init__(
        self, run_folder: str | os.PathLike[str], sign_key: bytes | None = None, elsewhere: str | None = None
    ) -> None:
        """With a key, records are signed, and those without a valid signature are not read.

        `elsewhere` is checkpoint.folder of the run's config; None reads it from the run's config.json.
        """
        place = _place_in_config(Path(run_folder)) if elsewhere is None else elsewhere
        self.path: Path | RemotePath = Path(run_folder) / "checkpoints"
        if place:
            self.path = RemotePath(place) if is_remote(place) else Path(place)
        self._sign_key = sign_key

    def named_steps(self) -> list[int]:
        """The steps of all folders named like a checkpoint, intact or not, except those passed over; ascending."""
        names = self._names()
        passed = _steps_in(names, _PASSED_NAME) if isinstance(self.path, RemotePath) else set()
        return sorted(_steps_in(names, _STEP_NAME) - passed)

    def passed_steps(self) -> list[int]:
        """The steps of the checkpoints that were passed over, ascending."""
        return sorted(_steps_in(self._names(), _PASSED_NAME))

    def _names(self) -> list[str]:
        try:
            return self.path.names() if isinstance(self.path, RemotePath) else os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:  # not the same as having no checkpoints: a run would start over
            raise ValueError(f"{self.path}: {reason(error)}") from None

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, ascending."""
        return [step for step in self.named_steps() if (self.at(step) / RECORD).exists()]

    def at(self, step: int) -> Path | RemotePath:
        return self.path / f"step-{step:08d}"

    def temporary(self, step: int) -> Path | RemotePath:
        """Where a checkpoint is written before it is published."""
        return self.path / f".step-{step:08d}.tmp" if isinstance(self.path, Path) else self.at(step)

    def prepare(self, step: int) -> None:
        """Make room for a checkpoint that is about to be written."""
        temporary = self.temporary(step)
        if isinstance(temporary, Path):
            temporary.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(temporary):
                remove_path(temporary)
        elif step in self.passed_steps():
            self.remove_passed(step)
        elif step in self.named_steps():
            self.remove(step)
        with contextlib.suppress(OSError):  # the rest is not in the way
            self.clean()

    def discard(self, step: int) -> None:
        """Remove the partial files of a checkpoint that failed; a complete one stays."""
        temporary = self.temporary(step)
        if isinstance(temporary, Path):
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                if not (temporary / RECORD).exists():
                    temporary.remove_tree()

    def complete(self, step: int) -> Path | RemotePath:
        """The folder of the checkpoint of `step`; if it does not exist, a ValueError that lists the steps that do."""
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise ValueError(f"there is no complete checkpoint {self.at(step)}; steps in that folder: {there}")
        return self.at(step)

    def record(self, step: int) -> CheckpointRecord:
        """The record of the checkpoint of `step`; a ValueError says why it can't be read."""
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
        folder = self.at(step)
        return content_problem(str(folder), stored) if isinstance(folder, Path) else _remote_problem(folder, stored)

    def best(self) -> int | None:
        """The step with the lowest finite validation loss; of several, the newest."""
        losses = {step: self._validation_loss(step) for step in self.steps()}
        known = [(loss, -step) for step, loss in losses.items() if loss is not None and math.isfinite(loss)]
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
        if not isinstance(temporary, Path) or not isinstance(path, Path):
            return
        if os.path.lexists(path):
            path.rename(self._aside(record.step))
        publish(temporary, path)
        with contextlib.suppress(OSError):
            remove_path(self._aside(record.step))

    def replace_record(self, record: CheckpointRecord) -> None:
        """Replace the record of a complete checkpoint, whose other files stay."""
        temporary = self.temporary(record.step)
        if isinstance(temporary, Path):
            temporary.mkdir(exist_ok=True)
        write_record(temporary, record, self._sign_key)
        if isinstance(temporary, Path):
            publish(temporary / RECORD, self.at(record.step) / RECORD)
            temporary.rmdir()

    def prune(self, step: int, keep_latest_k: int, keep_best: bool) -> None:
        """Remove checkpoints up to `step` except the latest keep_latest_k (0: keep all) and, on request, the best."""
        if not keep_latest_k:
            return
        best = self.best() if keep_best else None
        for old in [older for older in self.steps() if older <= step][:-keep_latest_k]:
            if old != best:
                self.remove(old)
        for old in self.passed_steps():
            if old <= step:
                self.remove_passed(old)

    def remove(self, step: int) -> None:
        """Remove a checkpoint, renamed first so that a kill during the removal leaves nothing that looks complete."""
        path = self.at(step)
        if isinstance(path, RemotePath) or isinstance(self.path, RemotePath):
            assert isinstance(path, RemotePath)
            if (path / RECORD).exists():
                (path / RECORD).unlink()
            path.remove_tree()
            return
        removed = self.path / f".step-{step:08d}.removed.tmp"
        if os.path.lexists(removed):
            remove_path(removed)
        path.rename(removed)
        remove_path(removed)

    def pass_over(self, steps: list[int]) -> list[Path | RemotePath]:
        """Rename checkpoints, or mark them where that is not possible, so that no run resumes from them."""
        for step in steps:
            path, passed = self.at(step), self._passed(step)
            if isinstance(passed, RemotePath):
                passed.write_text("the run went on from an older checkpoint\n")
                continue
            if os.path.lexists(passed):
                remove_path(passed)
            os.rename(path, passed)
        return [self._passed(step) for step in steps]

    def remove_passed(self, step: int) -> None:
        """Remove a checkpoint that was passed over."""
        passed = self._passed(step)
        if isinstance(passed, RemotePath):
            self.remove(step)
            passed.unlink()
        else:
            remove_path(passed)

    def clean(self) -> None:
        """Remove what a killed run left behind; must not be called while another process writes."""
        if isinstance(self.path, RemotePath):
            for step in set(self.named_steps()) - set(self.steps()):
                self.remove(step)
            return
        for aside in self.path.glob(".step-*.replaced.tmp"):
            # Killed between two renames: the new checkpoint is not in place yet.
            path = self.path / aside.name.removeprefix(".").removesuffix(".replaced.tmp")
            if not path.exists():
                aside.rename(path)
        for path in self.path.glob(".step-*.tmp"):
            remove_path(path)

    def _passed(self, step: int) -> Path | RemotePath:
        return self.path / f".step-{step:08d}.passed"

    def _aside(self, step: int) -> Path:
        assert isinstance(self.path, Path)
        return self.path / f".step-{step:08d}.replaced.tmp"


def _steps_in(names: list[str], pattern: re.Pattern[str]) -> set[int]:
    return {int(match[1]) for name in names if (match := pattern.fullmatch(name))}


def _place_in_config(run_folder: Path) -> str:
    """checkpoint.folder in the config.json of a run; empty if there is none."""
    try:
        section = read_json(run_folder / "config.json").get("checkpoint")
        place = section.get("folder") if isinstance(section, dict) else ""
    except (OSError, ValueError, AttributeError):
        return ""
    return place if isinstance(place, str) else ""


def _remote_problem(folder: RemotePath, stored: StoredFile) -> str:
    """The error if a file has the wrong size or checksum, else an empty string."""
    path, digest = folder / stored.name, hashlib.sha256()
    try:
        if (num_bytes := path.size()) != stored.num_bytes:
            return f"'{path}' has {num_bytes:,} bytes instead of {stored.num_bytes:,}"
        for begin in range(0, num_bytes, _CHUNK_BYTES):
            digest.update(path.read_range(begin, min(begin + _CHUNK_BYTES, num_bytes)))
    except OSError as error:
        return f"can't read '{path}': {error.strerror}"
    return "" if digest.hexdigest() == stored.sha256 else f"'{path}' is damaged: its checksum differs from the index"
