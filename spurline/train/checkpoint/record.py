"""checkpoint.json: what a checkpoint is of, and the size and checksum of each of its files. Free of torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spurline.data.prepared_index import StoredFile
from spurline.files import sync

RECORD = "checkpoint.json"
VERSION = 1


@dataclass(frozen=True)
class CheckpointRecord:
    """What is known about a checkpoint without reading its tensors."""

    step: int
    num_ranks: int
    """The number of ranks that wrote it."""
    tokens_seen: int | None
    validation_loss: float | None
    """At this step; None if it was not measured."""
    best_validation_loss: float | None
    """Of the run so far."""
    model: dict[str, Any] | None
    """The model's config."""
    files: list[StoredFile]
    version: int = VERSION


def write_record(folder: Path, record: CheckpointRecord) -> None:
    """Write it into the temporary folder of a checkpoint, which is published as a whole."""
    content, path = dataclasses.asdict(record), folder / RECORD
    path.write_text(json.dumps({"sha256": _sha256(content), "checkpoint": content}, indent=2), encoding="utf-8")
    sync(path)


def read_record(folder: Path) -> CheckpointRecord:
    """What `write_record` wrote; a ValueError names the file and what is wrong with it."""
    path = folder / RECORD
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        content = stored["checkpoint"]
        if stored["sha256"] != _sha256(content):
            raise ValueError("its checksum is not that of its content")
    except OSError as error:
        raise ValueError(f"can't read '{path}': {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"'{path}' is damaged: {error}") from None
    if content["version"] != VERSION:
        raise ValueError(f"'{path}' has version {content['version']}, not {VERSION}")
    return CheckpointRecord(**{**content, "files": [StoredFile(**file) for file in content["files"]]})


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
