"""Lossless conversion between a run's config and JSON; config files that people write. Torch-free."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spurline.config import RunConfig
from spurline.files import write_file
from spurline.models import family_configs, family_names
from spurline.spelling import did_you_mean
from spurline.typed_json import convert, shown
from spurline.untrusted import read_json, read_yaml, reason


class ConfigError(ValueError):
    """All validation errors of a configuration, one line each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


ENVIRONMENT = "environment"
"""The entry of `config.json` about where the run was started; it is not read back into a config."""


def to_json(
    module: str, config_name: str, run_config: RunConfig[Any], environment: Mapping[str, Any] | None = None
) -> str:
    """The content of `config.json`: family and preset names, then every section with all its values."""
    about = {ENVIRONMENT: dict(environment)} if environment else {}
    content = {"module": module, "config": config_name, **about, **dataclasses.asdict(run_config)}
    return json.dumps(content, indent=2) + "\n"


def save(
    path: str | Path,
    module: str,
    config_name: str,
    run_config: RunConfig[Any],
    environment: Mapping[str, Any] | None = None,
) -> None:
    write_file(path, to_json(module, config_name, run_config, environment))


def load(
    path: str | Path, *, may_be_partial: bool = False, default_module: str = "", default_config: str = ""
) -> tuple[str, str, RunConfig[Any]]:
    """Read what `save` wrote: (module, config name, config). Raises a ConfigError with every invalid entry.

    In a partial file, which may be YAML, omitted options have the preset's values; it may leave the preset to
    --config and --module, which are the defaults here.
    """
    content = _read(path, is_yaml=may_be_partial and str(path).endswith((".yaml", ".yml")))
    if not isinstance(content, dict):
        raise ConfigError([f"{path}: a config file must be an object of sections, got {shown(content)}"])
    module, config_name = content.pop("module", ""), content.pop("config", "")
    if not module and "architectures" in content:
        raise ConfigError([f"{path} is of a Hugging Face model: `spurline convert from-hf` makes a run folder of it"])
    content.pop(ENVIRONMENT, None)
    from_command = may_be_partial and not config_name and bool(default_config)
    if from_command:
        module, config_name = module or default_module, default_config
    if may_be_partial:
        module = module or family_of(config_name) or default_module
    problems = preset_problems(module, config_name, prefix="--" * from_command)
    if problems and from_command:
        raise ConfigError(problems)
    if not problems:
        preset = family_configs(module)[config_name]()
        if may_be_partial:
            content = _merged(json.loads(json.dumps(dataclasses.asdict(preset))), content)
        run_config = convert(RunConfig[type(preset.model)], content, "", problems)  # type: ignore[misc]
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return module, config_name, run_config


def is_of_a_run(path: str | Path) -> bool:
    """Whether `save` has written the file; its options need not be valid for this version."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and {"module", "config", "job", "training"} <= content.keys()


def load_environment(path: str | Path) -> dict[str, Any]:
    """Where a run was started, as `save` wrote it; empty if its config.json does not say."""
    content = _read(path, is_yaml=False)
    environment = content.get(ENVIRONMENT) if isinstance(content, dict) else None
    return environment if isinstance(environment, dict) else {}


def family_of(config_name: Any) -> str:
    """The family that has this preset, if it is the only one; else ""."""
    owners = [
        family for family in family_names() if isinstance(config_name, str) and config_name in family_configs(family)
    ]
    return owners[0] if len(owners) == 1 else ""


def preset_names() -> list[str]:
    """The presets of all families."""
    return sorted(name for family in family_names() for name in family_configs(family))


def preset_problems(module: Any, config_name: Any, prefix: str = "") -> list[str]:
    """Why there is no such preset, with the available ones; empty if it exists."""
    if not module:
        if not config_name:
            return [f"{prefix}config is missing: `spurline configs` lists the presets"]
        if config_name not in (names := preset_names()):
            known = did_you_mean(str(config_name), names)
            return [f"{prefix}config: there is no preset {config_name!r}{known} `spurline configs` lists them"]
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


def _merged(defaults: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    """The defaults overridden by `content`, at any depth."""
    both = {
        name: _merged(value, content[name])
        for name, value in defaults.items()
        if isinstance(value, dict) and isinstance(content.get(name), dict)
    }
    return defaults | content | both


def _read(path: str | Path, is_yaml: bool) -> Any:
    try:
        return read_yaml(path) if is_yaml else read_json(path)
    except OSError as error:
        raise ConfigError([f"{path}: can't read the config file: {reason(error)}"]) from None
    except ValueError as error:
        raise ConfigError([f"{path}: {error}"]) from None
