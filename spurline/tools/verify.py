"""`spurline verify`: compare training in many configurations with the reference, on local ranks. Torch-free."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import tyro

from spurline.config_io import preset_problems
from spurline.models import family_configs
from spurline.moe.config import MoEConfig
from spurline.testing.verification.cells import (
    TINY_MODEL,
    Cell,
    cell_problems,
    factor_that_drops_nothing,
    keep_given,
)
from spurline.testing.verification.matrix import QUICK, full_cells
from spurline.testing.verification.run import (
    BFLOAT16_TOLERANCES,
    LOW_PRECISION_TOLERANCES,
    TOLERANCES,
    Outcome,
    Verifier,
)
from spurline.tools.console import complain, human
from spurline.tools.options import UnknownModel
from spurline.tools.parsing import UserPackage, described, load_user_code, parse, split_options

PROG = "spurline verify"
DESCRIPTION = """\
Train a model for two steps in many configurations ("cells"), on local CPU ranks, and
compare each with the single-process reference: losses, gradient norms, all
gradients, updated weights and tokens per expert. Exit code 1 if any differs.

examples
  spurline verify                                       a tiny model, about a minute
  spurline verify --full                                all pairs of settings, many minutes
  spurline verify --module deepseek_v3 --config deepseek_v3_debugmodel --world 2
  spurline verify --import my_package --model.moe.experts_backend mine

With the built-in tiny model, cells also vary the MoE options that are not set on the
command line. With --module and --config, the MoE options of the preset are used."""
MAX_PARAMS = 100_000_000
M = TypeVar("M")


@dataclass(frozen=True, kw_only=True)
class Command(Generic[M]):
    """The options of `spurline verify`."""

    module: Annotated[str, described("NAME")] = ""
    """Model family (default: a built-in two-layer model)."""
    config: Annotated[str, described("NAME")] = ""
    """Preset of that family to verify."""
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Run a few cells that cover every setting at least once (default)."""
    full: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Cover every pair of settings, up to 8 ranks, and compile with inductor; takes many minutes."""
    world: Annotated[tuple[int, ...], described("N ...")] = ()
    """Run only cells with these numbers of ranks (default: all)."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Print JSON instead of a table, after the last cell."""
    import_: UserPackage = ""
    model: M


def main(argv: list[str]) -> int:
    command, given, problems = _parse_command(argv)
    cells = full_cells() if command.full else QUICK
    if command.quick and command.full:
        problems.append("--quick and --full are mutually exclusive")
    for ranks in command.world:
        if ranks not in (numbers := sorted({cell.ranks for cell in cells})):
            problems.append(f"--world {ranks}: no cell has {ranks} ranks. Choose from: {', '.join(map(str, numbers))}")
    problems += model_problems(command.model)
    if problems:
        return complain(PROG, problems)
    if command.world:
        cells = [cell for cell in cells if cell.ranks in command.world]
    return _verify(command, list(dict.fromkeys(keep_given(cell, given) for cell in cells)))


def model_problems(model: Any) -> list[str]:
    found = [f"model.{problem}" for problem in model.problems()]
    if not found and not isinstance(model, UnknownModel) and model.num_params() > MAX_PARAMS:
        found.append(
            f"the model has {human(model.num_params())} parameters, and each rank holds several full copies: reduce it"
            f" to at most {human(MAX_PARAMS)}, for example with --model.num_layers 2 --model.vocab_size 256"
        )
    enough = factor_that_drops_nothing(model)
    if not found and enough is not None and model.moe.capacity_factor < enough:
        found.append(
            f"model.moe.capacity_factor {model.moe.capacity_factor:g} may drop rows, and the reference drops none:"
            f" leave the option out, or set it to {enough:g} (num_experts / top_k) or more"
        )
    return found


