"""`spurline checkpoint`: list, verify, inspect and prune the checkpoints of a run.

Torch-free except for verify and inspect.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from spurline.remote import RemotePath
from spurline.run_folders import find_run
from spurline.tools.console import human
from spurline.tools.parsing import described
from spurline.tools.subcommands import Subcommand, run_subcommand
from spurline.train.checkpoint.folder import WHY_NONE, CheckpointFolder
from spurline.train.checkpoint.signature import read_key
from spurline.train.folder_lock import FolderLock

PROG = "spurline checkpoint"
LS = """\
List the checkpoints in the run folder RUN, newest last. Tensor files are not
read; `verify` checks their content."""
VERIFY = """\
Compare every checkpoint file of the run with its recorded checksum, and look for
values that are not finite. Exit code 1 if a file is missing, truncated or changed,
if a tensor contains an infinity or a NaN or, with --sign_key_file, if a checkpoint
was not signed with that key."""
INSPECT = """\
Show the tensors of a checkpoint (the newest by default): name, shape, dtype, size,
and how the ranks that wrote it sharded each tensor."""
PRUNE = """\
Remove all but the newest N checkpoints of a run. The checkpoint with the lowest
validation loss and the newest intact one are always kept. Without --yes this asks
for confirmation on a terminal, and is a dry run elsewhere. While the run is
training, nothing is removed: --checkpoint.keep_latest_k is for that."""


@dataclass(frozen=True)
class Listing:
    json: bool = False
    """Print JSON lines, one object per checkpoint."""


@dataclass(frozen=True)
class Verify:
    step: Annotated[int | None, described("N")] = None
    """Verify only the checkpoint of this step (default: all)."""
    sign_key_file: Annotated[str, described("FILE")] = ""
    """Also verify signatures made with this key (--checkpoint.sign_key_file of the run)."""


@dataclass(frozen=True)
class Inspect:
    step: Annotated[int | None, described("N")] = None
    """Step of the checkpoint to inspect (default: the newest)."""
    json: bool = False
    """Print one JSON object."""
    sign_key_file: Annotated[str, described("FILE")] = ""
    """Refuse a checkpoint that was not signed with this key."""


@dataclass(frozen=True)
class Prune:
    keep: Annotated[int | None, described("N")] = None
    """Number of newest checkpoints to keep (required, at least 1)."""
    yes: bool = False
    """Remove without asking for confirmation."""


def main(argv: list[str]) -> int:
    return run_subcommand(PROG, COMMANDS, argv)


def list_checkpoints(runs: list[str], options: Listing) -> int:
    folder = _folder(runs[0])
    best = folder.best()
    entries = [_entry(folder, step) | {"best": step == best} for step in folder.named_steps()]
    if options.json:
        print("\n".join(json.dumps(entry) for entry in entries))
        return 0
    rows = [("step", "tokens", "validation loss", "ranks", "files", "bytes", "")]
    for entry in entries:
        if entry["problem"]:
            rows.append((str(entry["step"]), "-", "-", "-", "-", "-", entry["problem"]))
            continue
        tokens, loss = entry["tokens_seen"], entry["validation_loss"]
        rows.append(
            (
                f"{entry['step']}",
                "-" if tokens is None else f"{tokens:,}",
                "-" if loss is None else f"{loss:.4f}",
                f"{entry['num_ranks'] or '-'}",
                f"{entry['num_files']}",
                human(entry["num_bytes"]),
                "best" if entry["best"] else "",
            )
        )
    print(_table(rows))
    return 0


def verify_checkpoints(runs: list[str], options: Verify) -> int:
    folder = _folder(runs[0], options.sign_key_file)
    steps = folder.named_steps() if options.step is None else [options.step]
    if options.step is not None:
        folder.complete(options.step)
    num_damaged = 0
    for step in steps:
        problems = folder.problems(step) or _tensor_problems(folder, step)
        num_damaged += bool(problems)
        if problems:
            print("\n".join(f"step {step}: {problem}" for problem in problems))
        else:
            files = folder.record(step).files
            print(f"step {step}: {len(files)} files intact, {human(sum(f.num_bytes for f in files))} bytes")
    if num_damaged:
        print(f"{num_damaged} of {len(steps)} checkpoints are damaged: a run resumes from the newest intact one")
    return 1 if num_damaged else 0


def _tensor_problems(folder: CheckpointFolder, step: int) -> list[str]:
    """Problems with the tensors of a checkpoint whose files match their checksums."""
    from spurline.train.checkpoint.finite import is_finite
    from spurline.train.checkpoint.reader import StoredCheckpoint

    try:
        checkpoint = StoredCheckpoint(folder.at(step), folder.record(step))
        names = dict.fromkeys(name for name, tensor in checkpoint.chunks() if not is_finite(tensor))
        checkpoint.check_plain_data()
    except ValueError as error:
        return [str(error)]
    return [f"{name} is not finite: the run had diverged" for name in names]


def inspect_checkpoint(runs: list[str], options: Inspect) -> int:
    folder = _folder(runs[0], options.sign_key_file)
    steps = folder.steps()
    step = options.step if options.step is not None or not steps else steps[-1]
    folder.complete(step or 0)
    assert step is not None
    record = folder.record(step)
    if problem := folder.metadata_problem(step):
        raise ValueError(f"step {step}: {problem}")
    from spurline.train.checkpoint.contents import tensor_summaries
    from spurline.train.checkpoint.reader import StoredCheckpoint

    tensors = tensor_summaries(StoredCheckpoint(folder.at(step), record).layout)
    if options.json:
        content = {**dataclasses.asdict(record), "tensors": [dataclasses.asdict(tensor) for tensor in tensors]}
        print(json.dumps(content))
        return 0
    seen = "-" if record.tokens_seen is None else f"{record.tokens_seen:,}"
    loss = "not measured" if record.validation_loss is None else f"{record.validation_loss:.4f}"
    print(f"{folder.at(step)}: step {step}, {seen} tokens, validation loss {loss}, {_writers(record.num_ranks)}")
    rows = [("tensor", "shape", "dtype", "bytes", "parts")]
    rows += [
        (t.name, "x".join(map(str, t.shape)) or "scalar", t.dtype, human(t.num_bytes), t.parts_by_dim) for t in tensors
    ]
    print(_table(rows))
    print(f"{len(tensors)} tensors, {human(sum(tensor.num_bytes for tensor in tensors))} bytes")
    return 0


def prune_checkpoints(runs: list[str], options: Prune) -> int:
    if options.keep is None or options.keep < 1:
        given = "is missing" if options.keep is None else f"must be at least 1, got {options.keep}"
        raise ValueError(f"--keep {given}: give the number of checkpoints to keep")
    folder = _folder(runs[0])
    steps = folder.named_steps()
    kept = {*steps[-options.keep :], folder.best(), _newest_intact(folder)}
    removed = [step for step in steps if step not in kept]
    if not removed:
        print(f"nothing to remove: {len(steps)} checkpoints")
        return 0
    names = ", ".join(map(str, removed))
    if not options.yes and not (sys.stdin.isatty() and _agrees(f"remove the checkpoints of steps {names}? [y/N] ")):
        print(f"would remove the checkpoints of steps {names}; pass --yes to remove them")
        return 0
    with _owning(find_run(runs[0]), folder.path):
        for step in removed:
            folder.remove(step)
    print(f"removed the checkpoints of steps {names}")
    return 0


@contextmanager
def _owning(run_folder: Path, checkpoint_folder: Path | RemotePath) -> Iterator[None]:
    """Own the folders that a run would own, so that none saves or removes checkpoints at the same time."""
    is_elsewhere = isinstance(checkpoint_folder, Path) and checkpoint_folder.parent != run_folder
    folders = [run_folder, checkpoint_folder] if is_elsewhere else [run_folder]
    locks = [FolderLock(folder, instead="Let it remove old checkpoints, or end it first") for folder in folders]
    try:
        for lock in locks:
            lock.take()
        yield
    finally:
        for lock in locks:
            lock.release()


def _writers(num_ranks: int) -> str:
    """How many ranks wrote the checkpoint; 0 means it was imported by `spurline convert`."""
    return f"written by {num_ranks} rank{'s' if num_ranks > 1 else ''}" if num_ranks else "imported"


def _agrees(question: str) -> bool:
    return input(question).strip().lower() in ("y", "yes")


def _newest_intact(folder: CheckpointFolder) -> int | None:
    return next((step for step in reversed(folder.steps()) if not folder.problems(step)), None)


def _folder(run: str, sign_key_file: str = "") -> CheckpointFolder:
    run_folder = find_run(run)
    if not run_folder.is_dir():
        raise ValueError(f"{run_folder}: no such folder")
    folder = CheckpointFolder(run_folder, read_key(sign_key_file))
    if not folder.named_steps():
        raise ValueError(f"{folder.path} has no checkpoints: {WHY_NONE}")
    return folder


def _entry(folder: CheckpointFolder, step: int) -> dict[str, Any]:
    try:
        record = folder.record(step)
    except ValueError as error:
        return {"step": step, "problem": str(error)}
    return {
        "step": step,
        "tokens_seen": record.tokens_seen,
        "validation_loss": record.validation_loss,
        "num_ranks": record.num_ranks,
        "num_files": len(record.files),
        "num_bytes": sum(stored.num_bytes for stored in record.files),
        "problem": None,
    }


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Format rows as a table: first and last column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *numbers, last in rows:
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:-1], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells, last]).rstrip())
    return "\n".join(lines)


COMMANDS = {
    "ls": Subcommand("List the checkpoints of a run.", "RUN", LS, Listing(), list_checkpoints),
    "verify": Subcommand("Verify the checksums of checkpoints.", "RUN", VERIFY, Verify(), verify_checkpoints),
    "inspect": Subcommand("Show the tensors of a checkpoint.", "RUN", INSPECT, Inspect(), inspect_checkpoint),
    "prune": Subcommand("Remove old checkpoints.", "RUN", PRUNE, Prune(), prune_checkpoints),
}
