"""The index of a prepared folder: contents and checksums of its files. Imports neither torch nor numpy.

spurline-data.json            this index
tokenizer.json                the tokenizer (absent with the byte tokenizer)
source0-00000.tokens          token ids, little-endian, dtype as in the index; a boundary token precedes each document
source0.documents             per document, little-endian: position of its first token in the source (int64), and the
                              hash of its name (uint64), which determines the train/validation split
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

INDEX_FILE = "spurline-data.json"
TOKENIZER_FILE = "tokenizer.json"
VERSION = 1


@dataclass(frozen=True)
class StoredFile:
    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class PreparedSource:
    path: str
    """As given to `spurline data prepare`."""
    weight: str
    """Sampling weight relative to the other sources; empty: in proportion to size."""
    num_documents: int
    num_tokens: int
    documents: StoredFile
    shards: list[StoredFile]


@dataclass(frozen=True)
class Index:
    version: int
    dtype: str
    """Dtype of the token ids: uint16 or uint32."""
    tokenizer_fingerprint: str
    boundary_token: str
    """Empty with the byte tokenizer."""
    vocab_size: int
    tokenizer: StoredFile | None
    sources: list[PreparedSource]

    @property
    def files(self) -> Iterator[StoredFile]:
        """All files with a checksum in the index."""
        if self.tokenizer:
            yield self.tokenizer
        for source in self.sources:
            yield source.documents
            yield from source.shards


def is_prepared(path: str) -> bool:
    return bool(path) and os.path.isfile(os.path.join(path, INDEX_FILE))


def save_index(folder: str, index: Index) -> None:
    with open(os.path.join(folder, INDEX_FILE), "w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(index), file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def load_index(folder: str, check_sizes: bool = True) -> Index:
    """Load the index and check the file sizes; raises a ValueError if anything is damaged."""
    path = os.path.join(folder, INDEX_FILE)
    try:
        with open(path, encoding="utf-8") as file:
            index = _from_json(json.load(file))
    except OSError as error:
        raise ValueError(f"data.path: can't read {path!r}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"data.path: {path!r} is damaged ({error}): prepare the data again") from None
    if index.version != VERSION:
        raise ValueError(f"data.path: {path!r} has version {index.version}, not {VERSION}: prepare the data again")
    for stored in index.files if check_sizes else ():
        if problem := size_problem(folder, stored):
            raise ValueError(f"data.path: {problem}: prepare the data again")
    return index


def _from_json(content: dict) -> Index:
    sources = [
        PreparedSource(
            **{
                **source,
                "documents": StoredFile(**source["documents"]),
                "shards": [StoredFile(**shard) for shard in source["shards"]],
            }
        )
        for source in content["sources"]
    ]
    tokenizer = StoredFile(**content["tokenizer"]) if content["tokenizer"] else None
    if content["dtype"] not in ("uint16", "uint32"):
        raise ValueError(f"invalid token dtype {content['dtype']}")
    return Index(**{**content, "tokenizer": tokenizer, "sources": sources})


def size_problem(folder: str, stored: StoredFile) -> str:
    """The error if a file is missing or has the wrong size, else an empty string."""
    path = os.path.join(folder, stored.name)
    try:
        num_bytes = os.path.getsize(path)
    except OSError as error:
        return f"can't read {path!r}: {error.strerror}"
    if num_bytes == 0:
        return f"{path!r} is empty"
    if num_bytes != stored.num_bytes:
        return f"{path!r} has {num_bytes:,} bytes instead of {stored.num_bytes:,}"
    return ""


def content_problem(folder: str, stored: StoredFile, advance: Callable[[int], None]) -> str:
    """The error if a file has the wrong size or checksum, else an empty string; `advance` gets the bytes read."""
    if problem := size_problem(folder, stored):
        return problem
    path = os.path.join(folder, stored.name)
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while chunk := file.read(2**20):
                digest.update(chunk)
                advance(len(chunk))
    except OSError as error:
        return f"can't read {path!r}: {error.strerror}"
    return "" if digest.hexdigest() == stored.sha256 else f"{path!r} is damaged: its checksum differs from the index"
