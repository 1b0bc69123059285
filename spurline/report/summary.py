"""A run's results in a few numbers: the first line of a report, and the numbers below it. Torch-free."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape

import numpy as np

from spurline.report.read import Record, Run

LATELY = 20  # the current speed is the median of this many records
DEGREES = {
    "pipeline_parallel_degree": "pp",
    "data_parallel_replicate_degree": "dp_replicate",
    "data_parallel_shard_degree": "dp_shard",
    "context_parallel_degree": "cp",
    "tensor_parallel_degree": "tp",
    "expert_parallel_degree": "ep",
    "expert_tensor_parallel_degree": "etp",
}


def layout(run: Run) -> str:
    """The ranks of a run and the degrees that its options name, such as `4 ranks (pp 2, ep 2)`; "" for one rank."""
    environment, parallelism = run.config.get("environment"), run.config.get("parallelism")
    ranks = environment.get("ranks") if isinstance(environment, dict) else None
    if type(ranks) is not int or ranks < 2:
        return ""
    given = parallelism if isinstance(parallelism, dict) else {}
    degrees = [(name, given.get(option)) for option, name in DEGREES.items()]
    shown = ", ".join(f"{name} {degree}" for name, degree in degrees if type(degree) is int and degree > 1)
    return f"{ranks:,} ranks ({shown})" if shown else f"{ranks:,} ranks"


def summary(run: Run) -> str:
    """State, step, loss, speed, and when the last line of metrics was written, as a paragraph of HTML."""
    state = run.state
    parts = [
        f'<b class="state {state}">{state}</b>' if state else "",
        f'<span class="step">{_progress(run)}</span>',
        *map(escape, _now(run)),
        _when(run),
    ]
    return f'<p class="summary">{" · ".join(filter(None, parts))}</p>'


def _progress(run: Run) -> str:
    last, total = run.records[-1]["step"], run.total_steps
    steps = f"{last:,} step{'s' if last != 1 else ''}"
    return steps if total in (None, last) else f"step {last:,} of {total:,}"


def _now(run: Run) -> list[str]:
    """The latest loss, bits per byte and speed."""
    found = []
    if losses := values(run, "loss"):
        found.append(f"loss {losses[-1]:.3f}")
    if bits := values(run, "bits_per_byte"):
        found.append(f"{bits[-1]:.3f} bits per byte")
    if rates := values(run, "tokens_per_second")[-LATELY:]:
        found.append(f"{short(_median(rates))} tokens/s")
    return found


def _when(run: Run) -> str:
    if not run.changed:
        return ""
    moment = datetime.fromtimestamp(run.changed, UTC)
    return f'<time datetime="{moment:%Y-%m-%dT%H:%M:%SZ}">{moment:%Y-%m-%d %H:%M} UTC</time>'


def values(run: Run, name: str) -> list[float]:
    return [record[name] for record in run.records if isinstance(record.get(name), int | float)]


def numbers(run: Run) -> dict[str, tuple[str, str]]:
    """The results of the run by name: a number and its description."""
    found: dict[str, tuple[str, str]] = {}
    if held_out := [r for r in run.records if isinstance(r.get("bits_per_byte"), int | float)]:
        best = min(held_out, key=lambda record: record["bits_per_byte"])
        found["Bits per byte"] = (f"{best['bits_per_byte']:.3f}", f"of held-out text, best, step {best['step']:,}")
    if losses := values(run, "loss"):
        found["Loss"] = (f"{losses[-1]:.3f}", "at the end")
    if validation := [r for r in run.records if isinstance(r.get("validation_loss"), int | float)]:
        best = min(validation, key=lambda record: record["validation_loss"])
        found["Validation loss"] = (f"{best['validation_loss']:.3f}", f"best, step {best['step']:,}")
    if tokens := values(run, "tokens_seen"):
        found["Tokens"] = (short(tokens[-1]), "seen")
    if rates := values(run, "tokens_per_second"):
        found["Throughput"] = (short(_median(rates)), "tokens/s, median")
    if times := values(run, "step_time"):
        found["Step"] = (f"{short(1000 * _median(times))} ms", "median")
    if waits := values(run, "data_wait"):
        found["Data wait"] = (f"{sum(waits) / max(sum(times), 1e-9):.1%}", "of the time")
    if shares := values(run, "mfu"):
        found["Use of the device"] = (f"{_median(shares):.1%}", "of its peak, median")
    if memory := values(run, "peak_memory_bytes"):
        found["Memory"] = (f"{max(memory) / 1e9:.2f} GB", "peak")
    if loads := run.records[-1].get("expert_load"):
        dead = sum(len(rows) - int(np.count_nonzero(rows)) for rows in loads.values())
        found["Idle experts"] = (f"{dead}", f"of {sum(map(len, loads.values()))}, last step")
    if (dropped := _dropped_rows(run)) is not None:
        found["Dropped rows"] = (short(dropped), "beyond the capacity of experts")
    return found


def _median(known: list[float]) -> float:
    return sorted(known)[len(known) // 2]


def _dropped_rows(run: Run) -> float | None:
    """The total over all layers and records; None if no layer has a fixed capacity."""
    by_layer = [record["capacity"] for record in run.records if isinstance(record.get("capacity"), dict)]
    layers: list[Record] = [layer for layers in by_layer for layer in layers.values() if isinstance(layer, dict)]
    found = [layer["dropped_rows"] for layer in layers if isinstance(layer.get("dropped_rows"), int | float)]
    return sum(found) if found else None


def short(value: float) -> str:
    """Format with three digits and a unit: 1.23M."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
