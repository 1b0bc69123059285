"""Read untrusted files: whatever they contain, the result is their content or a ValueError.

Only regular files are opened (a pipe would block, a device has no end), sizes and depths have limits, and every
message is one line. Torch-free.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import IO, Any

from spurline.remote import RemotePath

MAX_JSON_BYTES = 2**30
MAX_YAML_BYTES = 2**20
MAX_LINE_BYTES = 2**26
MAX_DEPTH = 64


@contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a regular file for reading; an OSError for anything else."""
    if isinstance(path, RemotePath):
        with path.open() as remote:
            yield remote
        return
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(0, "not a regular file", str(path))
    with open(path, "rb") as file:
        yield file


def read_bytes(path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The content of a file; an OSError if it can't be read, a ValueError if it is larger than `max_bytes`."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes:,} bytes")
    return content


def read_json(path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The value in a JSON file; an OSError if it can't be read, a ValueError (without the path) if it is not JSON."""
    return parse_json(read_bytes(path, max_bytes))


def read_yaml(path: str | os.PathLike[str], max_bytes: int = MAX_YAML_BYTES) -> Any:
    """The plain data in a YAML file; an OSError if it can't be read, a ValueError (without the path) if it is not YAML.

    Aliases are refused: a few lines of them can expand to gigabytes.
    """
    import yaml

    text = read_bytes(path, max_bytes)
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise ValueError("not a YAML file that is read here: it has aliases (*name)")
        value = yaml.load(text, _yaml_loader())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"not YAML: {error.problem or error.context}{where}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ValueError("not YAML: the file is not text") from None
    except RecursionError:
        raise ValueError("not YAML: nested too deeply") from None
    # Accept only what JSON can represent (no dates, for example), with the same limits as for JSON.
    try:
        return parse_json(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        raise ValueError("not YAML that is read here: values must be those of JSON, such as numbers and text") from None


@cache
def _yaml_loader() -> Any:
    """PyYAML's safe loader, which follows YAML 1.1, with numbers as 1e-3 that are text there and not in YAML 1.2."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return Loader


def parse_json(text: str | bytes) -> Any:
    """The value of JSON text; a one-line ValueError if it is invalid or nested too deeply."""
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(decoded)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except UnicodeDecodeError:
        raise ValueError("not JSON: the file is not UTF-8 text") from None
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    except ValueError:  # Python refuses to convert numbers of thousands of digits
        raise ValueError("not JSON: a number has too many digits") from None
    # With few brackets, it can't be nested too deeply.
    if decoded.count("[") + decoded.count("{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise ValueError("not JSON: nested too deeply")
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_is_deeper(item, depth - 1) for item in inner if isinstance(item, dict | list))


def lines(file: IO[bytes], max_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """The lines of a file with their line endings; a ValueError (without the path) for one that is too long."""
    number = 0
    while line := file.readline(max_bytes + 1):
        number += 1
        if len(line) > max_bytes:
            raise ValueError(f"line {number} is longer than {max_bytes:,} bytes")
        yield line


def is_plain_name(name: object) -> bool:
    """Whether this is the name of a file in the same folder: no path, no parent folder, only printable characters."""
    return isinstance(name, str) and name not in ("", ".", "..") and name.isprintable() and not set(name) & {"/", "\\"}


def printable(text: str, max_chars: int) -> str:
    """The text in one line of a terminal: without control characters and surrogates, and cut off if it is longer."""
    shown = "".join(letter if letter.isprintable() else "·" for letter in text[:max_chars])
    return shown if len(text) <= max_chars else f"{shown[:-3]}..."


def reason(error: OSError) -> str:
    """Why a file could not be read, in a few words."""
    return error.strerror or str(error)
