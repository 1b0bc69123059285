"""Registries of components by name, built-in or registered by users. Torch-free.

A component is the object itself, or a string "module:attribute" that is imported on first use.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from spurline.spelling import did_you_mean

T = TypeVar("T")


def register(kind: str, known: dict[str, T], name: str, value: T) -> None:
    """Add `name` to the registry `known`; raises a ValueError if it is registered with another value."""
    if known.setdefault(name, value) != value:
        raise ValueError(f"{kind} {name!r} is already registered as {_origin(known[name])}: choose another name")


def unknown(kind: str, name: str, known: Collection[str]) -> list[str]:
    """An error that suggests the closest known name; empty if `name` is known."""
    if name in known:
        return []
    hint = did_you_mean(name, known)
    return [f"{kind} {name!r} is not known{hint} Choose from: {', '.join(sorted(known))} (--import loads your own)"]


def resolve(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    """The component registered as `name`; a "module:attribute" string is imported."""
    if problems := unknown(kind, name, known):
        raise ValueError(problems[0])
    value = known[name]
    if not isinstance(value, str):
        return value
    module, _, attribute = value.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:
        raise ValueError(f"{kind} {name!r}: {error_in_one_line(error)}") from error


def error_in_one_line(error: Exception) -> str:
    """Format an exception from user code as one line, with file and line unless it is an ImportError or our own."""
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
