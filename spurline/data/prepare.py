"""Tokenize text into a prepared folder, atomically and with several processes. Torch-free."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from fractions import Fraction
from functools import partial

from spurline.config import Data
from spurline.data.formats import Advance, Document
from spurline.data.packing import stream_of
from spurline.data.prepared_index import TOKENIZER_FILE, VERSION, Index, PreparedSource, StoredFile, save_index
from spurline.data.sources import read_documents
from spurline.data.stream import document_table
from spurline.data.tokenizer import Tokenizer, token_dtype
from spurline.data.tokenizer_file import FileTokenizer
from spurline.data.workers import map_in_order
from spurline.files import new_folder

BATCH_CHARACTERS = 2**20
SHARD_TOKENS = 2**27


def prepare(
    sources: Sequence[Data],
    out: str,
    tokenizer: Tokenizer,
    weights: Sequence[Fraction] = (),
    num_workers: int = 1,
    advance: Callable[[Data, int], None] = lambda source, amount: None,
) -> Index:
    """Tokenize the sources, one path each, into the folder `out`, which must be new or empty.

    The output does not depend on the number of workers or the machine. `advance(source, amount)` reports how much of
    `source_size` was read. On any error nothing is written.
    """
    out = os.path.abspath(os.path.expanduser(out))
    if problem := folder_problem(out):
        raise ValueError(problem)
    shares = [str(weight) for weight in weights] or [""] * len(sources)
    try:
        # The temporary folder has a hidden name, so that it is not read if `out` lies inside a source.
        with new_folder(out) as folder:
            stored = [
                _write_source(str(folder), number, data, share, tokenizer, num_workers, partial(advance, data))
                for number, (data, share) in enumerate(zip(sources, shares, strict=True))
            ]
            return write_index(str(folder), tokenizer, stored)
    except OSError as error:
        raise ValueError(f"can't write {out!r}: {error.strerror or error}. Nothing was written") from None


def folder_problem(out: str) -> str:
    """Why `out` can't be written, else an empty string."""
    try:
        names = os.listdir(out)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"can't write {out!r}: {error.strerror}"
    return f"{out!r} is not empty: choose another folder, or remove it first" if names else ""


def write_index(folder: str, tokenizer: Tokenizer, sources: list[PreparedSource]) -> Index:
    """Write the tokenizer and the index of all files, which complete a prepared folder."""
    index = Index(
        version=VERSION,
        dtype=token_dtype(tokenizer.vocab_size).name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        boundary_token=tokenizer.boundary_token if isinstance(tokenizer, FileTokenizer) else "",
        vocab_size=tokenizer.vocab_size,
        tokenizer=store_tokenizer(folder, tokenizer),
        sources=sources,
    )
    save_index(folder, index)
    return index


def store_tokenizer(folder: str, tokenizer: Tokenizer) -> StoredFile | None:
    """Write the tokenizer, unless it is the byte tokenizer."""
    if not isinstance(tokenizer, FileTokenizer):
        return None
    with closing(HashedFile(folder, TOKENIZER_FILE)) as file:
        file.write(tokenizer.content.encode())
    return file.stored()


def _write_source(
    folder: str, number: int, data: Data, weight: str, tokenizer: Tokenizer, num_workers: int, advance: Advance
) -> PreparedSource:
    batches = batches_of(read_documents(data, advance))
    num_documents = num_tokens = 0
    shards: list[StoredFile] = []
    with (
        closing(map_in_order(partial(stream_of, tokenizer=tokenizer), batches, num_workers)) as tokenized,
        closing(HashedFile(folder, f"source{number}.documents")) as documents,
    ):
        stream = next(tokenized, None)
        while stream is not None:
            with closing(HashedFile(folder, f"source{number}-{len(shards):05}.tokens")) as shard:
                shard_end = num_tokens + SHARD_TOKENS
                while stream is not None and num_tokens < shard_end:
                    (part,) = stream.parts
                    tokens_N = part[:]
                    shard.write(tokens_N.tobytes())
                    documents.write(document_table(stream, num_tokens).tobytes())
                    num_tokens += len(tokens_N)
                    num_documents += len(stream.start_D)
                    stream = next(tokenized, None)
            shards.append(shard.stored())
    return PreparedSource(data.path, weight, num_documents, num_tokens, documents.stored(), shards)


def batches_of(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Group documents into batches for the workers, at boundaries that depend only on document sizes."""
    batch: list[Document] = []
    num_characters = 0
    for document in documents:
        batch.append(document)
        num_characters += len(document.text)
        if num_characters >= BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


class HashedFile:
    """A new file that computes its checksum while it is written, and is flushed to disk when closed."""

    def __init__(self, folder: str, name: str) -> None:
        self._name = name
        self._num_bytes = 0
        self._digest = hashlib.sha256()
        self._file = open(os.path.join(folder, name), "xb")  # noqa: SIM115 (close() closes it)

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._digest.update(content)
        self._num_bytes += len(content)

    def close(self) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def stored(self) -> StoredFile:
        return StoredFile(self._name, self._num_bytes, self._digest.hexdigest())
