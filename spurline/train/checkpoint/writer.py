"""Write tensors as plain bytes, computing the checksum of each file while it is written.

torch.distributed.checkpoint plans which rank writes which part; the format is ours: rank-00000-00000.tensors holds the
bytes of one tensor after another, and metadata.json says where each is (layout.py).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.futures import Future

from spurline.data.prepared_index import StoredFile
from spurline.remote import RemotePath
from spurline.train.checkpoint.layout import METADATA, Chunk, Place, TensorLayout, to_json
from spurline.train.checkpoint.ranks import Ranks

MAX_FILE_BYTES = 4 * 10**9
"""A file ends with the tensor that exceeds this, so that ranks can share the work of verifying files."""


def write_state(
    state: dict[str, Tensor], folder: Path | RemotePath, ranks: Ranks, planner: dcp.SavePlanner | None = None
) -> list[StoredFile]:
    """Write `state` into an empty or new folder; returns the files of all ranks. An error on one is raised on all."""
    writer = TensorWriter(folder, ranks.rank)
    try:
        dcp.save(state, storage_writer=writer, planner=planner, process_group=ranks.group)
    except dcp.api.CheckpointException as error:
        ranks.raise_failure(error)
    of_ranks = ranks.gather(lambda: writer.stored)
    return sorted((stored for of_rank in of_ranks for stored in of_rank), key=lambda stored: stored.name)


class TensorWriter(dcp.StorageWriter):
    def __init__(self, folder: Path | RemotePath, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self.stored: list[StoredFile] = []
        """The files that this rank has written."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        if isinstance(self._folder, Path):
            self._folder.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        return plans

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[Any]:
        results = []
        stream: ChecksummedStream | None = None
        for item in plan.items:
            if stream is None:
                stream = ChecksummedStream(self._folder, f"rank-{self._rank:05d}-{len(self.stored):05d}.tensors")
            data = _bytes_of(planner.resolve_data(item))
            place = Place(stream.name, stream.num_bytes, data.nbytes)
            stream.write(data)
            results.append(dcp.storage.WriteResult(item.index, data.nbytes, place))
            if stream.num_bytes >= MAX_FILE_BYTES:
                self.stored.append(stream.finish())
                stream = None
        if stream is not None:
            self.stored.append(stream.finish())
        written: Future[Any] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: dcp.Metadata, results: list[list[Any]]) -> None:
        places = {(r.index.fqn, tuple(r.index.offset)): r.storage_data for of_rank in results for r in of_rank}
        layout = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, dcp.TensorStorageMetadata), f"{name} is not a tensor"
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            chunks = tuple(Chunk(offsets, sizes, places[name, offsets]) for offsets, sizes in boxes)
            layout[name] = TensorLayout(entry.properties.dtype, tuple(entry.size), chunks)
        stream = ChecksummedStream(self._folder, METADATA)
        stream.write(to_json(layout).encode())
        self.stored.append(stream.finish())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _bytes_of(tensor: Any) -> memoryview:
    assert isinstance(tensor, Tensor)
    data: memoryview = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return data


class ChecksummedStream:
    """A new file that is written sequentially, with a running checksum."""

    def __init__(self, folder: Path | RemotePath, name: str) -> None:
        self.name = name
        self.num_bytes = 0
        self._sha256 = hashlib.sha256()
        path = folder / name
        self._is_local = isinstance(path, Path)
        # finish() closes it
        self._file: IO[bytes] = path.open("wb", buffering=0) if isinstance(path, Path) else path.open("wb")

    def write(self, data: bytes | memoryview) -> None:
        self._sha256.update(data)
        self.num_bytes += len(data)
        rest = memoryview(data)
        while len(rest):  # one call writes at most 2 GB
            rest = rest[self._file.write(rest) :]

    def finish(self) -> StoredFile:
        """Flush the file to the disk or the remote store, and close it."""
        with self._file:
            if self._is_local:
                os.fsync(self._file.fileno())
        return StoredFile(self.name, self.num_bytes, self._sha256.hexdigest())
