"""Read the tensors of a checkpoint, of this version or of version 1: bytes and plain data, nothing that could run.

Use `StoredCheckpoint` only for files whose checksums were verified.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.futures import Future

from spurline.remote import RemotePath
from spurline.train.checkpoint import version1
from spurline.train.checkpoint.layout import Chunk, Layout, Place, TensorLayout, read_layout
from spurline.train.checkpoint.record import CheckpointRecord
from spurline.untrusted import open_regular


class StoredCheckpoint:
    """The tensors in the folder of a checkpoint."""

    def __init__(self, folder: Path | RemotePath, record: CheckpointRecord) -> None:
        self.folder, self.record = folder, record
        sizes = {stored.name: stored.num_bytes for stored in record.files}
        self.layout: Layout = version1.read_layout(folder, sizes) if record.version == 1 else read_layout(folder, sizes)

    @property
    def extra(self) -> dict[str, Any]:
        if self.record.version == 1 and self.record.extra is None:
            return version1.read_extra(self.folder, self.layout)
        return self.record.extra or {}

    def random_state(self, rank: int) -> dict[str, Any] | bytes:
        """The random state of a rank as it was saved: text in this version, a dict in version 1."""
        if self.record.version == 1:
            return version1.read_random_state(self.folder, self.layout, rank)
        name = f"random.{rank}"
        entry = self.layout.tensors.get(name)
        if entry is None or entry.dtype != torch.uint8 or len(entry.shape) != 1:
            raise ValueError(f"'{self.folder}' is damaged: it has no {name} of bytes")
        return bytes(self.read_tensor(name).numpy())

    def check_plain_data(self) -> None:
        """Raise a ValueError if `extra` or a random state can't be read."""
        assert isinstance(self.extra, dict)
        for rank in range(self.record.num_ranks):
            self.random_state(rank)

    def read_tensor(self, name: str) -> Tensor:
        """One full tensor, however it was sharded."""
        entry = self.layout.tensors[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        for chunk in entry.chunks:
            box = tuple(slice(o, o + size) for o, size in zip(chunk.offsets, chunk.shape, strict=True))
            tensor[box] = self._read_rows(entry, chunk, 0, chunk.shape[0] if chunk.shape else 1)
        return tensor

    def chunks(self) -> Iterator[tuple[str, Tensor]]:
        """Every chunk of every tensor with its name, one at a time."""
        for name, entry in self.layout.tensors.items():
            for chunk in entry.chunks:
                yield name, self._read_rows(entry, chunk, 0, chunk.shape[0] if chunk.shape else 1)

    def load(self, state: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
        """Fill the tensors of `state`, sharded in any way; all ranks together."""
        dcp.load(state, storage_reader=_Reader(self), planner=_planner(), process_group=group)

    def read_part(self, name: str, index: int, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> Tensor:
        """A box of chunk number `index` of a tensor; only the rows (of the first dim) in it are read."""
        entry = self.layout.tensors[name]
        first, num_rows = (offsets[0], lengths[0]) if offsets else (0, 1)
        part = self._read_rows(entry, entry.chunks[index], first, num_rows)
        for dim in range(1, len(offsets)):
            part = part.narrow(dim, offsets[dim], lengths[dim])
        return part

    def _read_rows(self, entry: TensorLayout, chunk: Chunk, first: int, num_rows: int) -> Tensor:
        """Rows `first` up to `first + num_rows` of a chunk; a scalar has one row."""
        if self.record.version == 1:
            tensor = version1.read_tensor(self.folder, chunk.place, entry.dtype, chunk.shape)
            return tensor.narrow(0, first, num_rows) if chunk.shape else tensor
        row_bytes = math.prod(chunk.shape[1:]) * entry.dtype.itemsize
        place = Place(chunk.place.file, chunk.place.begin + first * row_bytes, num_rows * row_bytes)
        shape = (num_rows, *chunk.shape[1:]) if chunk.shape else ()
        return _read_bytes(self.folder, place).view(entry.dtype).view(shape)


def _read_bytes(folder: Path | RemotePath, place: Place) -> Tensor:
    if isinstance(folder, RemotePath):
        found = (folder / place.file).read_range(place.begin, place.begin + place.num_bytes) if place.num_bytes else b""
        if len(found) != place.num_bytes:
            raise ValueError(f"'{folder / place.file}' ended while it was read")
        return torch.frombuffer(bytearray(found), dtype=torch.uint8) if found else torch.empty(0, dtype=torch.uint8)
    data = torch.empty(place.num_bytes, dtype=torch.uint8)
    rest: memoryview = data.numpy().data
    with open_regular(folder / place.file) as file:
        file.seek(place.begin)
        while len(rest):  # one call reads at most 2 GB
            count = file.readinto(rest)  # type: ignore[attr-defined]
            if not count:
                raise ValueError(f"'{folder / place.file}' ended while it was read")
            rest = rest[count:]
    return data


def _planner() -> dcp.DefaultLoadPlanner:
    return dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


class _Reader(dcp.StorageReader):
    """Supplies the layout and then the bytes to torch.distributed.checkpoint, which plans which rank reads what."""

    def __init__(self, checkpoint: StoredCheckpoint) -> None:
        self._checkpoint = checkpoint

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        entries: dict[str, Any] = {}
        places: dict[MetadataIndex, int] = {}
        for name, tensor in self._checkpoint.layout.tensors.items():
            # Offsets identify a chunk; those of an empty one may be those of another.
            chunks = {number: chunk for number, chunk in enumerate(tensor.chunks) if 0 not in chunk.shape}
            boxes = [
                dcp.ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape))
                for chunk in chunks.values()
            ]
            entries[name] = dcp.TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.shape), boxes)
            places |= {MetadataIndex(name, chunk.offsets): number for number, chunk in chunks.items()}
        return dcp.Metadata(entries, storage_data=places)

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._number_of_chunk = metadata.storage_data

    def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        return plans

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        for item in plan.items:
            number = self._number_of_chunk[item.storage_index]
            name, offsets, lengths = item.storage_index.fqn, tuple(item.storage_offsets), tuple(item.lengths)
            part = self._checkpoint.read_part(name, number, offsets, lengths)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
