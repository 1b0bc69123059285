"""Suggestions for misspelled names. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """The choice most similar to `name`, or "" if none is (cutoff 0: any is similar enough, 1: only the same)."""
    return next(iter(several_nearest(name, choices, 1, cutoff)), "")


def several_nearest(name: str, choices: Iterable[str], number: int, cutoff: float = 0.6) -> list[str]:
    """At most `number` choices that are similar to `name`, the most similar first."""
    return get_close_matches(name, list(choices), number, cutoff)


def did_you_mean(name: str, choices: Iterable[str], prefix: str = "") -> str:
    """The end of a sentence with the nearest choice, ". Did you mean x?", or a period if none is near."""
    near = nearest(name, choices)
    return f". Did you mean {prefix}{near}?" if near else "."
