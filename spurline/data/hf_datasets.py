"""Hugging Face datasets: a `save_to_disk` folder, or hf://NAME?config=C&split=S&streaming=1. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from spurline.data.formats import Advance, Document, checked_text

SCHEME = "hf://"
_OPTIONS = ("config", "split", "streaming")


def is_dataset(path: str) -> bool:
    return path.startswith(SCHEME) or _is_saved(path)


def dataset_problems(path: str) -> list[str]:
    """Errors in a dataset name, or a missing `datasets` package; nothing is read or downloaded."""
    try:
        _parse(path)
        _check_package()
    except ValueError as problem:
        return [str(problem)]
    return []


def num_rows(path: str) -> int | None:
    """Number of rows, or None if it is not known in advance (streaming)."""
    return getattr(_open(path), "num_rows", None)


def read_dataset(path: str, text_field: str, advance: Advance) -> Iterator[Document]:
    """One document per row; `advance` counts rows."""
    dataset = _open(path)
    where = f"data.path {path!r}"
    columns = dataset.column_names
    if columns is not None:  # unknown for some streams until the first row
        if text_field not in columns:
            has = ", ".join(map(repr, columns))
            raise ValueError(f"{where}: no column {text_field!r} (it has {has}): choose one with data.text_field")
        dataset = dataset.select_columns([text_field])
    for number, row in enumerate(_rows(dataset, where)):
        if text_field not in row:
            raise ValueError(f"{where}, row {number}: no column {text_field!r}: choose one with data.text_field")
        if text := checked_text(row[text_field], text_field, f"{where}, row {number}"):
            yield Document(str(number), text)
        advance(1)


def dataset_rows(path: str, wanted: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row with its number; only the wanted columns are read, if the columns are known in advance."""
    dataset = _open(path)
    if dataset.column_names is not None:
        dataset = dataset.select_columns([name for name in wanted if name in dataset.column_names])
    yield from enumerate(_rows(dataset, f"data.path {path!r}"))


def _rows(dataset: Any, where: str) -> Iterator[dict[str, Any]]:
    try:
        yield from dataset
    except Exception as error:  # network, file format and hub errors have many types
        raise _refused(where, error) from error


def _open(path: str) -> Any:
    """Open the dataset: memory-mapped from a folder or the hub cache, or as a stream."""
    name, options = _parse(path)
    _check_package()
    import datasets

    where = f"data.path {path!r}"
    split = options.get("split", "train")
    try:
        if not _is_saved(name):
            streaming = options.get("streaming", "0") == "1"
            return datasets.load_dataset(name, options.get("config"), split=split, streaming=streaming)
        dataset = datasets.load_from_disk(name)
    except Exception as error:
        raise _refused(where, error) from error
    if not isinstance(dataset, datasets.DatasetDict):
        return dataset
    if split not in dataset:
        raise ValueError(f"{where}: no split {split!r}: choose with {SCHEME}{name}?split=, of {', '.join(dataset)}")
    return dataset[split]


def _is_saved(path: str) -> bool:
    inside = [os.path.join(path, name) for name in ("state.json", "dataset_dict.json")]
    return any(map(os.path.isfile, inside))


def _parse(path: str) -> tuple[str, dict[str, str]]:
    """The name or folder of a dataset, and its options."""
    if not path.startswith(SCHEME):
        return path, {}
    url = urlsplit(path)
    options = dict(parse_qsl(url.query, keep_blank_values=True))
    wrong = [f"{name}={value}" for name, value in options.items() if name not in _OPTIONS or not value]
    if options.get("streaming", "0") not in ("0", "1"):
        wrong.append(f"streaming={options['streaming']}")
    if wrong or not url.netloc + url.path:
        about = f" ({', '.join(wrong)})" if wrong else ""
        raise ValueError(
            f"data.path {path!r}: not a valid dataset name{about}: write {SCHEME}NAME, or"
            f" {SCHEME}NAME?config=CONFIG&split=SPLIT&streaming=1 with some of these options"
        )
    return url.netloc + url.path, options


def _check_package() -> None:
    if find_spec("datasets") is None:  # importing it would take seconds
        raise ValueError("data.path: Hugging Face datasets need the package datasets: pip install 'spurline[data]'")


def _refused(where: str, error: Exception) -> ValueError:
    reason = str(error).partition("\n")[0] or type(error).__name__
    return ValueError(f"{where}: can't read this dataset: {reason}")
