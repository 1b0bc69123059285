"""Run cells on ranks of this machine, one after the other: what fails in one does not stop the next. Free of torch."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spurline.config import RunConfig
from spurline.testing.failures import RankError
from spurline.testing.pool import RankPool
from spurline.testing.verification.cells import Cell, reference_config, run_config

# The largest relative error of each kind of result that passes. What a sum in another order makes of float32 is a
# hundred times smaller.
TOLERANCES = {"loss": 1e-5, "norm": 1e-5, "gradient": 1e-4, "weight": 1e-5, "rows": 0.0}
SECONDS_FOR_A_CELL = 120.0
SECONDS_TO_COMPILE = 480.0


class Finding(NamedTuple):
    """The relative error of one result, on the rank where it is largest."""

    error: float
    name: str
    rank: int
    step: int


# By kind of result, in the order of TOLERANCES: every result of that kind, the largest error first.
Findings = dict[str, list[Finding]]


@dataclass(frozen=True)
class Outcome:
    cell: Cell
    seconds: float
    findings: Findings = field(default_factory=dict)
    """Of the first step with errors beyond tolerance, if there is one; empty if the cell did not get that far."""
    failure: str = ""
    """Why it did not, in one line."""

    @property
    def passed(self) -> bool:
        return not self.failure and not any(beyond_tolerance(self.findings).values())

    def worst(self, kind: str) -> Finding | None:
        return next(iter(self.findings.get(kind, [])), None)

    def problems(self) -> list[str]:
        """What is wrong, one line for each kind of result."""
        lines = [self.failure] if self.failure else []
        wrong = beyond_tolerance(self.findings)
        for kind, findings in wrong.items():
            if not findings or (kind == "weight" and wrong["gradient"]):  # what comes of wrong gradients is no news
                continue
            first, *more = findings
            line = f"{_WORDS[kind].format(first.name)} is off by {first.error:.1e} on rank {first.rank}"
            line += f" in step {first.step} (allowed: {TOLERANCES[kind]:.0e})"
            names = ", ".join([finding.name for finding in more[:4]] + ["..."] * (len(more) > 4))
            lines.append(line + (f"; {len(more)} more beyond that: {names}" if more else ""))
        return lines


_WORDS = {
    "loss": "the {}",
    "norm": "the norm of the {}",
    "gradient": "the gradient of {}",
    "weight": "the updated weight {}",
    "rows": "the number of rows of each expert of {}",
}


def beyond_tolerance(findings: Findings) -> Findings:
    return {kind: [f for f in of_kind if f.error > TOLERANCES[kind]] for kind, of_kind in findings.items()}


class Verifier:
    """Runs cells of one model on a pool of ranks that stays warm, against references that are computed once."""

    def __init__(self, model: Any, package: str = "") -> None:
        """`package` is imported on every rank first."""
        self.model = model
        self.package = package
        self.reference = ""
        """What the cells are compared with, in words; empty before the first of them."""
        self._references: dict[str, str] = {}

    def run(self, cells: list[Cell]) -> Iterator[Outcome]:
        with RankPool() as self._pool, tempfile.TemporaryDirectory(prefix="spurline-verify-") as self._folder:
            for cell in cells:
                yield self._run_cell(cell)

    def _run_cell(self, cell: Cell) -> Outcome:
        started = time.perf_counter()
        config = run_config(cell, self.model)
        timeout = SECONDS_FOR_A_CELL + (SECONDS_TO_COMPILE if config.compile.enable else 0)
        path = ""
        try:
            path = self._reference_of(reference_config(config))
            by_rank = self._pool.run(_measure_cell, cell.ranks, self.package, config, path, timeout=timeout)
        except RankError as error:
            first = error.failures[0]
            who = f"rank {first.rank}" if path else "the reference"
            failure = f"{who} {first.summary.splitlines()[0]}"
            return Outcome(cell, time.perf_counter() - started, failure=failure)
        return Outcome(cell, time.perf_counter() - started, _judge_steps(by_rank))

    def _reference_of(self, config: RunConfig[Any]) -> str:
        """The file with what the reference leaves behind, computed on a rank by itself when it is first asked for."""
        key = repr(config)
        if key not in self._references:
            path = os.path.join(self._folder, f"{len(self._references)}.pt")
            args = (self.package, config, path)
            (self.reference,) = self._pool.run(_save_reference, 1, *args, timeout=SECONDS_FOR_A_CELL)
            self._references[key] = path
        return self._references[key]


# By kind and name, as a rank returns them for a step.
_Errors = dict[str, dict[str, float]]


def _judge_steps(by_rank: list[list[_Errors]]) -> Findings:
    """The errors of the first step that has some beyond tolerance, as they spoil the next; else the largest of all."""
    seen: list[tuple[int, int, _Errors]] = []
    for step, of_ranks in enumerate(zip(*by_rank, strict=True), 1):
        this_step = [(step, rank, errors) for rank, errors in enumerate(of_ranks)]
        if any(beyond_tolerance(findings := _largest(this_step)).values()):
            return findings
        seen += this_step
    return _largest(seen)


def _largest(seen: list[tuple[int, int, _Errors]]) -> Findings:
    """The largest error of each result."""
    findings: Findings = {}
    for kind in TOLERANCES:
        of_name: dict[str, Finding] = {}
        for step, rank, errors in seen:
            for name, error in errors[kind].items():
                if name not in of_name or error > of_name[name].error:
                    of_name[name] = Finding(error, name, rank, step)
        findings[kind] = sorted(of_name.values(), key=lambda finding: -finding.error)
    return findings


# These run on ranks: torch loads there, not here.


def _save_reference(rank: int, package: str, config: RunConfig[Any], path: str) -> str:
    from spurline.testing.verification.measure import prepare_rank, save_reference

    prepare_rank(package)
    return save_reference(config, path)


def _measure_cell(rank: int, package: str, config: RunConfig[Any], path: str) -> list[_Errors]:
    from spurline.testing.verification.measure import measure_cell, prepare_rank

    prepare_rank(package)
    return measure_cell(config, path)
