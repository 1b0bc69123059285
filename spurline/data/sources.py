"""Text sources: documents in an order that depends only on their names. Torch-free."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from spurline.config import Data
from spurline.data.formats import Advance, Document, read_file
from spurline.data.hf_datasets import dataset_problems, is_dataset, num_rows, read_dataset
from spurline.data.prepared_index import is_prepared, load_index
from spurline.data.shipped import shipped_tokenizers, tokenizer_path
from spurline.remote import url_problems

# Folders that are not library code, and files that differ between builds of the same Python version. encodings has a
# hundred nearly identical tables: a held-out table would be known from the others.
_NOT_STDLIB = (
    *("site-packages", "dist-packages", "__pycache__", "_bundled", "test", "tests", "idlelib", "lib2to3"),
    *("encodings", "pydoc_data"),
    *("config-*", "_sysconfigdata*", "sitecustomize.py", "usercustomize.py"),
)


def stable_hash(purpose: str, name: str) -> bytes:
    """A hash that is the same on every machine; hashes for different purposes are independent."""
    return hashlib.sha256(f"{purpose}\0{name}".encode("utf-8", "surrogatepass")).digest()


def combined_hash(texts: Iterable[str]) -> str:
    """One hash of several texts, in their order."""
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()


def each_path(data: Data) -> list[Data]:
    """Options for each of the comma-separated paths; a path that exists as given is not split."""
    if os.path.exists(os.path.expanduser(data.path)):
        return [data]
    paths = [path.strip() for path in data.path.split(",")]
    if len(paths) > 1 and not all(paths):
        raise ValueError(f"data.path {data.path!r}: empty path between commas")
    return [replace(data, path=path) for path in paths]


def read_documents(data: Data, advance: Advance = lambda amount: None) -> Iterator[Document]:
    """All non-empty documents of one path. Files are ordered by a hash of their name, which mixes topics.

    Large files come in pieces. `advance` gets the amount of `source_size` read since the last call.
    """
    has_text = False
    for document in _read(data, advance):
        has_text = True
        yield document
    if not has_text:
        raise ValueError(f"data.path {root_of(data)!r} has no text: all documents are empty")


def _read(data: Data, advance: Advance) -> Iterator[Document]:
    root = root_of(data)
    if is_dataset(root):
        yield from read_dataset(root, data.text_field, advance)
        return
    for name, path in sorted(find_files(data), key=lambda file: stable_hash("order", file[0])):
        yield from read_file(path, name, data.text_field, advance)


def source_size(data: Data) -> int | None:
    """Size of a source: bytes of its files, or rows of a Hugging Face dataset if known."""
    root = root_of(data)
    if is_dataset(root):
        return num_rows(root)
    return sum(os.path.getsize(path) for _, path in find_files(data) if os.path.exists(path))


def check_data(data: Data) -> list[str]:
    """Errors in the data options that can be found without reading the text."""
    try:
        paths = each_path(data)
    except ValueError as problem:
        return [str(problem)]
    problems = [problem for one in paths for problem in _path_problems(one)]
    if data.shares and len(data.shares) != len(paths):
        problems.append(f"data.weights has {len(data.shares)} numbers, but data.path has {len(paths)} paths")
    if data.tokenizer and not os.path.exists(tokenizer_path(data.tokenizer)):
        problems.append(
            f"data.tokenizer {data.tokenizer!r} does not exist or is not accessible, and is not one that comes with"
            f" Spurline ({', '.join(shipped_tokenizers())})"
        )
    return problems


def _path_problems(data: Data) -> list[str]:
    root = root_of(data)
    if is_dataset(root):
        return dataset_problems(root)
    if remote := url_problems("data.path", root):
        return remote
    try:
        if is_prepared(root):
            load_index(root)
            return []
        _, path = next(find_files(data))
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        return [f"data.path: can't read {path!r}: {error.strerror}"]
    except ValueError as problem:
        return [str(problem)]
    return []


def root_of(data: Data) -> str:
    return os.path.expanduser(data.path) if data.path else sysconfig.get_path("stdlib")


def find_files(data: Data) -> Iterator[tuple[str, str]]:
    """(name, path) of each file of the dataset (at least one), in file system order."""
    root = root_of(data)
    if os.path.isfile(root):
        yield os.path.basename(root), root
        return
    if not os.path.exists(root):
        raise ValueError(f"data.path {root!r} does not exist or is not accessible")
    if not os.path.isdir(root):
        raise ValueError(f"data.path {root!r} is neither a file nor a folder")
    pattern, skipped = (data.pattern, ()) if data.path else ("*.py", _NOT_STDLIB)
    found = False
    for name, path in _walk(root, skipped):
        if _matches(name.split("/"), pattern.split("/")):
            found = True
            yield name, path
    if not found and not data.path:
        raise ValueError(f"data.path is required: this Python has no standard library source in {root!r}")
    if not found:
        raise ValueError(f"data.pattern {pattern!r} matches no file in data.path {root!r} (hidden files are not read)")


def _walk(root: str, skipped: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(relative name, path) of every non-hidden file below `root`."""

    def wanted(name: str) -> bool:
        return not name.startswith(".") and not any(fnmatchcase(name, pattern) for pattern in skipped)

    def refuse(error: OSError) -> None:
        raise ValueError(f"data.path: can't read folder {error.filename!r}: {error.strerror}")

    for folder, folder_names, file_names in os.walk(root, onerror=refuse):
        folder_names[:] = filter(wanted, folder_names)
        for file_name in filter(wanted, file_names):
            path = os.path.join(folder, file_name)
            # Keep dangling links, so that reading them raises an error instead of silently dropping data.
            if os.path.isfile(path) or not os.path.exists(path):
                yield os.path.relpath(path, root).replace(os.sep, "/"), path


def _matches(parts: list[str], pattern: list[str]) -> bool:
    """Whether the last components of a path match a pattern; `**` matches any number of folders."""
    if not pattern:
        return True
    if pattern[-1] == "**":
        return any(_matches(parts[:end], pattern[:-1]) for end in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[-1], pattern[-1]) and _matches(parts[:-1], pattern[:-1])
