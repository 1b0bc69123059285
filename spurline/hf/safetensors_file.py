"""Read and write safetensors files one tensor at a time.

A file consists of the header's length (8 bytes), the header (JSON: dtype, shape and byte range of each tensor) and the
tensor data without gaps. The safetensors package needs all tensors of a file in memory to write it; here at most one
is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import RawIOBase
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spurline.untrusted import open_regular, reason

FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAME_OF = {dtype: name for name, dtype in FLOATS.items()} | {torch.float8_e4m3fn: "F8_E4M3"}
_ITEMSIZES = (
    dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1)
    | dict.fromkeys(("U16", "I16", "F16", "BF16"), 2)
    | dict.fromkeys(("U32", "I32", "F32"), 4)
    | dict.fromkeys(("U64", "I64", "F64"), 8)
)
_LONGEST_HEADER = 100_000_000
_SHORTEST_READ = 4096  # bytes: a system call for less costs more than reading the bytes in between
_LARGEST_DETOUR = 1 << 22  # bytes that are read at a time for the sake of a few of them
_MAX_DIMS = 32


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    path: Path
    dtype: str
    """In safetensors notation: F32, BF16, ..."""
    shape: tuple[int, ...]
    offset: int
    """Byte offset of its data in the file."""

    def read_into(self, target: Tensor, start: int = 0) -> None:
        """Fill a contiguous CPU tensor with the elements from element `start` on."""
        read_into(target, self, start)

    def read_box(self, start: int, num_columns: int, rows: range, columns: range) -> Tensor:
        """Some rows and columns of the matrix of `num_columns` columns that begins at element `start`."""
        dtype = FLOATS[self.dtype]
        in_bytes = range(columns.start * dtype.itemsize, columns.stop * dtype.itemsize)
        raw = read_byte_box(self, start * dtype.itemsize, num_columns * dtype.itemsize, rows, in_bytes)
        return raw.view(-1).view(dtype).view(len(rows), len(columns))


class Entry(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a file, by name; raises a ValueError if the file is truncated or invalid."""
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            num_bytes = os.fstat(file.fileno()).st_size
            is_long_enough = 2 <= length <= min(num_bytes - 8, _LONGEST_HEADER)
            text = file.read(length) if is_long_enough else b""
        header = json.loads(text, object_pairs_hook=_with_valid_names) if is_long_enough else {}
    except OSError as error:
        raise ValueError(f"{path}: can't read the file: {reason(error)}") from None
    except RecursionError:
        raise ValueError(f"{path} is damaged or not a safetensors file: its header is nested too deeply") from None
    except (ValueError, _InvalidNameError) as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: its header is not JSON ({error})") from None
    if not is_long_enough:
        raise ValueError(f"{path} is truncated or not a safetensors file: it is too short for its header")
    if not isinstance(header, dict):
        raise ValueError(f"{path} is not a safetensors file: its header is not a JSON object")
    header.pop("__metadata__", None)

    found: dict[str, Stored] = {}
    end = start = 8 + length
    for name, entry in sorted(header.items(), key=lambda item: _offsets(path, *item)):
        first, last = _offsets(path, name, entry)
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        if dtype not in _ITEMSIZES:
            raise ValueError(f"{path}: tensor {name} has unknown dtype {dtype}")
        size = prod(shape) * _ITEMSIZES[dtype]
        if start + first != end or last - first != size:
            raise ValueError(f"{path} is damaged: tensor {name} ({dtype} {shape}) has an invalid offset or size")
        found[name] = Stored(path, dtype, shape, end)
        end += size
    if end != num_bytes:
        what = "truncated" if end > num_bytes else "damaged"
        raise ValueError(f"{path} is {what}: it has {num_bytes:,} bytes, but its header describes {end:,}")
    return found


class _InvalidNameError(Exception):
    pass


def _with_valid_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if not all(name.isprintable() for name, _ in pairs):
        raise _InvalidNameError("a name with invisible characters")
    content = dict(pairs)
    if len(content) < len(pairs):
        raise _InvalidNameError("duplicate key")
    return content


def _offsets(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """Start and end of a tensor's bytes, relative to the end of the header; raises a ValueError if invalid."""
    match entry:
        case {"dtype": str(), "shape": [*shape], "data_offsets": [int(first), int(last)]} if (
            all(type(size) is int and 0 <= size < 2**62 for size in shape) and len(shape) <= _MAX_DIMS
        ):
            return first, last
    raise ValueError(f"{path} is damaged: invalid header entry of tensor {name}")


def read_into(target: Tensor, stored: Stored, start: int = 0) -> None:
    """Fill a contiguous CPU tensor with the elements of a stored one, starting at element `start`."""
    dtype = FLOATS[stored.dtype]
    if target.dtype != dtype:
        same = torch.empty_like(target, dtype=dtype)
        read_into(same, stored, start)
        target.copy_(same)
        return
    read_bytes(target.view(-1).view(torch.uint8), stored, start * dtype.itemsize)


def read_bytes(target: Tensor, stored: Stored, start: int = 0) -> None:
    """Fill a contiguous CPU tensor of bytes from a stored tensor, starting at byte `start`."""
    with open(stored.path, "rb", buffering=0) as file:
        _read_at(file, stored.offset + start, target)


def read_byte_box(stored: Stored, start: int, row_bytes: int, rows: range, columns: range) -> Tensor:
    """Some rows, and some bytes of each, of a matrix of bytes that begins at byte `start` of a stored tensor.

    If only a few bytes of each row are wanted, full rows are read, as many at a time as _LARGEST_DETOUR allows.
    """
    first = stored.offset + start + rows.start * row_bytes
    box = torch.empty(len(rows), len(columns), dtype=torch.uint8)
    with open(stored.path, "rb", buffering=0) as file:
        if len(columns) == row_bytes:
            _read_at(file, first, box)
            return box
        if len(columns) < _SHORTEST_READ:
            full = torch.empty(max(1, _LARGEST_DETOUR // row_bytes), row_bytes, dtype=torch.uint8)
            for number in range(0, len(rows), len(full)):
                part = full[: len(rows) - number]
                _read_at(file, first + number * row_bytes, part)
                box[number : number + len(part)] = part[:, columns.start : columns.stop]
            return box
        for number, part in enumerate(box):
            _read_at(file, first + number * row_bytes + columns.start, part)
        return box


def _read_at(file: RawIOBase, position: int, target: Tensor) -> None:
    view = target.view(-1).numpy().data
    file.seek(position)
    while len(view):
        count = file.readinto(view)  # one call reads at most 2 GB
        if not count:
            raise ValueError(f"{getattr(file, 'name', 'the file')} is truncated: unexpected end of file")
        view = view[count:]


def write_file(path: Path, entries: list[Entry], tensors: Iterator[Tensor]) -> None:
    """Write a file with these entries, taking their tensors in order from `tensors`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        offsets = [end, end + entry.num_bytes]
        header[entry.name] = {"dtype": _NAME_OF[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors' bytes are aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            tensor = next(tensors)
            assert (tensor.dtype, tuple(tensor.shape)) == (entry.dtype, entry.shape), entry.name
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            del tensor  # free it before the next one is read
