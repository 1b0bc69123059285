"""`spurline replay`: repeat a step of a run and report where it stops being finite. Torch-free until it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from spurline import config_io
from spurline.run_folders import find_run
from spurline.tools.console import complain
from spurline.tools.parsing import UserPackage, described, load_user_code, parse, split_options

PROG = "spurline replay"
DESCRIPTION = """\
Repeat a step of an earlier run on one process with anomaly detection, and report the
micro-batch, module and operation in which its numbers first stop being finite. RUN is a
run folder; steps that were not finite are recorded in its bad_steps.jsonl.

The replay starts from the newest checkpoint before the step, or from the initial
weights, and takes the steps in between first.

example
  spurline replay outputs/my_run --step 1234"""


@dataclass(frozen=True, kw_only=True)
class Command:
    """The options of `spurline replay`."""

    step: Annotated[int, described("N")] = 0
    """The step to repeat (required)."""
    direct: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Skip the steps between the checkpoint and this one: fast, but with slightly older weights."""
    sign_key_file: Annotated[str, described("FILE")] = ""
    """Refuse a checkpoint that was not signed with this key (--checkpoint.sign_key_file of the run)."""
    import_: UserPackage = ""


def main(argv: list[str]) -> int:
    """Replay the step; returns 0 whether it is finite or not."""
    problems = load_user_code(argv)
    before, _ = split_options(argv)
    command, not_understood = parse(Command, Command(), argv[len(before) :], f"{PROG} RUN", DESCRIPTION)
    problems += not_understood
    if len(before) != 1:
        got = f", got {' '.join(map(repr, before))}" if before else ""
        problems.append(f"expected one run folder first, as in {PROG} outputs/my_run --step N{got}")
    if not problems and command.step < 1:
        problems.append("--step is missing: which step to take again, counted from 1")
    if problems:
        return complain(PROG, problems)
    folder = find_run(before[0])
    _, _, config = config_io.load(folder / "config.json")

    from spurline.train.checkpoint.signature import read_key
    from spurline.train.replay import replay  # imports torch

    replay(folder, config, command.step, print, command.direct, read_key(command.sign_key_file))
    return 0
