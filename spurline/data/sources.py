"""Where text comes from: documents in an order that depends on their names alone. Free of torch."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from spurline.config import Data
from spurline.data.formats import Advance, Document, read_file
from spurline.data.hf_datasets import dataset_problems, is_dataset, num_rows, read_dataset
from spurline.data.prepared_index import is_prepared, load_index

# Folders that are no part of the library's own code, and files that differ between two builds of one Python version.
_NOT_STDLIB = (
    *("site-packages", "dist-packages", "__pycache__", "_bundled", "test", "tests", "idlelib", "lib2to3"),
    *("config-*", "_sysconfigdata*", "sitecustomize.py", "usercustomize.py"),
)


def stable_hash(purpose: str, name: str) -> bytes:
    """The same on every machine and in every process; hashes for two purposes are independent of each other."""
    return hashlib.sha256(f"{purpose}\0{name}".encode("utf-8", "surrogatepass")).digest()


def each_path(data: Data) -> list[Data]:
    """The options for each of the paths that are given with commas between; a path that exists as it is, is one."""
    if os.path.exists(os.path.expanduser(data.path)):
        return [data]
    paths = [path.strip() for path in data.path.split(",")]
    if len(paths) > 1 and not all(paths):
        raise ValueError(f"data.path {data.path!r}: there is nothing between two commas, or before or after one")
    return [replace(data, path=path) for path in paths]


def read_documents(data: Data, advance: Advance = lambda amount: None) -> Iterator[Document]:
    """Every document of one path that has text: files in the order of a hash of their name, so that subjects mix.

    Large text comes in pieces. `advance` is told how much of `source_size` has been read since it was last called.
    """
    has_text = False
    for document in _read(data, advance):
        has_text = True
        yield document
    if not has_text:
        raise ValueError(f"data.path {_root(data)!r} has no text: everything that is read there is empty")


def _read(data: Data, advance: Advance) -> Iterator[Document]:
    root = _root(data)
    if is_dataset(root):
        yield from read_dataset(root, data.text_field, advance)
        return
    for name, path in sorted(_find_files(data), key=lambda file: stable_hash("order", file[0])):
        yield from read_file(path, name, data.text_field, advance)


def source_size(data: Data) -> int | None:
    """How much there is to read: bytes of files, or rows of a data set if their number is known."""
    root = _root(data)
    if is_dataset(root):
        return num_rows(root)
    return sum(os.path.getsize(path) for _, path in _find_files(data) if os.path.exists(path))


def check_data(data: Data) -> list[str]:
    """What is wrong with the data options as far as it shows without reading the text; empty when nothing is."""
    try:
        paths = each_path(data)
    except ValueError as problem:
        return [str(problem)]
    problems = [problem for one in paths for problem in _path_problems(one)]
    if data.shares and len(data.shares) != len(paths):
        problems.append(f"data.weights has {len(data.shares)} numbers, and data.path names {len(paths)}")
    if data.tokenizer and not os.path.exists(os.path.expanduser(data.tokenizer)):
        problems.append(f"data.tokenizer {data.tokenizer!r} does not exist or can't be reached")
    return problems


def _path_problems(data: Data) -> list[str]:
    root = _root(data)
    if is_dataset(root):
        return dataset_problems(root)
    try:
        if is_prepared(root):
            load_index(root)
            return []
        _, path = next(_find_files(data))
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        return [f"data.path: can't read {path!r}: {error.strerror}"]
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
