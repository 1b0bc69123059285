"""Read records of conversations: JSONL and Parquet files, folders of them, Hugging Face datasets. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from spurline.config import Data
from spurline.data.conversations import FIELDS
from spurline.data.formats import is_jsonl, jsonl_records
from spurline.data.hf_datasets import dataset_rows, is_dataset
from spurline.data.parquet_files import parquet_rows
from spurline.data.prepared_index import is_prepared
from spurline.data.sources import find_files, root_of, stable_hash


class Record(NamedTuple):
    name: str
    """Path within the dataset and number; its hash determines order and train/validation split."""
    where: str
    """For error messages."""
    value: Any


def read_records(data: Data) -> Iterator[Record]:
    """All records of one path; raises a ValueError for a file that can't hold conversations."""
    root = root_of(data)
    if is_prepared(root):
        raise ValueError(f"data.path {root!r} is prepared text: conversations are read from JSONL, and not prepared")
    if is_dataset(root):
        for number, row in dataset_rows(root, FIELDS):
            yield Record(f"{number}", f"data.path {root!r}, row {number}", row)
        return
    for name, path in sorted(find_files(data), key=lambda file: stable_hash("order", file[0])):
        for kind, number, value in _of_file(name, path):
            yield Record(f"{name}:{number}", f"data.path: {path!r}, {kind} {number}", value)


def _of_file(name: str, path: str) -> Iterator[tuple[str, int, Any]]:
    if name.endswith(".parquet"):
        yield from (("row", number, row) for number, row in parquet_rows(path, FIELDS))
    elif is_jsonl(name):
        yield from (("line", number, value) for number, value in jsonl_records(path, lambda amount: None))
    else:
        raise ValueError(
            f"data.path: {path!r} is neither JSONL nor Parquet, which conversations are read from: convert it or,"
            " in a folder, exclude it with data.pattern (such as *.jsonl)"
        )
