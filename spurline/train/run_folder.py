"""Choose the folder of a new run; check that the run may use it, and that all ranks see it.

The first rank decides and tells the others. A file in the folder names the launcher's job, so that restarted ranks find
it again, whatever else has been started since.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from spurline import config_io
from spurline.config import Job, RunConfig
from spurline.parallel.rendezvous import job_of_launcher, name_ranks
from spurline.run_folders import FILES_OF_A_RUN, claim_number, is_run, numbered_runs, set_latest
from spurline.shared_folder import missing_folders, not_shared, remove_if_empty, sees, token_in
from spurline.train.checkpoint.folder import CheckpointFolder
from spurline.train.checkpoint.ranks import Ranks
from spurline.train.exit_codes import FolderInUseError, RefusedError
from spurline.train.folder_lock import FolderLock
from spurline.train.launcher import restart_count
from spurline.train.metrics.jsonl import last_step
from spurline.untrusted import open_regular

_OF_A_RUN = (
    *("metrics.jsonl", "expert_load.bin", "samples.jsonl", "report.html", "tensorboard", "wandb"),
    *("bad_steps.jsonl", "routing.html", "state.json"),
    "config.json",  # last: it tells that the others are of a run
)
_NOT_STARTED_ANEW = ("checkpoints", "logs", "profile", "failures.jsonl")
_JOB_FILE = ".job"
_SECONDS_PER_TURN = 5.0
"""Less than any timeout of a collective, in which the other ranks wait for the first one."""


class Claim(NamedTuple):
    """The folder of this run."""

    folder: Path
    job: str = ""
    """The launcher's job, the same for all its attempts; empty without a launcher."""
    is_restart: bool = False
    """Whether an earlier attempt of this job has used it: then the run continues, whatever is in it."""
    in_use: str = ""
    """Why it can't be used, if another job owns it."""


@contextmanager
def claimed_folder(
    config: RunConfig[Any], say: Callable[[str], None] = print, on_wait: Callable[[], None] = lambda: None
) -> Iterator[Claim]:
    """The folder of the run, created and visible to all ranks; a ValueError on all of them if there is none.

    A folder that was created for the run and is still empty at the end of the block is removed. While it is unknown
    whether an owner lives, `on_wait` is called every few seconds.
    """
    ranks = Ranks()
    made: list[Path] = []
    job = ranks.first(job_of_launcher)
    _wait_for_owner(config.job, job, ranks, say, on_wait)

    def claim() -> Claim:
        missing = missing_folders(Path(config.job.dump_folder or config.job.runs_folder))
        claim = decide_folder(config, job, restart_count())
        make_folder(claim.folder, "job.dump_folder")
        made.extend(missing if config.job.dump_folder else [claim.folder, *missing])
        if job and not claim.in_use:
            (claim.folder / _JOB_FILE).write_text(job, encoding="utf-8")
        return claim

    found = ranks.first(claim)
    try:
        if found.in_use:
            raise FolderInUseError(found.in_use)
        refuse_unless_shared(found.folder, ranks)
        yield found
    finally:
        if made and [path.name for path in made[0].glob("*") if path.name != _JOB_FILE] == []:
            (made[0] / _JOB_FILE).unlink(missing_ok=True)
        remove_if_empty(made)


def _wait_for_owner(
    job: Job, launched_as: str, ranks: Ranks, say: Callable[[str], None], on_wait: Callable[[], None]
) -> None:
    """Wait until it is known whether the owner of the named folder, if it has one, lives or is dead."""
    if not job.dump_folder:
        return
    lock = FolderLock(_folder_of_job(job, launched_as) or job.dump_folder, launched_as)
    while ranks.first(lambda: lock.wait(_SECONDS_PER_TURN, say)):
        on_wait()


def with_folder(config: RunConfig[Any], folder: Path) -> RunConfig[Any]:
    return replace(config, job=replace(config.job, dump_folder=str(folder)))


def decide_folder(config: RunConfig[Any], launched_as: str, restarts: int) -> Claim:
    """Choose the folder of the run, on the first rank; a ValueError if the one it names belongs to another run.

    `launched_as` is the launcher's job, if there is one, and `restarts` how often it has started ranks before.
    """
    job, restarted = config.job, restarts > 0
    if known := _folder_of_job(config.job, launched_as):
        return Claim(known, launched_as, is_restart=True)
    if job.dump_folder:
        folder = Path(job.dump_folder)
        if not restarted:
            if in_use := FolderLock(folder, launched_as).owned_by():
                return Claim(folder, launched_as, in_use=in_use)
            refuse_other_run(folder, config)
    elif restarted and not launched_as:
        raise ValueError(
            "this restart does not know the folder of the run: start ranks by `spurline launch` or torchrun, or give"
            " --job.dump_folder"
        )
    else:
        try:
            folder = claim_number(job.runs_folder)
        except OSError as error:
            raise ValueError(f"job.runs_folder {job.runs_folder}: can't make a folder: {error.strerror}") from None
    return Claim(folder, launched_as, restarted and not launched_as)


