"""Mark redundant test cases as slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(kept: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """For `pytest.mark.parametrize`: all values, of which only those in `kept` run in `make test`."""
    kept = list(kept)
    marks = {True: (), False: (pytest.mark.slow,)}
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks[value in kept]) for value in values
    ]
