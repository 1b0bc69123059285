"""Where text comes from: documents in an order that depends on their names alone. Free of torch."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from spurline.config import Data

# Folders that are no part of the library's own code, and files that differ between two builds of one Python version.
_NOT_STDLIB = (
    *("site-packages", "dist-packages", "__pycache__", "_bundled", "test", "tests", "idlelib", "lib2to3"),
    *("config-*", "_sysconfigdata*", "sitecustomize.py", "usercustomize.py"),
)


@dataclass(frozen=True)
class Document:
    name: str
    """Path within the data set, with forward slashes: it decides the place in the order and the side of the split."""
    text: str


def stable_hash(purpose: str, name: str) -> bytes:
    """The same on every machine and in every process; hashes for two purposes are independent of each other."""
    return hashlib.sha256(f"{purpose}\0{name}".encode("utf-8", "surrogatepass")).digest()


def read_documents(data: Data) -> Iterator[Document]:
    """Every document that has text, in the order of a hash of its name, so that neighbours mix subjects."""
    files = sorted(_find_files(data), key=lambda file: stable_hash("order", file[0]))
    has_text = False
    for name, path in files:
        if text := _decode(_read(path), path):
            has_text = True
            yield Document(name, text)
    if not has_text:
        raise ValueError(f"data.path {_root(data)!r} has no text: every file that is read there is empty")


def check_data(data: Data) -> list[str]:
    """What is wrong with the data options as far as it shows without reading the text; empty when nothing is."""
    try:
        _, path = next(_find_files(data))
        _read(path, num_bytes=1)
    except ValueError as problem:
        return [str(problem)]
    return []


def _root(data: Data) -> str:
    return os.path.expanduser(data.path) if data.path else sysconfig.get_path("stdlib")


def _find_files(data: Data) -> Iterator[tuple[str, str]]:
    """Name and path of each file of the data set, at least one, in the file system's order."""
    root = _root(data)
    if os.path.isfile(root):
        yield os.path.basename(root), root
        return
    if not os.path.exists(root):
        raise ValueError(f"data.path {root!r} does not exist or can't be reached")
    if not os.path.isdir(root):
        raise ValueError(f"data.path {root!r} is neither a file nor a folder")
    pattern, skipped = (data.pattern, ()) if data.path else ("*.py", _NOT_STDLIB)
    found = False
    for name, path in _walk(root, skipped):
        if _matches(name.split("/"), pattern.split("/")):
            found = True
            yield name, path
    if not found and not data.path:
        raise ValueError(f"data.path is needed: this Python has no standard library source in {root!r}")
    if not found:
        raise ValueError(f"data.pattern {pattern!r} matches no file in data.path {root!r} (hidden files are not read)")


def _walk(root: str, skipped: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Relative name and path of every visible file below `root`."""

    def wanted(name: str) -> bool:
        return not name.startswith(".") and not any(fnmatchcase(name, pattern) for pattern in skipped)

    def refuse(error: OSError) -> None:
        raise ValueError(f"data.path: can't read folder {error.filename!r}: {error.strerror}")

    for folder, folder_names, file_names in os.walk(root, onerror=refuse):
        folder_names[:] = filter(wanted, folder_names)
        for file_name in filter(wanted, file_names):
            path = os.path.join(folder, file_name)
            # A dangling link stays: reading it tells the user, where leaving it out would train on less than was given.
            if os.path.isfile(path) or not os.path.exists(path):
                yield os.path.relpath(path, root).replace(os.sep, "/"), path


def _matches(parts: list[str], pattern: list[str]) -> bool:
    """Whether the last parts of a path match a pattern, in which `**` stands for any number of folders."""
    if not pattern:
        return True
    if pattern[-1] == "**":
        return any(_matches(parts[:end], pattern[:-1]) for end in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[-1], pattern[-1]) and _matches(parts[:-1], pattern[:-1])


def _read(path: str, num_bytes: int = -1) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(num_bytes)
    except OSError as error:
        raise ValueError(f"data.path: can't read {path!r}: {error.strerror}") from None


def _decode(content: bytes, path: str) -> str:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        what, offset = f"byte 0x{content[error.start]:02x}", error.start
    else:
        what, offset = "a NUL byte", content.find(0)
        if offset < 0:
            return text
    raise ValueError(
        f"data.path: {path!r} is not UTF-8 text ({what} at offset {offset}): convert it or,"
        " in a folder, leave it out with data.pattern (such as *.md)"
    )
