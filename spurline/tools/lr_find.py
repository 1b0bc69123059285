"""`spurline lr-find`: try learning rates at the run's own batch size, and suggest one."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import tyro

from spurline.config import RunConfig
from spurline.files import write_file
from spurline.tools.options import RunCommand, resolve_command, run_problems
from spurline.tools.parsing import described

PROG = "spurline lr-find"
EXAMPLES = """\
Find a learning rate: short runs from the same weights on the same batches, one for each
rate, with the optimizer, batch size and layout of the run itself. Suggests the smallest
rate whose final loss equals the best one up to noise. Writes nothing but the page;
under torchrun all ranks take part.

examples
  spurline lr-find --module deepseek_v3 --config deepseek_v3_debugmodel
  spurline lr-find --config-file outputs/my_run/config.json --low 1e-6 --high 1e-3
  spurline lr-find --module qwen3 --config qwen3_debugmodel --tries_per_decade 4 --json

All options of `spurline train` apply."""
R = TypeVar("R", bound=RunConfig[Any])


@dataclass(frozen=True, kw_only=True)
class Command(RunCommand[R], Generic[R]):
    """The options of `spurline lr-find`."""

    low: Annotated[float, described("RATE")] = 1e-5
    """Lowest rate to try (default: 1e-5)."""
    high: Annotated[float, described("RATE")] = 1e-1
    """Highest rate to try (default: 1e-1)."""
    tries_per_decade: Annotated[int, described("N")] = 3
    """Rates to try for each factor of ten (default: 3)."""
    steps: Annotated[int, described("N")] = 40
    """Steps for each rate (default: 40)."""
    out: Annotated[str, described("FILE")] = "lr-find.html"
    """Page to write (default: lr-find.html)."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Print JSON instead of a table."""


def command_problems(command: Command[Any]) -> list[str]:
    found = run_problems(command.run_config)
    if not 0 < command.low < command.high:
        found.append(f"--low and --high must be positive rates, the lower first, got {command.low} and {command.high}")
    if command.tries_per_decade < 1:
        found.append(f"--tries_per_decade must be at least 1, got {command.tries_per_decade}")
    if command.steps < 8:
        found.append(f"--steps must be at least 8, got {command.steps}")
    folder = Path(command.out).absolute().parent
    if not folder.is_dir():
        found.append(f"--out {command.out}: there is no folder {folder}")
    return found


def main(argv: list[str]) -> int:
    return _find(resolve_command(argv, Command, PROG, EXAMPLES, command_problems))


def _find(command: Command[Any]) -> int:
    from spurline.parallel.world import joined_world  # imports torch: only once the options are valid
    from spurline.report.rates_page import rates_page
    from spurline.train.rate_sweep import rates_between, suggest, sweep

    config = command.run_config
    if config.debug.moe_force_load_balance:
        config = replace(config, model=config.model.with_forced_balance())
    rates = rates_between(command.low, command.high, command.tries_per_decade)
    is_first = os.environ.get("RANK", "0") == "0"
    trials = []
    with joined_world(config.parallelism, config.training.device, config.comm.timeout_seconds) as world:
        for trial in sweep(config, world, rates, command.steps, print):
            trials.append(trial)
            if is_first:
                shown = "diverged" if trial.diverged else f"loss {trial.loss:.4f}"
                print(f"rate {trial.lr:.2e}  {shown}", file=sys.stderr, flush=True)
    if not is_first:
        return 0
    found = suggest(trials)
    if found is None:
        verdict = "no rate lowered the loss: try a lower --low, more --steps, or look at the data"
    else:
        verdict = f"suggested: --optimizer.lr {found.lr:.2g} (lowest loss at {found.best:.2g})"
        if found.at_edge:
            option = "--low" if found.at_edge == "lower" else "--high"
            verdict += f"; that is the {found.at_edge} end of the range: extend it by {option}"
    about = f"{len(rates)} rates, {command.steps} steps each, {config.optimizer.name}"
    lines = [(trial.lr, trial.losses, trial.loss) for trial in trials]
    write_file(command.out, rates_page(command.config, about, verdict, lines, found.lr if found else None))
    if command.json:
        by_rate = [{"lr": t.lr, "loss": None if t.diverged else t.loss, "losses": t.losses} for t in trials]
        print(json.dumps({"suggested": found.lr if found else None, "trials": by_rate}))
    else:
        print(verdict)
        print(f"page: {command.out}")
    return 0 if found else 1