def _parse_command(argv: list[str]) -> tuple[Command[Any], set[str], list[str]]:
    """The options, the names of model options that cells must not vary, and the errors."""
    before, options = split_options(argv)
    named = {option.name: option.values[0] for option in options if option.values}
    problems = load_user_code(argv)
    model: Any = TINY_MODEL
    given = {option.name.removeprefix("model.").removeprefix("moe.").removeprefix("no_") for option in options}
    if "module" in named or "config" in named:
        module, config = named.get("module", ""), named.get("config", "")
        not_found = preset_problems(module, config, prefix="--")
        problems += not_found
        model = UnknownModel() if not_found else family_configs(module)[config]().model
        given = {field.name for field in dataclasses.fields(MoEConfig)} | {"num_layers", "tied_embeddings"}
    if isinstance(model, UnknownModel):
        argv = before + [token for option in options if not option.name.startswith("model.") for token in option.tokens]
    kind: Any = Command[type(model)]  # type: ignore[misc]
    command, not_understood = parse(kind, Command(model=model), argv, PROG, DESCRIPTION)
    enough = factor_that_drops_nothing(command.model)
    if enough is not None and not any(option.name == "model.moe.capacity_factor" for option in options):
        moe = dataclasses.replace(command.model.moe, capacity_factor=enough)
        command = dataclasses.replace(command, model=dataclasses.replace(command.model, moe=moe))
    return command, given, problems + not_understood


def _verify(command: Command[Any], cells: list[Cell]) -> int:
    skipped = {cell: problems for cell in cells if (problems := cell_problems(cell, command.model))}
    verifier = Verifier(command.model, command.import_)
    started = time.perf_counter()
    outcomes = []
    if not command.json:
        print(_HEADER)
    for outcome in verifier.run([cell for cell in cells if cell not in skipped]):
        outcomes.append(outcome)
        if not command.json:
            print(_row(outcome), flush=True)
    seconds = time.perf_counter() - started
    passed = bool(outcomes) and all(outcome.passed for outcome in outcomes)
    if command.json:
        summary = {"passed": passed, "seconds": seconds, "reference": verifier.reference, "tolerances": TOLERANCES}
        summary["bfloat16_tolerances"] = BFLOAT16_TOLERANCES
        summary["low_precision_tolerances"] = LOW_PRECISION_TOLERANCES
        left_out = [{"cell": cell.name, "ranks": cell.ranks, "problems": why} for cell, why in skipped.items()]
        print(json.dumps(summary | {"cells": [_as_json(o) for o in outcomes], "skipped": left_out}, indent=2))
    else:
        for cell, why in skipped.items():
            print(f"skip    {cell.ranks:5}  {cell.name}: {'; '.join(why)}")
        print(f"reference: {verifier.reference}")
        print(_summary(outcomes, len(skipped), seconds))
    return 0 if passed else 1


_HEADER = (
    f"{'result':6}  ranks  {'loss':>7}  {'norm':>7}  {'weight':>7}  {'gradient':>8}  {'of':38}  {'seconds':>7}  cell"
)


def _row(outcome: Outcome) -> str:
    """A line of the table, followed by one line per problem."""
    worst = {kind: outcome.worst(kind) for kind in ("loss", "norm", "weight", "gradient")}
    loss, norm, weight, gradient = (f"{finding.error:.1e}" if finding else "-" for finding in worst.values())
    name = worst["gradient"].name if worst["gradient"] else "-"
    line = (
        f"{'ok' if outcome.passed else 'FAIL':6}  {outcome.cell.ranks:5}  {loss:>7}  {norm:>7}  {weight:>7}"
        f"  {gradient:>8}  {name:38}  {outcome.seconds:7.1f}  {outcome.cell.name}"
    )
    return "\n        ".join([line, *outcome.problems()])


def _summary(outcomes: list[Outcome], num_skipped: int, seconds: float) -> str:
    num_failed = sum(not outcome.passed for outcome in outcomes)
    result = f"{num_failed} of {len(outcomes)} cells FAILED" if num_failed else f"all {len(outcomes)} cells passed"
    skipped = f", {num_skipped} skipped" if num_skipped else ""
    return f"{result if outcomes else 'no cell applies to this model'}{skipped}, in {seconds:.0f} s"


def _as_json(outcome: Outcome) -> dict[str, Any]:
    worst = {}
    for kind, wrong in outcome.beyond_tolerance().items():
        if finding := outcome.worst(kind):
            worst[kind] = finding._asdict() | {"beyond_tolerance": [found.name for found in wrong]}
            worst[kind]["error"] = finding.error if math.isfinite(finding.error) else None  # JSON has no infinity
    return {
        "cell": outcome.cell.name,
        **dataclasses.asdict(outcome.cell),
        "passed": outcome.passed,
        "problems": outcome.problems(),
        "seconds": outcome.seconds,
        "worst": worst,
    }
