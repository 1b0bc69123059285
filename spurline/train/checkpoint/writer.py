"""Write a state with torch.distributed.checkpoint, computing the checksum of each file while it is written."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from spurline.data.prepared_index import StoredFile
from spurline.train.checkpoint.ranks import Ranks


def write_state(
    state: dict[str, Any],
    folder: Path,
    ranks: Ranks,
    planner: dcp.SavePlanner | None = None,
    single_file_per_rank: bool = True,
) -> list[StoredFile]:
    """Write `state` into an empty or new folder; returns the files of all ranks. An error on one is raised on all."""
    writer = ChecksummedWriter(folder, single_file_per_rank)
    try:
        dcp.save(state, storage_writer=writer, planner=planner, process_group=ranks.group)
    except dcp.api.CheckpointException as error:
        ranks.raise_failure(error)
    of_ranks = ranks.gather(lambda: writer.stored)
    return sorted((stored for of_rank in of_ranks for stored in of_rank), key=lambda stored: stored.name)


class ChecksummedWriter(dcp.FileSystemWriter):
    def __init__(self, folder: Path, single_file_per_rank: bool = True) -> None:
        super().__init__(folder, single_file_per_rank=single_file_per_rank)
        self.fs = self._files = _ChecksummedFiles()

    @property
    def stored(self) -> list[StoredFile]:
        """The files that this rank has written."""
        return list(self._files.stored.values())

    def write_data(self, plan: Any, planner: Any) -> Any:
        with _original_disk_errors():
            return super().write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        with _original_disk_errors():
            super().finish(metadata, results)


class _ChecksummedFiles(FileSystem):
    def __init__(self) -> None:
        self.stored: dict[str, StoredFile] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as file:
            stream = ChecksummedStream(file)
            yield stream
        name = Path(path).name
        self.stored[name] = StoredFile(name, stream.num_bytes, stream.sha256.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        stored, name = self.stored.pop(Path(path).name), Path(new_path).name
        self.stored[name] = StoredFile(name, stored.num_bytes, stored.sha256)


class ChecksummedStream:
    """A file that is written sequentially."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.num_bytes = 0
        self.sha256 = hashlib.sha256()
        self.tell, self.flush, self.fileno, self.close = file.tell, file.flush, file.fileno, file.close

    def write(self, data: Any) -> int:
        self._file.write(data)
        self.sha256.update(data)
        size = memoryview(data).nbytes
        self.num_bytes += size
        return size


@contextmanager
def _original_disk_errors() -> Iterator[None]:
    """Raise the OSError behind a RuntimeError: torch.save hides a full disk behind an error about file positions."""
    try:
        yield
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        raise cause or error from None
