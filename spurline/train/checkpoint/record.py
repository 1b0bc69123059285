"""checkpoint.json: what a checkpoint contains, and the size and checksum of each of its files. Free of torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spurline.data.prepared_index import StoredFile, stored_file_problem
from spurline.files import sync
from spurline.remote import RemotePath
from spurline.train.checkpoint.signature import is_signed, signature
from spurline.typed_json import ADDED_LATER, from_json
from spurline.untrusted import read_json, reason

RECORD = "checkpoint.json"
VERSION = 2
"""Version 1 used the pickles of torch.distributed.checkpoint; it can still be read (version1.py)."""


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
    extra: dict[str, Any] | None = field(default=None, metadata=ADDED_LATER)
    """The caller's plain data; in version 1 it is in a separate file."""
    version: int = VERSION

    @property
    def metadata_file(self) -> str:
        """The file that says where the tensors are."""
        return ".metadata" if self.version == 1 else "metadata.json"


def write_record(folder: Path | RemotePath, record: CheckpointRecord, sign_key: bytes | None = None) -> None:
    """Write the record into the temporary folder of a checkpoint, which is then published."""
    content, path = dataclasses.asdict(record), folder / RECORD
    signed = {"hmac_sha256": signature(_canonical(content), sign_key)} if sign_key else {}
    stored = {"sha256": _sha256(content), **signed, "checkpoint": content}
    path.write_text(json.dumps(stored, indent=2), encoding="utf-8")
    if isinstance(path, Path):
        sync(path)


def read_record(folder: Path | RemotePath, sign_key: bytes | None = None) -> CheckpointRecord:
    """What `write_record` wrote; a ValueError names the file and what is wrong with it.

    With a key, the signature is checked before anything else.
    """
    path = folder / RECORD
    try:
        stored = read_json(path)
        content = stored.get("checkpoint") if isinstance(stored, dict) else None
        if not isinstance(content, dict):
            raise ValueError("it is not the record of a checkpoint")
        if sign_key is not None:
            _check_signature(content, sign_key, stored.get("hmac_sha256"))
        if stored.get("sha256") != _sha256(content):
            raise ValueError("its checksum is not that of its content")
        version = content.get("version")
        if type(version) is int and version not in (1, VERSION):
            known = f"this Spurline reads versions 1 to {VERSION}"
            raise ValueError(f"it has version {version}, and {known}: use the one that wrote it")
        record = from_json(CheckpointRecord, content)
        _check(record)
    except OSError as error:
        raise ValueError(f"can't read '{path}': {reason(error)}") from None
    except ValueError as error:
        raise ValueError(f"'{path}' is damaged: {error}") from None
    return record


def _check_signature(content: dict[str, Any], sign_key: bytes, given: object) -> None:
    if given is None:
        raise ValueError("it is not signed, and a signature is required (sign_key_file)")
    if not is_signed(_canonical(content), sign_key, given):
        raise ValueError("it was signed with another key, or changed since")


def _check(record: CheckpointRecord) -> None:
    if record.step < 0 or record.num_ranks < 0:
        raise ValueError("step and num_ranks can't be negative")
    for stored in record.files:
        if problem := stored_file_problem(stored):
            raise ValueError(problem)
    if len({stored.name for stored in record.files}) < len(record.files):
        raise ValueError("it lists a file twice")


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _sha256(content: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(content)).hexdigest()
