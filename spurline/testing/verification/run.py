"""Run cells on local ranks, one at a time; a failed cell does not affect the next. Torch-free."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spurline.config import RunConfig
from spurline.testing.failures import RankError
from spurline.testing.pool import RankPool
from spurline.testing.verification.cells import Cell, reference_config, rounding, run_config

# Maximum relative error by kind of result. Float32 rounding from a different summation order is 100 times smaller.
TOLERANCES = {"loss": 1e-5, "norm": 1e-5, "gradient": 1e-4, "weight": 1e-5, "rows": 0.0}
# The same for cells in bfloat16, compared with the reference in float32. Rounding sends a few rows to another expert,
# which is a tenth or two of that expert's gradient; a gradient that is lost or counted twice is off by half or more.
BFLOAT16_TOLERANCES = {"loss": 1e-3, "norm": 5e-3, "gradient": 0.4, "weight": 3e-2, "rows": 0.1}
# The same for cells with 8-bit matmuls or exchanges: 3 mantissa bits have 16 times the rounding error of bfloat16.
LOW_PRECISION_TOLERANCES = {"loss": 1e-2, "norm": 5e-2, "gradient": 0.7, "weight": 0.1, "rows": 0.3}
SECONDS_FOR_A_CELL = 120.0
SECONDS_TO_COMPILE = 480.0


class Finding(NamedTuple):
    """The relative error of one result: the largest over all ranks."""

    error: float
    name: str
    rank: int
    step: int


# By kind of result, in the order of TOLERANCES: all results of that kind, largest error first.
Findings = dict[str, list[Finding]]


@dataclass(frozen=True)
class Outcome:
    cell: Cell
    seconds: float
    findings: Findings = field(default_factory=dict)
    """From the first step with an error beyond tolerance, else over all steps; empty if the cell failed to run."""
    failure: str = ""
    """Why the cell failed to run, in one line."""
    tolerances: Mapping[str, float] = field(default_factory=lambda: TOLERANCES)

    @property
    def passed(self) -> bool:
        return not self.failure and not any(self.beyond_tolerance().values())

    def beyond_tolerance(self) -> Findings:
        return beyond_tolerance(self.findings, self.tolerances)

    def worst(self, kind: str) -> Finding | None:
        return next(iter(self.findings.get(kind, [])), None)

    def problems(self) -> list[str]:
        """One line per kind of result with errors beyond tolerance."""
        lines = [self.failure] if self.failure else []
        wrong = self.beyond_tolerance()
        for kind, findings in wrong.items():
            if not findings or (kind == "weight" and wrong["gradient"]):  # wrong gradients imply wrong weights
                continue
            first, *more = findings
            line = f"{_WORDS[kind].format(first.name)} is off by {first.error:.1e} on rank {first.rank}"
            line += f" in step {first.step} (allowed: {self.tolerances[kind]:.0e})"
            names = ", ".join([finding.name for finding in more[:4]] + ["..."] * (len(more) > 4))
            lines.append(line + (f"; {len(more)} more beyond tolerance: {names}" if more else ""))
        return lines


_WORDS = {
    "loss": "the {}",
    "norm": "the norm of the {}",
    "gradient": "the gradient of {}",
    "weight": "the updated weight {}",
    "rows": "the number of rows of each expert of {}",
}


def tolerances_of(config: RunConfig[Any]) -> Mapping[str, float]:
    by_format = {"float32": TOLERANCES, "bfloat16": BFLOAT16_TOLERANCES, "8 bits": LOW_PRECISION_TOLERANCES}
    return by_format[rounding(config)]


def beyond_tolerance(findings: Findings, tolerances: Mapping[str, float]) -> Findings:
    return {kind: [f for f in of_kind if f.error > tolerances[kind]] for kind, of_kind in findings.items()}


class Verifier:
    """Runs the cells of one model on a pool of ranks; each reference is computed once and cached."""

    def __init__(self, model: Any, package: str = "") -> None:
        """`package` is imported on every rank first."""
        self.model = model
        self.package = package
        self.reference = ""
        """Description of the reference; empty before the first cell has run."""
        self._references: dict[str, str] = {}

    def run(self, cells: list[Cell]) -> Iterator[Outcome]:
        configs = [run_config(cell, self.model) for cell in cells]
        with (
            _triton_interpreted(any(_uses_triton(config) for config in configs)),
            RankPool() as self._pool,
            tempfile.TemporaryDirectory(prefix="spurline-verify-") as self._folder,
        ):
            for cell in cells:
                yield self._run_cell(cell)

    def _run_cell(self, cell: Cell) -> Outcome:
        started = time.perf_counter()
        config = run_config(cell, self.model)
        timeout = SECONDS_FOR_A_CELL + (SECONDS_TO_COMPILE if config.compile.enable else 0)
        path = ""
        try:
            path = self._reference_of(reference_config(config, cell.micro_batches))
            by_rank = self._pool.run(_measure_cell, cell.ranks, self.package, config, path, timeout=timeout)
        except RankError as error:
            first = error.failures[0]
            who = f"rank {first.rank}" if path else "the reference"
            failure = f"{who} {first.summary.splitlines()[0]}"
            return Outcome(cell, time.perf_counter() - started, failure=failure)
        tolerances = tolerances_of(config)
        findings = _judge_steps(by_rank, tolerances)
        return Outcome(cell, time.perf_counter() - started, findings, tolerances=tolerances)

    def _reference_of(self, config: RunConfig[Any]) -> str:
        """The file with the results of the reference, computed on first use on a single rank."""
        key = repr(config)
        if key not in self._references:
            path = os.path.join(self._folder, f"{len(self._references)}.pt")
            args = (self.package, config, path)
            (self.reference,) = self._pool.run(_save_reference, 1, *args, timeout=SECONDS_FOR_A_CELL)
            self._references[key] = path
        return self._references[key]


def _uses_triton(config: RunConfig[Any]) -> bool:
    return getattr(getattr(config.model, "moe", None), "experts_backend", "") == "triton"


@contextmanager
def _triton_interpreted(wanted: bool) -> Iterator[None]:
    """If wanted, Triton's kernels run in its interpreter on ranks that the first pool of this process starts.

    Triton decides that when it is imported, which torch does when the ranks' processes are made ready.
    """
    before = os.environ.get("TRITON_INTERPRET")
    if wanted:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        if wanted and before is None:
            del os.environ["TRITON_INTERPRET"]
        elif before is not None:
            os.environ["TRITON_INTERPRET"] = before


# Errors of one step on one rank, by kind and name.
_Errors = dict[str, dict[str, float]]


def _judge_steps(by_rank: list[list[_Errors]], tolerances: Mapping[str, float]) -> Findings:
    """The errors of the first step beyond tolerance (later steps inherit them), else the largest over all steps."""
    seen: list[tuple[int, int, _Errors]] = []
    for step, of_ranks in enumerate(zip(*by_rank, strict=True), 1):
        this_step = [(step, rank, errors) for rank, errors in enumerate(of_ranks)]
        if any(beyond_tolerance(findings := _largest(this_step), tolerances).values()):
            return findings
        seen += this_step
    return _largest(seen)


def _largest(seen: list[tuple[int, int, _Errors]]) -> Findings:
    """The largest error of each result, sorted."""
    findings: Findings = {}
    for kind in TOLERANCES:
        of_name: dict[str, Finding] = {}
        for step, rank, errors in seen:
            for name, error in errors[kind].items():
                if name not in of_name or error > of_name[name].error:
                    of_name[name] = Finding(error, name, rank, step)
        findings[kind] = sorted(of_name.values(), key=lambda finding: -finding.error)
    return findings


# These run on ranks, so that torch is not imported in this process.


def _save_reference(rank: int, package: str, config: RunConfig[Any], path: str) -> str:
    from spurline.testing.verification.measure import prepare_rank, save_reference

    prepare_rank(package)
    return save_reference(config, path)


def _measure_cell(rank: int, package: str, config: RunConfig[Any], path: str) -> list[_Errors]:
    from spurline.testing.verification.measure import measure_cell, prepare_rank

    prepare_rank(package)
    return measure_cell(config, path)
