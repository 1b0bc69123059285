"""Lossless conversion between a run's config and JSON. Torch-free."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from spurline.config import RunConfig
from spurline.files import write_file
from spurline.models import family_configs, family_names
from spurline.spelling import did_you_mean


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
        raise ConfigError([f"{path}: a config file must be a JSON object of sections, got {_shown(content)}"])
    module, config_name = content.pop("module", ""), content.pop("config", "")
    problems = preset_problems(module, config_name)
    if not problems:
        preset = family_configs(module)[config_name]()
        run_config = _convert(RunConfig[type(preset.model)], content, "", problems)  # type: ignore[misc]
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


def expected(hint: Any, none: str = "None") -> str:
    """A type as text for error messages: `an integer`, `one of linear, cosine, sqrt`, `an integer or None`."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if _is_union(hint):
        return " or ".join(expected(part, none) for part in get_args(hint))
    if get_origin(hint) in (list, tuple):
        return "a list"
    if dataclasses.is_dataclass(get_origin(hint) or hint):
        return "a section (JSON object)"
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): none}
    return names.get(hint, str(hint))


def _read_json(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: can't read the config file: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"{path}: not JSON: the file is not UTF-8 text"]) from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError([f"{path}: not JSON: {error.msg} at {where}"]) from None


def _convert(hint: Any, value: Any, where: str, problems: list[str]) -> Any:
    """Convert the JSON `value` to type `hint`; type errors are appended to `problems` under the dotted name `where`."""
    origin, parts = get_origin(hint), get_args(hint)
    if isinstance(value, dict) and dataclasses.is_dataclass(origin or hint):
        return _convert_dataclass(origin or hint, parts, value, where, problems)
    if _is_union(hint):
        for part in parts:
            trouble: list[str] = []
            converted = _convert(part, value, where, trouble)
            if not trouble:
                return converted
    elif origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in parts):
            return value
    elif origin in (list, tuple) and isinstance(value, list):
        hints = parts if origin is tuple and Ellipsis not in parts else parts[:1] * len(value)
        if len(hints) == len(value):
            return origin(
                _convert(part, item, f"{where}[{i}]", problems)
                for i, (part, item) in enumerate(zip(hints, value, strict=True))
            )
    elif hint is float and type(value) is int:
        return float(value)
    elif type(value) is hint:  # not isinstance, which accepts True as an int
        return value
    problems.append(f"{where}: {_shown(value)} is not {expected(hint, none='null')}")
    return None


def _convert_dataclass(
    cls: Any, type_arguments: tuple[Any, ...], content: dict[str, Any], where: str, problems: list[str]
) -> Any:
    names = [f.name for f in dataclasses.fields(cls)]
    prefix = f"{where}." if where else ""
    for name in content:
        if name not in names:
            problems.append(f"{prefix}{name}: no such option{did_you_mean(name, names, prefix)}")
    hints = get_type_hints(cls)
    meaning_of = dict(zip(getattr(cls, "__parameters__", ()), type_arguments, strict=True))
    values = {}
    for name in names:
        if name in content:
            hint = meaning_of.get(hints[name], hints[name])
            values[name] = _convert(hint, content[name], prefix + name, problems)
        else:
            problems.append(f"{prefix}{name} is missing")
    return None if problems else cls(**values)


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _shown(value: Any) -> str:
    """`value` as JSON, truncated to 40 characters."""
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
