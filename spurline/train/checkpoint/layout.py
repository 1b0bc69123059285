"""metadata.json: where each part of each tensor is stored in the files of a checkpoint.

{"tensors": {NAME: {"dtype": "float32", "shape": [8, 4], "chunks": [[OFFSETS, SIZES, FILE, BEGIN], ...]}}}

A chunk is a box of the tensor at OFFSETS: the little-endian bytes of its elements, row by row, from byte BEGIN of FILE.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from spurline.remote import RemotePath
from spurline.untrusted import read_json, reason

METADATA = "metadata.json"
MAX_DIMS, MAX_SHARDED_DIMS = 16, 6
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


@dataclass(frozen=True)
class Place:
    """A range of bytes in a file of the checkpoint."""

    file: str
    begin: int
    num_bytes: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where it is stored."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    place: Place


@dataclass(frozen=True)
class TensorLayout:
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    tensors: dict[str, TensorLayout]
    objects: dict[str, Place] = field(default_factory=dict)
    """Pickled objects of version 1, which only version1.py reads."""


def to_json(tensors: Mapping[str, TensorLayout]) -> str:
    content = {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": tensor.shape,
            "chunks": [[chunk.offsets, chunk.shape, chunk.place.file, chunk.place.begin] for chunk in tensor.chunks],
        }
        for name, tensor in tensors.items()
    }
    return json.dumps({"tensors": content}, separators=(",", ":"))


def read_layout(folder: Path | RemotePath, file_sizes: Mapping[str, int]) -> Layout:
    """The layout in metadata.json; a ValueError unless every chunk lies inside its tensor and its file.

    `file_sizes` holds the sizes in checkpoint.json, by file name.
    """
    path = folder / METADATA
    try:
        layout = Layout(dict(_tensors(read_json(path))))
        check_layout(layout, file_sizes)
    except OSError as error:
        raise ValueError(f"can't read '{path}': {reason(error)}") from None
    except ValueError as error:
        raise ValueError(f"'{path}' is damaged: {error}") from None
    return layout


def _tensors(content: Any) -> Iterator[tuple[str, TensorLayout]]:
    match content:
        case {"tensors": dict(tensors)}:
            for name, entry in tensors.items():
                yield name, _tensor(name, entry)
        case _:
            raise ValueError("it has no tensors")


def _tensor(name: str, entry: Any) -> TensorLayout:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "chunks": [*chunks]} if dtype in DTYPES:
            return TensorLayout(
                DTYPES[dtype], _sizes(name, shape), tuple(_chunk(name, c, DTYPES[dtype].itemsize) for c in chunks)
            )
    raise ValueError(f"the entry of tensor {name!r} is not valid")


def _chunk(name: str, entry: Any, itemsize: int) -> Chunk:
    match entry:
        case [[*offsets], [*sizes], str(file), int(begin)] if type(begin) is int:
            shape = _sizes(name, sizes)
            return Chunk(_sizes(name, offsets), shape, Place(file, begin, math.prod(shape) * itemsize))
    raise ValueError(f"a chunk of tensor {name!r} is not valid")


def _sizes(name: str, values: list[Any]) -> tuple[int, ...]:
    if len(values) <= MAX_DIMS and all(type(value) is int and 0 <= value < 2**62 for value in values):
        return tuple(values)
    raise ValueError(f"a shape or offset of tensor {name!r} is not valid")


def check_layout(layout: Layout, file_sizes: Mapping[str, int]) -> None:
    """Raise a ValueError unless chunks tile their tensor, and fit together into the recorded files."""
    for name, tensor in layout.tensors.items():
        if not name.isprintable():  # names are printed
            raise ValueError(f"the name of tensor {name[:100]!r} has invisible characters")
        # torch multiplies the sizes before it looks for a 0 among them.
        if math.prod(size or 1 for size in tensor.shape) * tensor.dtype.itemsize >= 2**63:
            raise ValueError(f"the shape of tensor {name!r} is not valid")
        for chunk in tensor.chunks:
            if not len(tensor.shape) == len(chunk.offsets) == len(chunk.shape) or any(
                offset + size > whole
                for offset, size, whole in zip(chunk.offsets, chunk.shape, tensor.shape, strict=True)
            ):
                raise ValueError(f"a chunk of tensor {name!r} is not inside of it")
            _check_place(name, chunk.place, file_sizes)
        if not _fill(tensor):
            raise ValueError(f"the chunks of tensor {name!r} do not fill it")
    for name, place in layout.objects.items():
        _check_place(name, place, file_sizes)
    _check_sums(layout, file_sizes)


def _fill(tensor: TensorLayout) -> bool:
    """Whether each element of the tensor is in one chunk, and in no other.

    The corners of a box, with signs that alternate along each edge, are the mixed differences of its indicator
    function. So boxes tile the tensor exactly if their signed corners add up to those of the tensor.
    """
    whole = Chunk((0,) * len(tensor.shape), tensor.shape, Place("", 0, 0))
    boxes = [chunk for chunk in tensor.chunks if 0 not in chunk.shape]
    if 0 in tensor.shape:
        return not boxes
    dims = [dim for dim, size in enumerate(tensor.shape) if any(box.shape[dim] != size for box in boxes)]
    return len(dims) <= MAX_SHARDED_DIMS and _signed_corners(boxes, dims) == _signed_corners([whole], dims)


def _signed_corners(boxes: list[Chunk], dims: list[int]) -> dict[tuple[int, ...], int]:
    total: Counter[tuple[int, ...]] = Counter()
    for box in boxes:
        for ends in itertools.product((0, 1), repeat=len(dims)):
            corner = (box.offsets[dim] + end * box.shape[dim] for dim, end in zip(dims, ends, strict=True))
            total[tuple(corner)] += (-1) ** sum(ends)
    return {corner: sign for corner, sign in total.items() if sign}


def _check_sums(layout: Layout, file_sizes: Mapping[str, int]) -> None:
    """Refuse to read a small file as many large tensors."""
    listed: Counter[str] = Counter()
    chunks = (chunk.place for tensor in layout.tensors.values() for chunk in tensor.chunks)
    for place in itertools.chain(chunks, layout.objects.values()):
        listed[place.file] += place.num_bytes
    for file, num_bytes in listed.items():
        if num_bytes > file_sizes[file]:
            raise ValueError(f"its chunks in {file!r} have {num_bytes:,} bytes, and the file {file_sizes[file]:,}")


def _check_place(name: str, place: Place, file_sizes: Mapping[str, int]) -> None:
    if place.file not in file_sizes:
        raise ValueError(f"{name!r} is in the file {place.file!r}, which checkpoint.json does not list")
    if place.begin < 0 or place.num_bytes < 0 or place.begin + place.num_bytes > file_sizes[place.file]:
        raise ValueError(f"{name!r} lies outside of the file {place.file!r}")
