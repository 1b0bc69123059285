"""One file into documents: plain text, JSONL (both also as .gz and .zst) and Parquet. Free of torch.

A reader holds a piece of a file at a time, and calls `advance` with the bytes of the file that it has come further.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

PIECE_BYTES = 2**18
_TEXT_SUFFIXES = (".jsonl", ".ndjson")

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Document:
    name: str
    """Path within the data set, with forward slashes: it decides the place in the order and the side of the split."""
    text: str
    is_rest: bool = False
    """A further piece of the document before: large text comes in several."""


def read_file(path: str, name: str, text_field: str, advance: Advance) -> Iterator[Document]:
    """The documents of a file, which its name tells how to read; those without text are left out."""
    if name.endswith(".parquet"):
        return _read_parquet(path, name, text_field, advance)
    if name.removesuffix(".gz").removesuffix(".zst").endswith(_TEXT_SUFFIXES):
        return _read_jsonl(path, name, text_field, advance)
    return _read_text(path, name, advance)


def _read_text(path: str, name: str, advance: Advance) -> Iterator[Document]:
    """The file as one document, in pieces that end with a line."""
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
    """Where the last line, or else word, or else character begins."""
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
        " in a folder, leave it out with data.pattern (such as *.md)"
    )


def _read_jsonl(path: str, name: str, text_field: str, advance: Advance) -> Iterator[Document]:
    """A document for each line."""
    offset = 0
    with _opened(path, advance) as file:
        for number, line in enumerate(file, start=1):
            where = f"data.path: {path!r}, line {number}"
            try:
                decoded = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                what = f"byte 0x{line[error.start]:02x} at offset {offset + error.start}"
                raise ValueError(f"{where}: not UTF-8 ({what})") from None
            offset += len(line)
            if not decoded.isspace():
                text = _field_of_line(decoded, text_field, where)
                if text:
                    yield Document(f"{name}:{number}", text)


def _field_of_line(line: str, text_field: str, where: str) -> str:
    try:
        record = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON (column {error.colno}: {error.msg.removesuffix(' at')})") from None
    except RecursionError:
        raise ValueError(f"{where}: not JSON that can be read (nested too deeply)") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: not a JSON object with a field {text_field!r}")
    if text_field not in record:
        has = ", ".join(map(repr, record)) or "no field"
        raise ValueError(f"{where}: no field {text_field!r} (it has {has}): choose one with data.text_field")
    return checked_text(record[text_field], text_field, where)


def checked_text(value: Any, text_field: str, where: str) -> str:
    """The value of a text field, empty for null."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{where}: {text_field!r} is not text but {type(value).__name__}: choose with data.text_field")
    return value


def _read_parquet(path: str, name: str, text_field: str, advance: Advance) -> Iterator[Document]:
    """A document for each row."""
    pyarrow = import_pyarrow("Parquet files")
    from pyarrow.parquet import ParquetFile

    where = f"data.path: {path!r}"
    row = 0
    try:
        with open(path, "rb") as file, ParquetFile(file) as table:
            if text_field not in table.schema_arrow.names:
                columns = ", ".join(map(repr, table.schema_arrow.names))
                raise ValueError(f"{where}: no column {text_field!r} (it has {columns}): choose with data.text_field")
            bytes_per_row = file.seek(0, io.SEEK_END) / max(1, table.metadata.num_rows)
            for batch in table.iter_batches(batch_size=256, columns=[text_field]):
                for value in batch.column(0).to_pylist():
                    if text := checked_text(value, text_field, f"{where}, row {row}"):
                        yield Document(f"{name}:{row}", text)
                    row += 1
                advance(int(row * bytes_per_row) - int((row - batch.num_rows) * bytes_per_row))
    except pyarrow.ArrowException as error:
        first_line = str(error).partition("\n")[0]
        raise ValueError(f"{where}: can't be read as Parquet after row {row}: {first_line}") from None
    except OSError as error:
        raise ValueError(f"{where}: can't be read after row {row}: {error.strerror or error}") from None


def import_pyarrow(what: str) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise ValueError(f"data.path: {what} need the package pyarrow: pip install 'spurline[data]'") from None
    return pyarrow


class _CountedFile(io.FileIO):
    """Tells how many bytes were read, whatever decompresses or buffers them afterwards."""

    advance: Advance

    def readinto(self, buffer: Any) -> int:
        num_bytes = super().readinto(buffer) or 0
        self.advance(num_bytes)
        return num_bytes


@contextmanager
def _opened(path: str, advance: Advance) -> Iterator[BinaryIO]:
    """The content of a file, decompressed where its name says so; a ValueError for whatever goes wrong in reading."""
    try:
        with _CountedFile(path) as raw:
            raw.advance = advance
            yield _decompressed(io.BufferedReader(raw), path)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"data.path: can't read {path!r}: {reason}") from None


def _decompressed(file: BinaryIO, path: str) -> BinaryIO:
    if path.endswith(".gz"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    if path.endswith(".zst"):
        return io.BufferedReader(import_pyarrow(".zst files").CompressedInputStream(file, "zstd"))
    return file
