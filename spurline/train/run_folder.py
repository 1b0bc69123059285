"""The folder of a run that starts: whether it may, and what becomes of an earlier run that is in it. Free of torch."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from spurline.config import Job
from spurline.train.checkpoint.folder import CheckpointFolder

PREVIOUS = "previous"
"""Where an earlier run goes: a run folder in the run folder, which `spurline report` can show."""
_OF_A_RUN = (
    *("metrics.jsonl", "expert_load.bin", "config.json", "samples.jsonl", "report.html", "tensorboard"),
    "bad_steps.jsonl",
)


def check_run_folder(folder: Path, job: Job, resumes: bool) -> None:
    """Refuse to start at step 1 beside the checkpoints of an earlier run; `resumes`: whether checkpoints are on."""
    steps = CheckpointFolder(folder).steps()
    if steps and not resumes and not job.overwrite:
        raise ValueError(
            f"job.dump_folder {folder} has a run with checkpoints up to step {steps[-1]}, and checkpoint.enable is off:"
            " resume it with --checkpoint.enable, choose another --job.dump_folder, or replace it with --job.overwrite"
        )


def make_run_folder(folder: Path, job: Job) -> None:
    """Make the folder; with --job.overwrite, remove the checkpoints in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"job.dump_folder {folder}: can't make this folder: {error.strerror}") from None
    # torchrun starts the same command again after a failure, which then resumes.
    if job.overwrite and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def set_aside(folder: Path) -> str:
    """Move the run that is in the folder, if there is one, to its subfolder `previous`; returns a line about that."""
    metrics, previous = folder / "metrics.jsonl", folder / PREVIOUS
    has_lines = metrics.is_file() and metrics.stat().st_size > 0
    if not has_lines and not (folder / "bad_steps.jsonl").exists():
        return ""
    shutil.rmtree(previous, ignore_errors=True)
    previous.mkdir()
    for name in _OF_A_RUN:
        if (folder / name).exists():
            (folder / name).rename(previous / name)
    return f"the earlier run in this folder is now in {previous}"
