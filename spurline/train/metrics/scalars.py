"""The numbers of a record, for writers that take one number at a time. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in a record except its step, each under its path: ("routing/layers.1.moe/load", 1.2)."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and prefix + key != "step":
            yield prefix + key, value
