"""`spurline runs`: list the runs in a folder with their state, and compare two of them. Torch-free."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from spurline.remote import url_problems
from spurline.report.runs import changed_options, common_steps, find_runs, status_of
from spurline.run_folders import find_run
from spurline.tools.console import complain
from spurline.tools.parsing import described, parse
from spurline.tools.subcommands import take_arguments
from spurline.untrusted import printable

PROG = "spurline runs"
DESCRIPTION = """\
List the runs in FOLDER (default: outputs), the latest first: whether each is running,
finished, stopped by a signal or failed, its progress, its losses and when it last
wrote. `spurline runs compare A B` shows the options in which two runs differ, and their
losses at common steps.

examples
  spurline runs
  spurline runs outputs/deepseek_v3_debugmodel --json
  spurline runs compare outputs/deepseek_v3_debugmodel/0001 outputs/deepseek_v3_debugmodel"""
MAX_CELL = 1000
LOSSES = ("loss", "validation_loss", "bits_per_byte")


@dataclass(frozen=True, kw_only=True)
class Command:
    """The options of `spurline runs`."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Print JSON instead of a table."""


def main(argv: list[str]) -> int:
    arguments, rest = take_arguments(argv, Command())
    command, problems = parse(Command, Command(), rest, f"{PROG} [FOLDER | compare A B]", DESCRIPTION)
    if not problems and arguments[:1] == ["compare"] and len(arguments) != 3:
        problems.append(f"compare takes two runs, as in {PROG} compare outputs/a outputs/b, got {len(arguments) - 1}")
    elif not problems and arguments[:1] != ["compare"] and len(arguments) > 1:
        problems.append(f"expected one FOLDER, got {len(arguments)}: {' '.join(arguments)}")
    problems += [problem for argument in arguments for problem in url_problems("run folder", argument)]
    if problems:
        return complain(PROG, problems)
    if arguments[:1] == ["compare"]:
        return compare(_run(arguments[1]), _run(arguments[2]), command.json)
    return list_runs(Path(arguments[0] if arguments else "outputs").expanduser(), command.json)


def _run(name: str) -> Path:
    run = find_run(name)
    if not (run / "config.json").is_file():
        raise ValueError(f"{name} is not a run folder: there is no config.json in it")
    return run


def list_runs(folder: Path, as_json: bool) -> int:
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: `spurline train --config deepseek_v3_debugmodel` starts a run")
    found = [status_of(run) for run in find_runs(folder)]
    if as_json:
        print(json.dumps([dataclasses.asdict(run) for run in found]))
        return 0
    if not found:
        print(f"no runs in {folder}")
        return 0
    with_bits = any(run.bits_per_byte is not None for run in found)
    rows = [("run", "state", "step", "loss", "validation", *(["bits/byte"] if with_bits else []), "when", "")]
    for run in found:
        bits = [_number(run.bits_per_byte)] if with_bits else []
        step = f"{run.step}/{run.steps}" if run.steps else f"{run.step}"
        losses = (_number(run.loss), _number(run.validation_loss), *bits)
        rows.append((run.folder, run.state, step, *losses, run.when, run.why[:60]))
    print(_table(rows))
    return 0


def compare(first: Path, second: Path, as_json: bool) -> int:
    options, steps = changed_options(first, second), common_steps(first, second)
    names = [name for name in LOSSES if any(name in one and name in other for _, one, other in steps)]
    if as_json:
        losses = [
            {"step": step, **{name: [one.get(name), other.get(name)] for name in names}} for step, one, other in steps
        ]
        changed = [{"option": name, "values": [one, other]} for name, one, other in options]
        print(json.dumps({"runs": [str(first), str(second)], "options": changed, "losses": losses}))
        return 0
    print(f"A  {first}\nB  {second}\n")
    shown = [(name, json.dumps(one), json.dumps(other)) for name, one, other in options]
    print(_table([("option", "A", "B"), *shown]) if shown else "no options differ")
    print()
    if not names:
        print("no steps in common")
        return 0
    rows = [("step", *(f"{name} {run}" for name in names for run in "AB"))]
    for step, one, other in steps:
        values = [_number(record.get(name)) for name in names for record in (one, other)]
        rows.append((str(step), *values))
    print(_table(rows))
    return 0


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, (int, float)) else "-"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    rows = [tuple(printable(cell, MAX_CELL) for cell in row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
