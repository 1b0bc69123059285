"""Plugins: user packages that register components (model families, routers, ...) by name. Torch-free."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from spurline.models import family_configs, family_names, forget_family
from spurline.registry import error_in_one_line

GROUP = "spurline.plugins"
"""Entry point group of plugins; each entry point names a module to import or a function to call."""

_loaded: set[tuple[str, str]] = set()  # (name, value) of entry points, so that none is called twice


def load_plugins(package: str = "") -> list[str]:
    """Load installed plugins, then `package` (the working directory is searched too); returns the errors."""
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
    families = set(family_names())
    try:
        load()
    except Exception as error:
        return [f"{who}: {error_in_one_line(error)}"]
    problems = []
    for family in sorted(set(family_names()) - families):
        try:
            family_configs(family)
        except Exception as error:
            forget_family(family)  # what else is wrong is looked for in all families
            problems.append(f"{who}: model family {family!r}: {error_in_one_line(error)}")
    return problems


def _run_entry_point(entry: EntryPoint) -> None:
    loaded = entry.load()
    if callable(loaded):
        loaded()


def _who(entry: EntryPoint) -> str:
    package = f" of the package {entry.dist.name} {entry.dist.version}" if entry.dist else ""
    return f"plugin {entry.name}{package}"
