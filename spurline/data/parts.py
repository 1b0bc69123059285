"""A part of a source, as read by one of several machines. Torch-free.

Positions are bytes of the files in their order, or rows of a dataset. Each of n machines reads the pieces in one n-th
of the positions, so its work depends only on names and sizes, and the parts concatenate to the source.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from spurline.config import Data
from spurline.data.formats import Advance, Document, read_file
from spurline.data.hf_datasets import is_dataset, num_rows, read_dataset
from spurline.data.sources import combined_hash, find_files, root_of, stable_hash


@dataclass(frozen=True)
class Part:
    number: int
    """Counted from 1."""
    total: int

    @staticmethod
    def parse(text: str) -> Part:
        """Parse a text such as 3/16; raises a ValueError if it is invalid."""
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if not found:
            raise ValueError(f"--part must be a part and the number of parts, such as 3/16, got {text!r}")
        part = Part(int(found[1]), int(found[2]))
        if not 1 <= part.number <= part.total:
            raise ValueError(f"--part {text}: parts are counted from 1 to {part.total}")
        return part

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"{self.number:06}-of-{self.total:06}"

    def has(self, position: int, size: int) -> bool:
        return position * self.total >= (self.number - 1) * size and not self.is_before(position, size)

    def is_before(self, position: int, size: int) -> bool:
        """Whether a position belongs to a later part."""
        return position * self.total >= self.number * size


@dataclass(frozen=True)
class _Unit:
    """A unit that is read from its beginning: a file, or the rows of a dataset."""

    name: str
    start: int
    size: int
    read: Callable[[Advance], Iterator[Document]]


def read_part(data: Data, part: Part, advance: Advance = lambda amount: None) -> Iterator[Document]:
    """The documents of one path that belong to a part, in the order of `read_documents`."""
    units = _units(data)
    size = units[-1].start + units[-1].size
    for unit in units:
        first, last = unit.start, unit.start + max(unit.size, 1) - 1
        if part.is_before(first, size) or last * part.total < (part.number - 1) * size:
            continue
        consumed = 0

        def count(amount: int) -> None:
            nonlocal consumed
            consumed += amount
            advance(amount)

        for document in unit.read(count):
            position = min(first + consumed, last)
            if part.has(position, size):
                yield document
            elif part.is_before(position, size):
                break  # the rest belongs to later parts


def listing(data: Data) -> str:
    """A hash of the names and sizes that determine the contents of each part."""
    return combined_hash([f"{unit.name}\0{unit.size}" for unit in _units(data)])


def _units(data: Data) -> list[_Unit]:
    root = root_of(data)
    if is_dataset(root):
        rows = num_rows(root)
        if not rows:
            raise ValueError(f"data.path {root!r}: a stream of unknown length has no parts: prepare it as a whole")
        return [_Unit(root, 0, rows, lambda advance: read_dataset(root, data.text_field, advance))]
    units: list[_Unit] = []
    start = 0
    for name, path in sorted(find_files(data), key=lambda file: stable_hash("order", file[0])):
        try:
            size = os.path.getsize(path)
        except OSError as error:
            raise ValueError(f"data.path: can't read {path!r}: {error.strerror}") from None

        def read(advance: Advance, path: str = path, name: str = name) -> Iterator[Document]:
            return read_file(path, name, data.text_field, advance)

        units.append(_Unit(name, start, size, read))
        start += size
    return units
