"""Readers that turn a file into documents: plain text, JSONL (both optionally .gz or .zst) and Parquet. Torch-free.

Readers stream a file in pieces, and call `advance` with the number of file bytes consumed since the last call.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from spurline.data.parquet_files import import_pyarrow, parquet_rows
from spurline.untrusted import lines

PIECE_BYTES = 2**18
MAX_DOCUMENT_BYTES = 2**26
"""Maximum size of one line, after decompression."""
MAX_EXPANDED_BYTES, MAX_EXPANSION = 2**28, 200
"""A compressed file that expands to more than MAX_EXPANDED_BYTES must not exceed MAX_EXPANSION times its size."""
_TEXT_SUFFIXES = (".jsonl", ".ndjson")

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Document:
    name: str
    """Path within the dataset, with forward slashes; its hash determines order and train/validation split."""
    text: str
    is_rest: bool = False
    """Whether this continues the previous document: large files are read in several pieces."""


def read_file(path: str, name: str, text_field: str, advance: Advance) -> Iterator[Document]:
    """The non-empty documents of a file, whose format is determined by its name."""
    if name.endswith(".parquet"):
        return _read_parquet(path, name, text_field, advance)
    if is_jsonl(name):
        return _read_jsonl(path, name, text_field, advance)
    return _read_text(path, name, advance)


def is_jsonl(name: str) -> bool:
    return name.removesuffix(".gz").removesuffix(".zst").endswith(_TEXT_SUFFIXES)


def _read_text(path: str, name: str, advance: Advance) -> Iterator[Document]:
    """The file as one document, in pieces that end at line breaks."""
    rest, offset, is_rest = b"", 0, False
    with _opened(path, advance) as file:
        while chunk := file.read(PIECE_BYTES):
            content = rest + chunk
            cut = _last_cut(content) if len(content) >= PIECE_BYTES else 0
            if cut:
                yield Document(name, _decode(content[:cut], path, offset), is_rest)
                is_rest = True
            rest, offset = content[cut:], offset + cut
        if rest:
            yield Document(name, _decode(rest, path, offset), is_rest)


def _last_cut(content: bytes) -> int:
    """The offset at which the last line begins, or without line breaks the last word, or else the last character."""
    if cut := content.rfind(b"\n") + 1 or content.rfind(b" ") + 1:
        return cut
    at_most_4_bytes = range(len(content) - 1, len(content) - 5, -1)
    return next((i for i in at_most_4_bytes if content[i] & 0xC0 != 0x80), len(content))


def _decode(content: bytes, path: str, offset: int) -> str:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        what, where = f"byte 0x{content[error.start]:02x}", error.start
    else:
        what, where = "a NUL byte", content.find(0)
        if where < 0:
            return text
    raise ValueError(
        f"data.path: {path!r} is not UTF-8 text ({what} at offset {offset + where}): convert it or,"
        " in a folder, exclude it with data.pattern (such as *.md)"
    )


def _read_jsonl(path: str, name: str, text_field: str, advance: Advance) -> Iterator[Document]:
    """One document per line."""
    for number, record in jsonl_records(path, advance):
        if text := _field_of_record(record, text_field, f"data.path: {path!r}, line {number}"):
            yield Document(f"{name}:{number}", text)


def jsonl_records(path: str, advance: Advance) -> Iterator[tuple[int, Any]]:
    """The value of each line that is not blank, with the line's number."""
    offset = 0
    with _opened(path, advance) as file:
        for number, line in enumerate(_bounded_lines(file, path), start=1):
            where = f"data.path: {path!r}, line {number}"
            try:
                decoded = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                what = f"byte 0x{line[error.start]:02x} at offset {offset + error.start}"
                raise ValueError(f"{where}: not UTF-8 ({what})") from None
            offset += len(line)
            if not decoded.isspace():
                yield number, _parsed(decoded, where)


def _bounded_lines(file: BinaryIO, path: str) -> Iterator[bytes]:
    """Decompressed lines, one at a time, each of at most MAX_DOCUMENT_BYTES."""
    try:
        yield from lines(file, MAX_DOCUMENT_BYTES)
    except ValueError as error:
        raise ValueError(f"data.path: {path!r}: {error}, the most that one document may have") from None


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON (column {error.colno}: {error.msg.removesuffix(' at')})") from None
    except RecursionError:
        raise ValueError(f"{where}: JSON is nested too deeply") from None
    except ValueError:
        raise ValueError(f"{where}: not JSON (a number has too many digits)") from None


def _field_of_record(record: Any, text_field: str, where: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: not a JSON object with a field {text_field!r}")
    if text_field not in record:
        has = ", ".join(map(repr, record)) or "no field"
        is_chat = "messages" in record or {"prompt", "completion"} <= record.keys()
        instead = (
            "conversations are read with --data.kind chat, and are not prepared"
            if is_chat
            else "choose one with data.text_field"
        )
        raise ValueError(f"{where}: no field {text_field!r} (it has {has}): {instead}")
    return checked_text(record[text_field], text_field, where)


def checked_text(value: Any, text_field: str, where: str) -> str:
    """The value of a text field; null becomes an empty string."""
    if value is None:
        return ""
    if not isinstance(value, str):
        instead = "read conversations with --data.kind chat" if isinstance(value, list) else "choose another field"
        raise ValueError(f"{where}: {text_field!r} is {type(value).__name__}, not text: {instead} (data.text_field)")
    return value


def _read_parquet(path: str, name: str, text_field: str, advance: Advance) -> Iterator[Document]:
    """One document per row."""
    where = f"data.path: {path!r}"

    def check(columns: list[str]) -> None:
        if text_field not in columns:
            has = ", ".join(map(repr, columns))
            raise ValueError(f"{where}: no column {text_field!r} (it has {has}): choose with data.text_field")

    for row, record in parquet_rows(path, [text_field], advance, check):
        if text := checked_text(record[text_field], text_field, f"{where}, row {row}"):
            yield Document(f"{name}:{row}", text)


class _CountedFile(io.FileIO):
    """Reports the bytes read from disk, before any decompression or buffering."""

    advance: Advance

    def readinto(self, buffer: Any) -> int:
        num_bytes = super().readinto(buffer) or 0
        self.advance(num_bytes)
        return num_bytes


@contextmanager
def _opened(path: str, advance: Advance) -> Iterator[BinaryIO]:
    """Open a file, decompressing by its suffix; read errors become ValueErrors."""
    try:
        with _CountedFile(path) as raw:
            raw.advance = advance
            yield _decompressed(io.BufferedReader(raw), path)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"data.path: can't read {path!r}: {reason}") from None


def _decompressed(file: BinaryIO, path: str) -> BinaryIO:
    if path.endswith(".gz"):
        return io.BufferedReader(_Expanded(gzip.GzipFile(fileobj=file), path))
    if path.endswith(".zst"):
        stream = import_pyarrow(".zst files").CompressedInputStream(file, "zstd")
        return io.BufferedReader(_Expanded(stream, path))
    return file


class _Expanded(io.RawIOBase):
    """Reads a stream that is decompressed; an OSError when it expands to far more than the size of its file."""

    def __init__(self, stream: Any, path: str) -> None:
        self._stream = stream
        self._limit = max(MAX_EXPANDED_BYTES, MAX_EXPANSION * os.path.getsize(path))
        self._num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        num_bytes: int = self._stream.readinto(buffer)
        self._num_bytes += num_bytes
        if self._num_bytes > self._limit:
            raise OSError(f"it expands to more than {self._limit:,} bytes: decompress it if that is intended")
        return num_bytes
