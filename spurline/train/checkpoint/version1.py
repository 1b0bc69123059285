"""Checkpoints of version 1, which torch.distributed.checkpoint wrote: pickles and zip files, read without running them.

.metadata is a pickle; each tensor or object in a .distcp file is a zip file of torch.save: a small pickle and bytes.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spurline.remote import RemotePath
from spurline.train.checkpoint.layout import DTYPES, Chunk, Layout, Place, TensorLayout, check_layout
from spurline.train.checkpoint.plain_pickle import Held, Maker, read_pickle
from spurline.untrusted import open_regular, read_bytes, reason

METADATA = ".metadata"


class _Metadata(Held):
    pass


class _Tensor(Held):
    pass


class _Bytes(Held):
    pass


class _Properties(Held):
    pass


class _Chunk(Held):
    pass


class _Index(Held):
    pass


class _Info(Held):
    pass


def _ignored(*arguments: Any) -> None:
    """Stand-in for unneeded content of the files: layouts, memory formats, the path of the temporary folder."""


def _size(values: Any = ()) -> tuple[int, ...]:
    if type(values) is not tuple or not all(type(value) is int and 0 <= value < 2**62 for value in values):
        raise ValueError("it has a size that is not valid")
    return values


_DCP = "torch.distributed.checkpoint"
_DTYPES = {f"torch.{name}": dtype for name, dtype in DTYPES.items()}
_METADATA_NAMES: dict[str, Maker] = {
    f"{_DCP}.metadata.Metadata": _Metadata,
    f"{_DCP}.metadata.TensorStorageMetadata": _Tensor,
    f"{_DCP}.metadata.BytesStorageMetadata": _Bytes,
    f"{_DCP}.metadata.TensorProperties": _Properties,
    f"{_DCP}.metadata.ChunkStorageMetadata": _Chunk,
    f"{_DCP}.metadata.MetadataIndex": _Index,
    f"{_DCP}.metadata.StorageMeta": Held,
    f"{_DCP}.filesystem._StorageInfo": _Info,
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING": _ignored,
    "torch.serialization._get_layout": _ignored,
    "pathlib.PosixPath": _ignored,
    "pathlib.WindowsPath": _ignored,
    "torch.Size": _size,
    **_DTYPES,
}
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


def read_layout(folder: Path | RemotePath, file_sizes: Mapping[str, int]) -> Layout:
    """The layout in .metadata; a ValueError unless every chunk lies inside its tensor and its file."""
    path = folder / METADATA
    try:
        layout = _layout(read_pickle(read_bytes(path), _METADATA_NAMES))
        check_layout(layout, file_sizes)
    except OSError as error:
        raise ValueError(f"can't read '{path}': {reason(error)}") from None
    except ValueError as error:
        raise ValueError(f"'{path}' is damaged: {error}") from None
    return layout


def _layout(metadata: Any) -> Layout:
    entries = metadata.get("state_dict_metadata") if isinstance(metadata, _Metadata) else None
    stored = metadata.get("storage_data") if isinstance(metadata, _Metadata) else None
    if type(entries) is not dict or type(stored) is not dict:
        raise ValueError("it is not the metadata of a checkpoint")
    place_of: dict[tuple[str, Any], Place] = {}
    for index, info in stored.items():
        if not isinstance(index, _Index) or type(index.get("fqn")) is not str or not isinstance(info, _Info):
            raise ValueError("an entry of its storage is not valid")
        offset = index.get("offset")
        place_of[index.get("fqn"), None if offset is None else _size(offset)] = _place(info)
    tensors: dict[str, TensorLayout] = {}
    objects: dict[str, Place] = {}
    for name, entry in entries.items():
        if isinstance(entry, _Tensor) and type(name) is str:
            tensors[name] = _tensor(name, entry, place_of)
        elif isinstance(entry, _Bytes) and (name, None) in place_of:
            objects[name] = place_of[name, None]
        else:
            raise ValueError(f"its entry {str(name)[:100]!r} is not valid")
    return Layout(tensors, objects)


def _place(info: _Info) -> Place:
    match info.get("relative_path"), info.get("offset"), info.get("length"):
        case str(file), int(begin), int(num_bytes) if not info.get("transform_descriptors"):
            return Place(file, begin, num_bytes)
    raise ValueError("an entry of its storage is not valid")


def _tensor(name: str, entry: _Tensor, place_of: Mapping[tuple[str, Any], Place]) -> TensorLayout:
    properties, chunks = entry.get("properties"), entry.get("chunks")
    state = properties.state if isinstance(properties, _Properties) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, torch.dtype) or type(chunks) is not list:
        raise ValueError(f"the entry of tensor {name!r} is not valid")
    boxes = []
    for chunk in chunks:
        if not isinstance(chunk, _Chunk):
            raise ValueError(f"a chunk of tensor {name!r} is not valid")
        offsets, sizes = _size(chunk.get("offsets")), _size(chunk.get("sizes"))
        if (name, offsets) not in place_of:
            raise ValueError(f"a chunk of tensor {name!r} is stored nowhere")
        boxes.append(Chunk(offsets, sizes, place_of[name, offsets]))
    shape = _size(entry.get("size"))
    if any(len(chunk.shape) != len(shape) for chunk in boxes):
        raise ValueError(f"a chunk of tensor {name!r} has another number of dims")
    return TensorLayout(dtype, shape, tuple(boxes))


# Tensors and objects.


def read_tensor(folder: Path | RemotePath, place: Place, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A chunk of a tensor."""
    tensor = _read_saved(folder, place, {})
    if not isinstance(tensor, Tensor) or tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"'{folder / place.file}' is damaged: a tensor in it is not as {METADATA} says")
    return tensor