def _folder_of_job(job: Job, launched_as: str) -> Path | None:
    """The folder that an earlier attempt of the same job has claimed."""
    if not launched_as:
        return None
    named = [Path(job.dump_folder)] if job.dump_folder else []
    for folder in (*named, *reversed(numbered_runs(job.runs_folder))):
        with contextlib.suppress(OSError), open_regular(folder / _JOB_FILE) as file:
            if file.read(1000) == launched_as.encode():
                return folder
    return None


def refuse_other_run(folder: Path, config: RunConfig[Any]) -> None:
    """Raise a ValueError if the folder has a run that this one would change but is not meant to continue."""
    job, steps = config.job, CheckpointFolder(folder, elsewhere=config.checkpoint.folder).steps()
    if numbered_runs(folder):
        raise ValueError(
            f"job.dump_folder {folder} has numbered runs in it: choose a folder of its own, or omit the option for the"
            " next number"
        )
    if not is_run(folder):
        return
    if not _is_ours(folder) and (job.overwrite or not steps):
        there = ", ".join(name for name in FILES_OF_A_RUN if os.path.lexists(folder / name))
        raise ValueError(f"job.dump_folder {folder} has {there}, but no run of Spurline: choose another folder")
    if job.overwrite:
        return
    ways_out = "choose another --job.dump_folder, or replace it with --job.overwrite"
    if steps and not config.checkpoint.enable:
        raise ValueError(
            f"job.dump_folder {folder} has a run with checkpoints up to step {steps[-1]}, and checkpoint.enable is off:"
            f" resume it with --checkpoint.enable, {ways_out}"
        )
    if not steps and not (config.checkpoint.enable and _was_killed_early(folder, config)):
        taken = last_step(folder / "metrics.jsonl")
        raise ValueError(f"job.dump_folder {folder} holds another run (up to step {taken}): {ways_out}")


def _is_ours(folder: Path) -> bool:
    """Whether a run of Spurline has written what is in the folder; others have checkpoints and a config.json too."""
    return config_io.is_of_a_run(folder / "config.json") or bool(CheckpointFolder(folder, elsewhere="").steps())


def _was_killed_early(folder: Path, config: RunConfig[Any]) -> bool:
    """Whether the folder is from the same command, killed before its first checkpoint: it starts over."""
    try:
        _, _, then = config_io.load(folder / "config.json")
    except config_io.ConfigError:
        return False
    is_unfinished = last_step(folder / "metrics.jsonl") < config.training.steps
    return is_unfinished and replace(then, job=config.job) == config


def make_folder(folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option} {folder}: can't make this folder: {error.strerror}") from None


def refuse_unless_shared(folder: Path, ranks: Ranks) -> None:
    """Raise a RefusedError on all ranks if one of them does not see what the first one writes to the folder."""
    if ranks.size == 1:
        return
    with ExitStack() as until_all_have_looked:
        token = folder / ranks.first(lambda: until_all_have_looked.enter_context(token_in(folder)))
        seen = ranks.gather(lambda: (sees(token), socket.gethostname(), folder.absolute()))
    blind = [rank for rank, (sees, _, _) in enumerate(seen) if not sees]
    if blind:
        hosts = ", ".join(sorted({seen[rank][1] for rank in blind}))
        raise RefusedError(not_shared(f"{name_ranks(blind)} (on {hosts})", seen[0][2], f"rank 0 (on {seen[0][1]})"))


def overwrite(folder: Path, config: RunConfig[Any], is_restart: bool) -> None:
    """With --job.overwrite, remove the run in the folder, which this job must own."""
    # After a failure, torchrun starts the same command again, which then resumes.
    if config.job.overwrite and not is_restart:
        if config.checkpoint.folder:
            checkpoints = CheckpointFolder(folder, elsewhere=config.checkpoint.folder)
            for step in checkpoints.named_steps():
                checkpoints.remove(step)
            for step in checkpoints.passed_steps():
                checkpoints.remove_passed(step)
        if not _is_ours(folder):
            return
        _remove(folder, (*_NOT_STARTED_ANEW, *_OF_A_RUN))


def start_anew(folder: Path) -> None:
    """Remove what the run wrote before its first checkpoint."""
    if _is_ours(folder):
        _remove(folder, _OF_A_RUN)


def _remove(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def how_to_resume(config: RunConfig[Any]) -> str:
    folder, runs = config.job.dump_folder, config.job.runs_folder
    command = "the same command" + " without --job.overwrite" * config.job.overwrite
    if runs and Path(folder).parent == Path(runs):
        return f"resume it by {command} and --job.resume {folder}"
    return f"run {command} to resume"


def own(folder: Path, config: RunConfig[Any], is_restart: bool) -> None:
    """What the first rank does once this job owns the folder; a ValueError if another job has run in it since."""
    if not is_restart:
        refuse_other_run(folder, config)
    overwrite(folder, config, is_restart)
    set_latest(folder)
