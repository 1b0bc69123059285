"""Tokenize a part of the sources on each of several machines, and join the parts. Torch-free.

OUT.parts/000003-of-000016/
    part.json               this part: its number, sources, options and checksums
    tokenizer.json          the tokenizer (absent with the byte tokenizer)
    source0.tokens          token ids of its pieces of the source, as in a prepared folder
    source0.pieces          per piece, little-endian: tokens, characters, hash of the document's name, and whether it
                            continues the previous piece; the join derives from these the shards of a single machine
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from spurline.config import Data
from spurline.data import prepare as whole
from spurline.data.formats import Advance, Document
from spurline.data.parts import Part, listing, read_part
from spurline.data.prepared_index import (
    ITEMSIZES,
    Index,
    PreparedSource,
    StoredFile,
    content_problem,
    stored_file_problem,
)
from spurline.data.stream import DOCUMENT, split_hash
from spurline.data.tokenizer import ByteTokenizer, Tokenizer, token_dtype
from spurline.data.tokenizer_file import FileTokenizer
from spurline.data.workers import map_in_order
from spurline.files import new_folder
from spurline.typed_json import from_json
from spurline.untrusted import read_json, reason

PART_FILE = "part.json"
SUFFIX = ".parts"
PIECE = np.dtype([("tokens", "<i8"), ("characters", "<i8"), ("hash", "<u8"), ("is_rest", "<u8")])
Pieces = npt.NDArray[np.void]


@dataclass(frozen=True)
class PartOfSource:
    path: str
    listing: str
    """Hash of the names and sizes in the full source, when this part was read."""
    pieces: StoredFile
    tokens: StoredFile


@dataclass(frozen=True)
class PreparedPart:
    part: int
    parts: int
    pattern: str
    text_field: str
    weights: list[str]
    dtype: str
    tokenizer_fingerprint: str
    boundary_token: str
    vocab_size: int
    tokenizer: StoredFile | None
    sources: list[PartOfSource]

    @property
    def files(self) -> Iterator[StoredFile]:
        if self.tokenizer:
            yield self.tokenizer
        for source in self.sources:
            yield from (source.pieces, source.tokens)


def prepare_part(
    sources: Sequence[Data],
    out: str,
    part: Part,
    tokenizer: Tokenizer,
    weights: Sequence[Fraction] = (),
    num_workers: int = 1,
    advance: Callable[[Data, int], None] = lambda source, amount: None,
) -> str:
    """Tokenize one part of the sources; returns its folder. On any error nothing is written."""
    target = part_folder(out, part)
    if problem := whole.folder_problem(target):
        raise ValueError(problem)
    try:
        with new_folder(target) as folder:
            stored = [
                _write_part(str(folder), number, data, part, tokenizer, num_workers, partial(advance, data))
                for number, data in enumerate(sources)
            ]
            content = PreparedPart(
                part=part.number,
                parts=part.total,
                pattern=sources[0].pattern,
                text_field=sources[0].text_field,
                weights=[str(weight) for weight in weights],
                dtype=token_dtype(tokenizer.vocab_size).name,
                tokenizer_fingerprint=tokenizer.fingerprint,
                boundary_token=tokenizer.boundary_token if isinstance(tokenizer, FileTokenizer) else "",
                vocab_size=tokenizer.vocab_size,
                tokenizer=whole.store_tokenizer(str(folder), tokenizer),
                sources=stored,
            )
            (folder / PART_FILE).write_text(json.dumps(dataclasses.asdict(content), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"can't write {target!r}: {error.strerror or error}. Nothing was written") from None
    return target


def part_folder(out: str, part: Part) -> str:
    return os.path.join(os.path.abspath(os.path.expanduser(out)) + SUFFIX, part.folder)


def _write_part(
    folder: str, number: int, data: Data, part: Part, tokenizer: Tokenizer, num_workers: int, advance: Advance
) -> PartOfSource:
    seen = listing(data)
    batches = whole.batches_of(read_part(data, part, advance))
    with (
        closing(map_in_order(partial(_tokenize, tokenizer=tokenizer), batches, num_workers)) as tokenized,
        closing(whole.HashedFile(folder, f"source{number}.tokens")) as tokens,
        closing(whole.HashedFile(folder, f"source{number}.pieces")) as pieces,
    ):
        for ids, table in tokenized:
            tokens.write(ids)
            pieces.write(table)
    return PartOfSource(data.path, seen, pieces.stored(), tokens.stored())


def _tokenize(documents: list[Document], tokenizer: Tokenizer) -> tuple[bytes, bytes]:
    """The token ids of some pieces, each document preceded by a boundary token, and the table of the pieces."""
    boundary = np.array([tokenizer.boundary_id], token_dtype(tokenizer.vocab_size)).tobytes()
    table_P = np.zeros(len(documents), PIECE)
    content = []
    for row, document in zip(table_P, documents, strict=True):
        tokens_N = tokenizer.encode(document.text)
        row["tokens"] = len(tokens_N) + (not document.is_rest)
        row["characters"], row["is_rest"] = len(document.text), document.is_rest
        row["hash"] = 0 if document.is_rest else split_hash(document.name)
        content += [tokens_N.tobytes()] if document.is_rest else [boundary, tokens_N.tobytes()]
    return b"".join(content), table_P.tobytes()


def join_parts(out: str, advance: Callable[[int], None] = lambda num_bytes: None) -> Index:
    """Join all parts into the folder `out`, byte for byte as a single machine would have written it."""
    out = os.path.abspath(os.path.expanduser(out))
    if problem := whole.folder_problem(out):
        raise ValueError(problem)
    folders = find_parts(out)
    parts = [load_part(folder) for folder in folders]
    for folder, part in zip(folders, parts, strict=True):
        _check_alike(folder, parts[0], part)
        for stored in part.files:
            # A part may have nothing of a source: an empty file is damaged only if bytes were recorded for it.
            is_empty = not stored.num_bytes and not os.path.getsize(os.path.join(folder, stored.name))
            if not is_empty and (problem := content_problem(folder, stored, advance)):
                raise ValueError(f"{problem}: prepare this part again")
    first = parts[0]
    weights = first.weights or [""] * len(first.sources)
    try:
        with new_folder(out) as new:
            sources = [_join_source(str(new), number, folders, parts, weight) for number, weight in enumerate(weights)]
            return whole.write_index(str(new), _tokenizer_of(folders[0], first), sources)
    except OSError as error:
        raise ValueError(f"can't write {out!r}: {error.strerror or error}. Nothing was written") from None


def _tokenizer_of(folder: str, part: PreparedPart) -> Tokenizer:
    if part.tokenizer is None:
        return ByteTokenizer()
    return FileTokenizer.load(os.path.join(folder, part.tokenizer.name), part.boundary_token)


def find_parts(out: str) -> list[str]:
    """The folders of all parts, in order; raises a ValueError if parts are missing or there are too many."""
    parent = out + SUFFIX
    try:
        names = sorted(name for name in os.listdir(parent) if not name.startswith("."))
    except OSError:
        names = []
    totals = sorted({int(name.rpartition("-")[2]) for name in names if name.rpartition("-")[2].isdigit()})
    if not totals:
        first = f"`spurline data prepare SOURCE --out {out} --part 1/N`"
        raise ValueError(f"{parent!r} has no parts: run {first} and so on")
    if len(totals) > 1:
        raise ValueError(f"{parent!r} has parts of {' and of '.join(map(str, totals))}: remove those of all but one")
    wanted = [Part(number, totals[0]) for number in range(1, totals[0] + 1)]
    missing = [str(part.number) for part in wanted if part.folder not in names]
    if missing:
        which = f"part {missing[0]} is" if len(missing) == 1 else f"parts {', '.join(missing)} are"
        raise ValueError(f"{parent!r}: {which} missing of {totals[0]}")
    return [os.path.join(parent, part.folder) for part in wanted]


def load_part(folder: str) -> PreparedPart:
    path = os.path.join(folder, PART_FILE)
    try:
        part = from_json(PreparedPart, read_json(path))
        for stored in part.files:
            if problem := stored_file_problem(stored):
                raise ValueError(problem)
        if part.dtype not in ITEMSIZES:
            raise ValueError(f"invalid token dtype {part.dtype[:20]!r}")
    except OSError as error:
        raise ValueError(f"can't read {path!r}: {reason(error)}") from None
    except ValueError as error:
        raise ValueError(f"{path!r} is damaged ({error}): prepare this part again") from None
    return part


def _check_alike(folder: str, first: PreparedPart, other: PreparedPart) -> None:
    """Raise a ValueError if a part was made with other options or from other data than the first one."""
    if Part(other.part, other.parts).folder != os.path.basename(folder):
        raise ValueError(f"{folder!r} is part {other.part} of {other.parts}: it was renamed")
    named = {
        "sources": [source.path for source in first.sources] != [source.path for source in other.sources],
        "--tokenizer": first.tokenizer_fingerprint != other.tokenizer_fingerprint,
        "--pattern": first.pattern != other.pattern,
        "--text_field": first.text_field != other.text_field,
        "--weights": first.weights != other.weights,
    }
    if differing := [name for name, differs in named.items() if differs]:
        what = " and ".join(differing)
        raise ValueError(f"part {other.part} was prepared with other {what} than part 1: prepare it again")
    for one, another in zip(first.sources, other.sources, strict=True):
        if one.listing != another.listing:
            when = f"when part {other.part} was prepared than when part 1 was"
            raise ValueError(f"{one.path!r} had other files {when}: prepare all parts again")


def _join_source(
    folder: str, number: int, folders: list[str], parts: list[PreparedPart], weight: str
) -> PreparedSource:
    sources = [part.sources[number] for part in parts]
    tables = [os.path.join(where, source.pieces.name) for where, source in zip(folders, sources, strict=True)]
    pieces_P: Pieces = np.concatenate([np.fromfile(path, PIECE) for path in tables])
    if not len(pieces_P):
        raise ValueError(f"{sources[0].path!r} has no text: all documents are empty")
    itemsize = ITEMSIZES[parts[0].dtype]
    paths = [os.path.join(where, source.tokens.name) for where, source in zip(folders, sources, strict=True)]
    shards = []
    with closing(_Concatenated(paths)) as tokens:
        for shard_number, num_tokens in enumerate(shard_sizes(pieces_P)):
            with closing(whole.HashedFile(folder, f"source{number}-{shard_number:05}.tokens")) as shard:
                for chunk in tokens.read(num_tokens * itemsize):
                    shard.write(chunk)
            shards.append(shard.stored())
    with closing(whole.HashedFile(folder, f"source{number}.documents")) as documents:
        documents.write(documents_of(pieces_P).tobytes())
    num_tokens, num_documents = int(pieces_P["tokens"].sum()), int((pieces_P["is_rest"] == 0).sum())
    return PreparedSource(sources[0].path, weight, num_documents, num_tokens, documents.stored(), shards)


def shard_sizes(pieces_P: Pieces) -> Iterator[int]:
    """The number of tokens in each shard, as a single machine would have cut them: at the end of a worker's batch."""
    in_shard = in_batch = characters = 0
    for tokens, more in zip(pieces_P["tokens"].tolist(), pieces_P["characters"].tolist(), strict=True):
        in_batch += tokens
        characters += more
        if characters >= whole.BATCH_CHARACTERS:
            in_shard, in_batch, characters = in_shard + in_batch, 0, 0
            if in_shard >= whole.SHARD_TOKENS:
                yield in_shard
                in_shard = 0
    if in_shard + in_batch:
        yield in_shard + in_batch


def documents_of(pieces_P: Pieces) -> npt.NDArray[np.void]:
    """The document table of a source, from its table of pieces."""
    start_P = np.concatenate([[0], np.cumsum(pieces_P["tokens"])[:-1]])
    is_first_P = pieces_P["is_rest"] == 0
    table_D = np.empty(int(is_first_P.sum()), DOCUMENT)
    table_D["start"], table_D["hash"] = start_P[is_first_P], pieces_P["hash"][is_first_P]
    return table_D


class _Concatenated:
    """Files read as one concatenated stream."""

    def __init__(self, paths: list[str]) -> None:
        self._paths = iter(paths)
        self._file: BinaryIO | None = None

    def read(self, num_bytes: int) -> Iterator[bytes]:
        """The next `num_bytes` bytes, in chunks."""
        while num_bytes:
            if self._file is None:
                self._file = open(next(self._paths), "rb")  # noqa: SIM115 (closed below)
            chunk = self._file.read(min(num_bytes, 2**20))
            if chunk:
                num_bytes -= len(chunk)
                yield chunk
            else:
                self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