def read_extra(folder: Path | RemotePath, layout: Layout) -> dict[str, Any]:
    """Numbers and text only: a pickle can nest a list in itself, or share it so often that printing it never ends."""
    extra = _read_object(folder, layout, "extra")
    if type(extra) is not dict or not all(
        type(name) is str and (value is None or isinstance(value, bool | int | float | str))
        for name, value in extra.items()
    ):
        raise ValueError(f"'{folder}' is damaged: its extra is not a dict of numbers")
    return extra


def read_random_state(folder: Path | RemotePath, layout: Layout, rank: int) -> dict[str, Any]:
    """Numbers and arrays only: an error message would write out a tuple that a pickle shares with itself."""
    state = _read_object(folder, layout, f"random.{rank}")
    if type(state) is not dict:
        raise ValueError(f"'{folder}' is damaged: its random state is not a dict")
    return {key: tuple(map(_plain, value)) if type(value) is tuple else _plain(value) for key, value in state.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, _Array):
        return value.array()
    are_numbers = type(value) is tuple and all(type(number) is int for number in value)
    if not are_numbers and not isinstance(value, int | float | str | Tensor | None):
        raise ValueError("the random state in the checkpoint is damaged: it has more than numbers and arrays")
    return value


def _read_object(folder: Path | RemotePath, layout: Layout, name: str) -> Any:
    if name not in layout.objects:
        raise ValueError(f"'{folder}' is damaged: it has no {name!r}")
    place = layout.objects[name]
    stored = _read_saved(folder, place, _OBJECT_NAMES)
    # Objects are stored in tuples of one.
    if type(stored) is not tuple or len(stored) != 1:
        raise ValueError(f"'{folder / place.file}' is damaged: {name!r} in it is not valid")
    return stored[0]


def _read_saved(folder: Path | RemotePath, place: Place, names: Mapping[str, Maker]) -> Any:
    """What torch.save wrote to this place."""
    path = folder / place.file
    try:
        with open_regular(path) as file:
            file.seek(place.begin)
            content = file.read(place.num_bytes)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
            # torch.save compresses nothing: without compression, nothing is larger than the file.
            if any(member.compress_type != zipfile.ZIP_STORED for member in members.values()):
                raise ValueError("it has compressed parts")
            if "data.pkl" not in members:
                raise ValueError("it has no data.pkl")
            tensors = _Tensors(archive, members, len(content))
            known = {**_TENSOR_NAMES, **names, "torch._utils._rebuild_tensor_v2": tensors.rebuild}
            return read_pickle(archive.read(members["data.pkl"]), known, tensors.storage)
    except OSError as error:
        raise ValueError(f"can't read '{path}': {reason(error)}") from None
    except (zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"'{path}' is damaged: {str(error).partition(chr(10))[0]}") from None
    except ValueError as error:
        raise ValueError(f"'{path}' is damaged: {error}") from None


class _Tensors:
    """The tensors of one zip file. A pickle may refer to the same bytes any number of times: they are counted."""

    def __init__(self, archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], num_bytes: int) -> None:
        self._archive, self._members = archive, members
        self._left = 2 * num_bytes
        """Bytes that may still be read or copied: each part of the file once, as a storage and as a tensor."""

    def storage(self, pid: Any) -> tuple[bytes, torch.dtype]:
        match pid:
            case ("storage", torch.dtype() as dtype, str(key), _, _) if f"data/{key}" in self._members:
                self._count(self._members[f"data/{key}"].file_size)
                return self._archive.read(self._members[f"data/{key}"]), dtype
        raise ValueError("it refers to data that it does not have")

    def rebuild(self, storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Tensor:
        data, dtype = storage
        size, stride = _size(size), _size(stride)
        if len(data) % dtype.itemsize or type(offset) is not int:
            raise ValueError("it has a tensor that is not valid")
        # A stride of 0 repeats elements.
        self._count(max(len(data), math.prod(size) * dtype.itemsize))
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        try:
            return flat.as_strided(size, stride, offset).contiguous() if flat.numel() else flat.view(size)
        except RuntimeError:  # outside of its data
            raise ValueError("it has a tensor that is larger than its data") from None

    def _count(self, num_bytes: int) -> None:
        self._left -= num_bytes
        if self._left < 0:
            raise ValueError("it has tensors that are larger than their data")


_TENSOR_NAMES: dict[str, Maker] = {
    "collections.OrderedDict": lambda *arguments: OrderedDict(),
    **{f"torch.{name}": dtype for name, dtype in _STORAGES.items()},
}


class _Array(Held):
    """The array in the state of numpy's generator: (version, shape, dtype, is Fortran order, bytes)."""

    def array(self) -> np.ndarray[Any, Any]:
        match self.state:
            case (_, _, _, _, bytes(data)) if len(data) == 624 * 4:
                return np.frombuffer(data, "<u4").copy()
        raise ValueError("the state of numpy's random numbers is not valid")


def _encode(text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding != "latin1":
        raise ValueError("it has bytes that are not valid")
    return text.encode("latin1")


class _Dtype(Held):
    pass


_OBJECT_NAMES: dict[str, Maker] = {
    **{f"numpy.{core}.multiarray._reconstruct": lambda *arguments: _Array() for core in ("_core", "core")},
    "numpy.ndarray": _ignored,
    "numpy.dtype": lambda *arguments: _Dtype(),
    "_codecs.encode": _encode,
}
