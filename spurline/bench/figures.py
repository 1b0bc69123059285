"""Benchmark results, and the targets they are checked against. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    part: str
    """Suite: layers, bf16, memory, sweep, dispatchers, ranks, step."""
    case: str
    what: str
    """forward, forward+backward, saved, ..."""
    candidate: str
    value: float
    unit: str
    threads: int = 1
    spread: float | None = None
    """Interquartile range of the repetitions, as a fraction of the median."""
    to_floor: float | None = None
    to_best_peer: float | None = None
    """Ratio of this value to the best peer's."""

    @property
    def place(self) -> str:
        """Suite, case, quantity and thread count, as text."""
        return f"{self.part} {self.case}, {self.what}, {self.threads} thread{'s' if self.threads > 1 else ''}"

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Target:
    """Upper bounds for Spurline's ratio to the floor and to the best peer."""

    part: str
    what: str
    cases: tuple[str, ...]
    to_floor: float | None = None
    to_best_peer: float | None = None


# Layer results are for the layer alone, with the memory allocator's default settings.
TARGETS = (
    Target("layers", "forward", ("medium", "medium_zipf", "medium_one_hot"), to_floor=1.06, to_best_peer=1.0),
    Target("layers", "forward+backward", ("medium", "medium_zipf", "medium_one_hot"), to_floor=1.08, to_best_peer=0.8),
    Target("layers", "forward", ("small",), to_floor=1.10, to_best_peer=1.0),
    Target("layers", "forward+backward", ("small",), to_floor=1.06, to_best_peer=1.0),
    Target("layers", "forward", ("decode",), to_best_peer=1.0),
    Target("layers", "forward+backward", ("decode",), to_floor=1.1, to_best_peer=1.0),
    Target("bf16", "forward", ("small", "medium"), to_best_peer=0.25),
    Target("bf16", "forward+backward", ("small", "medium"), to_best_peer=0.25),
    Target("bf16", "error", ("small", "medium"), to_best_peer=1.0),
    Target("memory", "saved for backward", ("medium",), to_best_peer=0.3),
    Target("memory", "forward workspace", ("medium",), to_best_peer=0.15),
    Target("memory", "training workspace", ("medium",), to_best_peer=0.6),
    Target("step", "seconds", ("deepseek_v3_debugmodel", "qwen3_debugmodel_moe"), to_best_peer=1 / 1.3),
    Target("step", "peak memory", ("deepseek_v3_debugmodel", "qwen3_debugmodel_moe"), to_best_peer=0.7),
)


def missed_targets(figures: Iterable[Figure], targets: Sequence[Target] = TARGETS) -> list[str]:
    """One line per target that a result of ours misses."""
    found = []
    for figure in figures:
        if figure.candidate != "spurline":
            continue
        for target in targets:
            if (target.part, target.what) != (figure.part, figure.what) or figure.case not in target.cases:
                continue
            for name, limit in (("to_floor", target.to_floor), ("to_best_peer", target.to_best_peer)):
                ratio = getattr(figure, name)
                if limit is not None and ratio is not None and ratio > limit:
                    against = "the floor" if name == "to_floor" else "the best peer"
                    found.append(f"{figure.place}: {ratio:.3f} x {against}, target {limit:.3g}")
    return found
