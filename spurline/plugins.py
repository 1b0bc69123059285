"""What users add to Spurline without changing it: packages that register parts of their own by name. Free of torch."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

T = TypeVar("T")

GROUP = "spurline.plugins"
"""The entry points of installed packages that are loaded: each names a module, or a function to call."""

_loaded: set[tuple[str, str]] = set()  # entry points by name and value, so that none is called twice


def register(kind: str, known: dict[str, T], name: str, value: T) -> None:
    """Add what `name` stands for to the known ones; a ValueError if it already stands for something else."""
    if known.setdefault(name, value) != value:
        raise ValueError(f"{kind} {name!r} is registered already, as {_origin(known[name])}: choose another name")


def unknown(kind: str, name: str, known: Collection[str]) -> list[str]:
    """Why `name` can't be used, in a line with what is spelled alike; empty if it is among the known ones."""
    if name in known:
        return []
    near = get_close_matches(name, known, n=1)
    hint = f". Did you mean {near[0]!r}?" if near else ";"
    return [f"{kind} {name!r} is not known{hint} There are: {', '.join(sorted(known))} (--import loads your own)"]


def resolve(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    """What `name` stands for; one that was registered as "module:attribute" is imported now."""
    if problems := unknown(kind, name, known):
        raise ValueError(problems[0])
    value = known[name]
    if not isinstance(value, str):
        return value
    module, _, attribute = value.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:
        raise ValueError(f"{kind} {name!r}: {_told(error)}") from error


def load_plugins(package: str = "") -> list[str]:
    """Load the installed plug-ins, then a package, which may lie in the working directory; returns what went wrong."""
    problems = []
    for entry in entry_points(group=GROUP):
        if (entry.name, entry.value) not in _loaded:
            found = _load(partial(_run_entry_point, entry), _who(entry))
            if not found:
                _loaded.add((entry.name, entry.value))
            problems += found
    if package:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        problems += _load(partial(import_module, package), f"--import {package}")
    return problems


def _load(load: Callable[[], Any], who: str) -> list[str]:
    from spurline.models import family_configs, family_names

    families = set(family_names())
    try:
        load()
    except Exception as error:
        return [f"{who}: {_told(error)}"]
    problems = []
    for family in sorted(set(family_names()) - families):
        try:
            family_configs(family)
        except Exception as error:
            problems.append(f"{who}: model family {family!r}: {_told(error)}")
    return problems


def _run_entry_point(entry: EntryPoint) -> None:
    loaded = entry.load()
    if callable(loaded):
        loaded()


def _who(entry: EntryPoint) -> str:
    package = f" of the package {entry.dist.name} {entry.dist.version}" if entry.dist else ""
    return f"plug-in {entry.name}{package}"


def _told(error: Exception) -> str:
    """An error of a user's code in one line: what it says, and where, unless that is clear or Spurline says it."""
    lines = str(error).splitlines()
    message = lines[0] if lines else ""
    trace = traceback.extract_tb(error.__traceback__)
    raised_here = bool(trace) and trace[-1].filename == __file__
    if isinstance(error, ImportError) or raised_here:
        return message
    if isinstance(error, SyntaxError):
        return f"{error.msg} ({error.filename}, line {error.lineno})"
    return f"{type(error).__name__}: {message} ({trace[-1].filename}, line {trace[-1].lineno})"


def _origin(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, partial):
        value = value.func
    return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', type(value).__name__)}"
