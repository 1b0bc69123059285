"""Fast-path counters: which path ran, how often, with how much padding.

Off by default and then free: a counted method is wrapped when counters are switched on, and untouched before.
SPURLINE_COUNTERS=1 (or true, yes, on, rank0) switches them on for rank 0, `0,3` or `rank3` for the ranks named, `all`
for every rank; `0`, `false`, `no` and `off` leave them off. Each rank prints one sorted line at exit. From Python:
`enable`, `counters`, `reset`.
"""

import atexit
import functools
import os
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
Paths = str | Callable[..., list[str] | dict[str, int]]

_on = False
_counts: dict[str, int] = {}
_counted: dict[str, tuple[Callable[..., Any], Paths]] = {}


def counted(paths: Paths) -> Callable[[F], F]:
    """Count the calls of a method under a name, or under names that a function of its arguments returns.

    That function returns a list of names, or a dict of names and amounts.
    """

    def note(method: F) -> F:
        _counted[f"{method.__module__}:{method.__qualname__}"] = method, paths
        return _counting(method, paths) if _on else method  # type: ignore[return-value]

    return note


def _counting(method: Callable[..., Any], paths: Paths) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            found = [paths] if isinstance(paths, str) else paths(*args, **kwargs)
            for path in found:
                _counts[path] = _counts.get(path, 0) + (found[path] if isinstance(found, dict) else 1)
        return method(*args, **kwargs)

    return wrapper


def enable(on: bool = True) -> None:
    """Switch the counters on or off for this process."""
    global _on
    _on = on
    for address, (method, paths) in _counted.items():
        module, _, qualname = address.partition(":")
        owner, _, name = qualname.rpartition(".")
        cls: Any = functools.reduce(getattr, owner.split("."), sys.modules[module])
        wrapped = _counting(method, paths) if on else method
        is_static = isinstance(cls.__dict__[name], staticmethod)
        setattr(cls, name, staticmethod(wrapped) if is_static else wrapped)


def counters() -> dict[str, int]:
    """The counts since the last reset, sorted by name."""
    return dict(sorted(_counts.items()))


def reset() -> None:
    _counts.clear()


def ranks_that_count(wanted: str) -> Callable[[int], bool] | None:
    """A predicate for the ranks that a value of SPURLINE_COUNTERS selects; None for an invalid value."""
    wanted = wanted.strip().lower()
    if wanted in ("", "0", "false", "no", "off"):
        return lambda rank: False
    if wanted in ("1", "true", "yes", "on"):
        return lambda rank: rank == 0
    if wanted == "all":
        return lambda rank: True
    parts = [part.strip().removeprefix("rank") for part in wanted.split(",")]
    if not all(re.fullmatch(r"\d+", part) for part in parts):
        return None
    return {int(part) for part in parts}.__contains__


def _enable_from_environment() -> None:
    value = os.environ.get("SPURLINE_COUNTERS", "")
    counts = ranks_that_count(value)
    if counts is None:
        print(
            f"spurline: SPURLINE_COUNTERS={value!r} is not understood, so counters stay off: use 1 for rank 0, all, or"
            " ranks such as 0,3",
            file=sys.stderr,
        )
    elif counts(rank := int(os.environ.get("RANK", "0"))):
        enable()
        atexit.register(_print_line, rank)


def _print_line(rank: int) -> None:
    line = " ".join(f"{path}={amount}" for path, amount in counters().items()) or "empty"
    print(f"spurline counters rank {rank}: {line}", file=sys.stderr, flush=True)


_enable_from_environment()
