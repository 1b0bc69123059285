"""Turn JSON values into dataclasses, and list everything in them that has the wrong type. Torch-free."""

from __future__ import annotations

import dataclasses
import json
import types
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from spurline.spelling import did_you_mean

T = TypeVar("T")
ADDED_LATER = {"added later": True}
"""Metadata of a field that files of earlier versions do not have; they mean its default."""


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def long_name(value: Any, choices: tuple[Any, ...]) -> Any:
    """The choice that `value` is short for (bf16: bfloat16), or `value`."""
    long = _SHORT.get(value) if isinstance(value, str) else None
    return long if long in choices else value


def from_json(cls: type[T], value: Any) -> T:
    """`value`, a parsed JSON object, as the dataclass `cls`; a ValueError names the first entry that is wrong."""
    problems: list[str] = []
    converted = convert(cls, value, "", problems)
    if problems:
        raise ValueError(problems[0])
    return converted


def flattened(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"training": {"seed": 0}} -> {"training.seed": 0}."""
    flat: dict[str, Any] = {}
    for name, value in section.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


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


def convert(hint: Any, value: Any, where: str, problems: list[str]) -> Any:
    """Convert the JSON `value` to type `hint`; type errors are appended to `problems` under the dotted name `where`."""
    origin, parts = get_origin(hint), get_args(hint)
    if isinstance(value, dict) and dataclasses.is_dataclass(origin or hint):
        return _convert_dataclass(origin or hint, parts, value, where, problems)
    if _is_union(hint):
        for part in parts:
            trouble: list[str] = []
            converted = convert(part, value, where, trouble)
            if not trouble:
                return converted
    elif origin is Literal:
        value = long_name(value, parts)
        if any(value == choice and type(value) is type(choice) for choice in parts):
            return value
    elif origin in (list, tuple) and isinstance(value, list):
        hints = parts if origin is tuple and Ellipsis not in parts else parts[:1] * len(value)
        if len(hints) == len(value):
            return origin(
                convert(part, item, f"{where}[{i}]", problems)
                for i, (part, item) in enumerate(zip(hints, value, strict=True))
            )
    elif hint is Any or (origin is dict and isinstance(value, dict)):
        return value
    elif hint is float and type(value) is int and abs(value) < 2**63:
        return float(value)
    elif hint is int and type(value) is int and not -(2**63) <= value < 2**63:
        problems.append(f"{where or 'the content'}: {shown(value)} does not fit into 64 bits")
        return None
    elif type(value) is hint:  # not isinstance, which accepts True as an int
        return value
    problems.append(f"{where or 'the content'}: {shown(value)} is not {expected(hint, none='null')}")
    return None


def _convert_dataclass(
    cls: Any, type_arguments: tuple[Any, ...], content: dict[str, Any], where: str, problems: list[str]
) -> Any:
    names = [f.name for f in dataclasses.fields(cls)]
    added_later = {f.name for f in dataclasses.fields(cls) if "added later" in f.metadata}
    prefix = f"{where}." if where else ""
    for name in content:
        if name not in names:
            known = did_you_mean(name, names, prefix)
            problems.append(f"{prefix}{name if name.isprintable() else shown(name)}: no such option{known}")
    hints = _hints(cls)
    meaning_of = dict(zip(getattr(cls, "__parameters__", ()), type_arguments, strict=True))
    values = {}
    for name in names:
        if name in content:
            hint = meaning_of.get(hints[name], hints[name])
            values[name] = convert(hint, content[name], prefix + name, problems)
        elif name not in added_later:
            problems.append(f"{prefix}{name} is missing")
    return None if problems else cls(**values)


_hints = cache(get_type_hints)


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def shown(value: Any) -> str:
    """`value` as JSON, truncated to 40 characters."""
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
