"""Lossless conversion between a run's config and JSON. Torch-free."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from spurline.config import RunConfig
from spurline.files import write_file
from spurline.models import family_configs, family_names
from spurline.spelling import did_you_mean
from spurline.typed_json import convert, shown
from spurline.untrusted import read_json, reason


class ConfigError(ValueError):
    """All validation errors of a configuration, one line each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def to_json(module: str, config_name: str, run_config: RunConfig[Any]) -> str:
    """The content of `config.json`: family and preset names, then every section with all its values."""
    content = {"module": module, "config": config_name, **dataclasses.asdict(run_config)}
    return json.dumps(content, indent=2) + "\n"


def save(path: str | Path, module: str, config_name: str, run_config: RunConfig[Any]) -> None:
    write_file(path, to_json(module, config_name, run_config))


def load(path: str | Path) -> tuple[str, str, RunConfig[Any]]:
    """Read what `save` wrote: (module, config name, config). Raises a ConfigError with every invalid entry."""
    content = _read_json(path)
    if not isinstance(content, dict):
        raise ConfigError([f"{path}: a config file must be a JSON object of sections, got {shown(content)}"])
    module, config_name = content.pop("module", ""), content.pop("config", "")
    problems = preset_problems(module, config_name)
    if not problems:
        preset = family_configs(module)[config_name]()
        run_config = convert(RunConfig[type(preset.model)], content, "", problems)  # type: ignore[misc]
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return module, config_name, run_config


def preset_problems(module: Any, config_name: Any, prefix: str = "") -> list[str]:
    """Why there is no such preset, with the available ones; empty if it exists."""
    found = not_among(f"{prefix}module", module, family_names())
    if not found:
        found += not_among(f"{prefix}config", config_name, sorted(family_configs(module)))
    elif not config_name:
        found.append(f"{prefix}config is missing: `spurline configs` lists the presets")
    return found


def not_among(name: str, given: Any, choices: list[str]) -> list[str]:
    if given in choices:
        return []
    what = f"{name}: there is no {given!r}{did_you_mean(str(given), choices)}" if given else f"{name} is missing."
    return [f"{what} Choose from: {', '.join(choices)}"]


def _read_json(path: str | Path) -> Any:
    try:
        return read_json(path)
    except OSError as error:
        raise ConfigError([f"{path}: can't read the config file: {reason(error)}"]) from None
    except ValueError as error:
        raise ConfigError([f"{path}: {error}"]) from None
