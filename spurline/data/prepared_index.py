"""The index of a folder of prepared data: what it holds, and whether its files are whole. Free of torch and numpy.

spurline-data.json            this index
tokenizer.json                the tokenizer, unless a token is a byte
source0-00000.tokens          ids, little-endian, of the dtype that the index names; every document after a boundary
source0.documents             for each document, little-endian: its first token in the source (int64), and the
                              hash of its name (uint64) that decides on which side of a split it falls
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
    """As it was given."""
    weight: str
    """How often the source is read, against the others; empty: as its size is."""
    num_documents: int
    num_tokens: int
    documents: StoredFile
    shards: list[StoredFile]


@dataclass(frozen=True)
class Index:
    version: int
    dtype: str
    """Of the ids: uint16 or uint32."""
    tokenizer_fingerprint: str
    boundary_token: str
    """Empty where a token is a byte."""
    vocab_size: int
    tokenizer: StoredFile | None
    sources: list[PreparedSource]

    @property
    def files(self) -> Iterator[StoredFile]:
        """Every file that the index vouches for."""
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
    """The index of a folder whose files all have the size they should; a ValueError names what is wrong with it."""
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
        raise ValueError(f"there are no ids of type {content['dtype']}")
    return Index(**{**content, "tokenizer": tokenizer, "sources": sources})


def size_problem(folder: str, stored: StoredFile) -> str:
    """In what way a file isn't as large as it should be, or nothing."""
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
    """In what way a file isn't what was written, or nothing; `advance` is told the bytes as they are read."""
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
    return "" if digest.hexdigest() == stored.sha256 else f"{path!r} is damaged: its checksum is not that of the index"
