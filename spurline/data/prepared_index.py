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
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from spurline.typed_json import from_json
from spurline.untrusted import is_plain_name, read_json, reason

INDEX_FILE = "spurline-data.json"
TOKENIZER_FILE = "tokenizer.json"
VERSION = 1
ITEMSIZES = {"uint16": 2, "uint32": 4}


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


def stored_file_problem(stored: StoredFile) -> str:
    """What is wrong with an entry of an untrusted index, else an empty string."""
    if not is_plain_name(stored.name):
        return f"{stored.name[:100]!r} is not the name of a file in the same folder"
    if stored.num_bytes < 0 or not re.fullmatch(r"[0-9a-f]{64}", stored.sha256):
        return f"size or checksum of {stored.name!r} is not valid"
    return ""


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
        content = read_json(path)
        version = content.get("version") if isinstance(content, dict) else None
        if type(version) is int and version != VERSION:
            raise ValueError(f"it has version {version}, not {VERSION}")
        index = from_json(Index, content)
        _check(index)
    except OSError as error:
        raise ValueError(f"data.path: can't read {path!r}: {reason(error)}") from None
    except ValueError as error:
        raise ValueError(f"data.path: {path!r} is damaged ({error}): prepare the data again") from None
    for stored in index.files if check_sizes else ():
        if problem := size_problem(folder, stored):
            raise ValueError(f"data.path: {problem}: prepare the data again")
    return index


def _check(index: Index) -> None:
    """Raise a ValueError for entries of the right types whose values are invalid."""
    if index.dtype not in ITEMSIZES:
        raise ValueError(f"invalid token dtype {index.dtype[:20]!r}")
    if not 0 < index.vocab_size <= 256 ** ITEMSIZES[index.dtype]:
        raise ValueError(f"a vocabulary of {index.vocab_size} tokens does not fit {index.dtype}")
    if not index.sources:
        raise ValueError("it has no sources")
    for stored in index.files:
        if problem := stored_file_problem(stored):
            raise ValueError(problem)
    names = [stored.name for stored in index.files]
    if len(set(names)) < len(names):
        raise ValueError("it lists a file twice")
    for source in index.sources:
        num_bytes = sum(shard.num_bytes for shard in source.shards)
        if not source.shards or num_bytes != source.num_tokens * ITEMSIZES[index.dtype]:
            raise ValueError(f"source {source.path[:100]!r} has {source.num_tokens} tokens in {num_bytes} bytes")
        if source.weight and not re.fullmatch(r"[0-9]{1,18}(/[1-9][0-9]{0,17})?", source.weight):
            raise ValueError(f"source {source.path[:100]!r} has the weight {source.weight[:20]!r}")


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


def content_problem(folder: str, stored: StoredFile, advance: Callable[[int], None] = lambda num_bytes: None) -> str:
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
