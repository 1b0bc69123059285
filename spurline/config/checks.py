"""Checks that sections share."""

import dataclasses
import math
from typing import Any


def at_least(section: Any, **least: float) -> list[str]:
    """Errors for the options of a section that are below their minimum."""
    return [
        f"{name} must be at least {low}, got {getattr(section, name)}"
        for name, low in least.items()
        if getattr(section, name) < low
    ]


def seed_problems(section: Any) -> list[str]:
    """The error for a seed that torch might not take: below 2**64, after the number of a sample was added."""
    if -(2**63) <= section.seed < 2**63:
        return []
    return [f"seed must be between -2**63 and 2**63 - 1, got {section.seed}"]


def not_finite(section: Any) -> list[str]:
    """Errors for floats, at any depth, that are NaN or infinite: NaN would pass a range check."""
    found: list[str] = []
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        if dataclasses.is_dataclass(value):
            found += [f"{f.name}.{problem}" for problem in not_finite(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            found.append(f"{f.name} must be a finite number, got {value}")
    return found
