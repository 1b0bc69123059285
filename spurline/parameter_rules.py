"""Patterns of parameter names, and rules that set optimizer options for the parameters they match. Torch-free.

A rule is text, so that it reads the same on a command line and in config.json: a pattern, then options.

    *.experts.* optimizer=muon lr_factor=0.5
    embedding.*|output.* weight_decay=0
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from spurline.spelling import nearest, several_nearest

OPTIMIZERS = ("adamw", "muon")
ONLY_FOR = {"beta1": "adamw", "beta2": "adamw", "eps": "adamw", "momentum": "muon"}
"""Options that only one optimizer has."""
_BELOW_ONE = ("beta1", "beta2", "momentum")
_NUMBERS = ("lr_factor", "weight_decay", *ONLY_FOR)
_EXAMPLE = "a rule is a pattern and its options, such as '*.experts.* lr_factor=0.5'"


@dataclass(frozen=True)
class ParameterRule:
    """A parsed rule; options that it doesn't set are None, and keep their values from the optimizer section."""

    text: str
    pattern: str
    optimizer: str | None = None
    lr_factor: float | None = None
    weight_decay: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    momentum: float | None = None

    @classmethod
    def parse(cls, text: str) -> ParameterRule:
        """Parse the text of a rule; a ValueError describes what is wrong with it in a phrase."""
        words = text.split()
        if len(words) < 2 or "=" in words[0]:
            raise ValueError(_EXAMPLE)
        options: dict[str, str] = {}
        for word in words[1:]:
            name, equals, value = word.partition("=")
            if not (name and equals and value):
                raise ValueError(f"{word!r} is not OPTION=VALUE")
            if name in options:
                raise ValueError(f"{name} is given twice")
            options[name] = value
        optimizer = options.pop("optimizer", None)
        if optimizer is not None and optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
        numbers = {name: _number(name, value) for name, value in options.items()}
        for name in numbers:
            if optimizer is not None and ONLY_FOR.get(name, optimizer) != optimizer:
                raise ValueError(f"{name} is an option of {ONLY_FOR[name]}, not of {optimizer}")
        return cls(text, words[0], optimizer, **numbers)

    def matches(self, name: str) -> bool:
        return matches(self.pattern, name)


def matches(pattern: str, name: str) -> bool:
    """Whether one of the alternatives matches the full name; `*` matches any characters, including dots."""
    return any(fnmatchcase(name, alternative) for alternative in pattern.split("|"))


def names_near(pattern: str, names: Iterable[str]) -> str:
    """The end of a 'matches nothing' error: the names that are nearest to a pattern."""
    near = several_nearest(pattern, names, 3, cutoff=0.0)
    return f"; names look like {', '.join(near)}" if near else ""


def rule_problem(text: str) -> str | None:
    """What is wrong with the text of a rule, if anything."""
    try:
        ParameterRule.parse(text)
    except ValueError as error:
        return str(error)
    return None


def _number(name: str, value: str) -> float:
    if name not in _NUMBERS:
        near = nearest(name, ["optimizer", *_NUMBERS])
        hint = f"did you mean {near}?" if near else f"there are optimizer, {', '.join(_NUMBERS)}"
        raise ValueError(f"there is no option {name!r}: {hint}")
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    if not math.isfinite(number) or number < 0 or (name in _BELOW_ONE and number >= 1):
        allowed = "in [0, 1)" if name in _BELOW_ONE else "finite and at least 0"
        raise ValueError(f"{name} must be {allowed}, got {value}")
    return number
