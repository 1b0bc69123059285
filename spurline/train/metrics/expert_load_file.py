"""expert_load.bin: the load of many experts in few bytes, next to metrics.jsonl. Free of torch.

A first line of JSON, {"layers": {"layers.1.moe": 256, ...}}, then for each logged step a little-endian record: the step
(8 bytes) and the rows of each expert of each layer in that order (4 bytes each). All records have the same size, so the
file can be read from any step on without reading what comes before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from spurline.files import append
from spurline.untrusted import open_regular, parse_json, reason

EXPERT_LOAD_FILE = "expert_load.bin"
LARGE = 4096
"""Up to this many experts in all layers together, the load is in metrics.jsonl itself."""
MAX_HEADER_BYTES, MAX_EXPERTS = 2**22, 2**24


class ExpertLoadWriter:
    """Appends records; creates the file with the first one."""

    def __init__(self, folder: str | os.PathLike[str], resume_from_step: int | None = None) -> None:
        self._path = Path(folder) / EXPERT_LOAD_FILE
        self._file: IO[bytes] | None = None
        self._layers: dict[str, int] = {}
        if resume_from_step is None:
            self._path.unlink(missing_ok=True)
        elif self._path.exists():
            self._resume(resume_from_step)

    def _resume(self, step: int) -> None:
        """Keep the records of steps up to `step`; a file that can't be read is replaced."""
        try:
            stored = ExpertLoads(self._path)
        except ValueError:
            self._path.unlink()
            return
        later = np.flatnonzero(stored.step_N > step)
        end = stored.offset_of(int(later[0]) if len(later) else len(stored.step_N))
        self._layers = stored.layers
        del stored, later  # some systems can't truncate a file while it is mapped
        os.truncate(self._path, end)

    def write(self, step: int, loads: Mapping[str, Sequence[float]]) -> None:
        layers = {layer: len(rows) for layer, rows in loads.items()}
        if self._file is None or layers != self._layers:
            self.close()
            is_new = layers != self._layers or not self._path.exists()
            self._file = open(self._path, "wb" if is_new else "ab", buffering=0)  # noqa: SIM115
            self._layers = layers
            if is_new:
                append(self._file, (json.dumps({"layers": layers}) + "\n").encode())
        counts = np.concatenate([np.asarray(rows, np.float64) for rows in loads.values()])
        append(self._file, np.int64(step).astype("<i8").tobytes() + counts.clip(0, 2**32 - 1).astype("<u4").tobytes())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class ExpertLoads:
    """The records of a file, mapped into memory; an incomplete record is ignored."""

    def __init__(self, path: Path) -> None:
        """A ValueError names the file and what is wrong with it."""
        try:
            with open_regular(path) as file:
                header = file.readline(MAX_HEADER_BYTES)
                num_bytes = os.fstat(file.fileno()).st_size
            self.layers = _layers(header)
        except OSError as error:
            raise ValueError(f"can't read '{path}': {reason(error)}") from None
        except ValueError as error:
            raise ValueError(f"'{path}' is damaged: {error}") from None
        num_experts = sum(self.layers.values())
        ends = np.cumsum(list(self.layers.values())).tolist()
        self._slices = {
            layer: slice(end - number, end) for (layer, number), end in zip(self.layers.items(), ends, strict=True)
        }
        record = np.dtype([("step", "<i8"), ("rows", "<u4", (num_experts,))])
        self._begin, self._itemsize = len(header), record.itemsize
        num_records = (num_bytes - len(header)) // record.itemsize
        self._records_N: Any = (
            np.memmap(path, record, mode="r", offset=len(header), shape=(num_records,))
            if num_records
            else np.empty(0, record)
        )
        self.step_N: npt.NDArray[np.int64] = self._records_N["step"]

    def offset_of(self, record: int) -> int:
        return self._begin + record * self._itemsize

    def of_record(self, record: int) -> LoadsOfStep:
        return LoadsOfStep(self._slices, self._records_N["rows"][record])


class LoadsOfStep(Mapping[str, npt.NDArray[np.uint32]]):
    """The rows of each expert by layer, sliced on access."""

    def __init__(self, slices: dict[str, slice], rows: npt.NDArray[np.uint32]) -> None:
        self._slices, self._rows = slices, rows

    def __getitem__(self, layer: str) -> npt.NDArray[np.uint32]:
        return self._rows[self._slices[layer]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._slices)

    def __len__(self) -> int:
        return len(self._slices)


def _layers(header: bytes) -> dict[str, int]:
    if not header.endswith(b"\n"):
        raise ValueError("it has no header")
    match parse_json(header):
        case {"layers": dict(layers)} if layers and all(
            type(number) is int and 0 < number <= MAX_EXPERTS for number in layers.values()
        ):
            if sum(layers.values()) <= MAX_EXPERTS:
                return layers
    raise ValueError("its header does not list layers and their numbers of experts")
