"""Read the rows of Parquet files. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

MAX_ROW_GROUP_BYTES, MAX_EXPANSION = 2**30, 20
"""A row group larger than MAX_ROW_GROUP_BYTES must not exceed MAX_EXPANSION times its compressed size."""
MIN_ROWS, MAX_BATCHES = 256, 16
"""A row group is read in up to MAX_BATCHES batches of at least MIN_ROWS rows, and a rest."""
MAX_FIXED_BYTES = 64
"""The longest values of a column of fixed-size bytes; decimals and UUIDs are shorter."""


def parquet_rows(
    path: str,
    wanted: Sequence[str],
    advance: Callable[[int], None] = lambda num_bytes: None,
    check: Callable[[list[str]], None] = lambda columns: None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row with its number, as a dict of the wanted columns that the file has.

    `check` may refuse the columns of the file; `advance` gets the number of bytes read since the last call.
    """
    pyarrow = import_pyarrow("Parquet files")
    from pyarrow.parquet import ParquetFile

    where, row = f"data.path: {path!r}", 0
    try:
        with ParquetFile(path) as table:
            check(table.schema_arrow.names)
            names = [name for name in wanted if name in table.schema_arrow.names]
            texts = _checked_texts(table, names, where)
            bytes_per_row = os.path.getsize(path) / max(1, table.metadata.num_rows)
        # A dictionary stores repeated values once. Without it, a few hundred bytes of a file can become gigabytes.
        with ParquetFile(path, read_dictionary=texts) as table:
            for batch in _batches(table, names):
                columns = {
                    name: _values(column, where) for name, column in zip(batch.schema.names, batch.columns, strict=True)
                }
                begin = row
                for row in range(begin, begin + batch.num_rows):
                    yield row, {name: next(values) for name, values in columns.items()}
                row = begin + batch.num_rows
                advance(int(row * bytes_per_row) - int(begin * bytes_per_row))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, IndexError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition("\n")[0]
        raise ValueError(f"{where}: can't be read as Parquet after row {row}: {reason}") from None


def _checked_texts(table: Any, names: Sequence[str], where: str) -> list[str]:
    """The paths of text and bytes in these columns, at any depth; refuses what expands to far more than its size."""
    leaves = [table.schema.column(number) for number in range(len(table.schema))]
    found = [number for number, leaf in enumerate(leaves) if any(_is_in(leaf.path, name) for name in names)]
    for leaf in (leaves[number] for number in found):
        if leaf.physical_type == "FIXED_LEN_BYTE_ARRAY" and leaf.length > MAX_FIXED_BYTES:
            raise ValueError(f"{where}: {leaf.path!r} has values of {leaf.length:,} bytes, not text")
    for number in range(table.num_row_groups):
        group = table.metadata.row_group(number)
        num_bytes = sum(group.column(leaf).total_uncompressed_size for leaf in found)
        compressed = sum(group.column(leaf).total_compressed_size for leaf in found)
        if num_bytes > max(MAX_ROW_GROUP_BYTES, MAX_EXPANSION * compressed):
            raise ValueError(
                f"{where}: row group {number} has {num_bytes:,} bytes of {', '.join(map(repr, names))} in"
                f" {compressed:,} bytes of the file: write it again with smaller row groups"
            )
    return [leaves[number].path for number in found if leaves[number].physical_type == "BYTE_ARRAY"]


def _is_in(path: str, column: str) -> bool:
    return path == column or path.startswith(f"{column}.")


def _batches(table: Any, names: list[str]) -> Iterator[Any]:
    """Row group by row group: pyarrow can't join the dictionaries of nested columns."""
    for number in range(table.num_row_groups):
        # pyarrow adds to the dictionary what the file stores without one, and copies all of it for each batch.
        num_rows = max(MIN_ROWS, table.metadata.row_group(number).num_rows // MAX_BATCHES)
        yield from table.iter_batches(batch_size=num_rows, row_groups=[number], columns=names)


def _values(array: Any, where: str) -> Iterator[Any]:
    """The values of an array; repeats in a dictionary, at any depth, share one object."""
    from pyarrow import types

    if types.is_dictionary(array.type):
        dictionary, known = array.dictionary, {None: None}
        for index in array.indices.to_pylist():
            if index not in known:
                known[index] = dictionary[index].as_py()
            yield known[index]
    elif types.is_struct(array.type):
        fields = {array.type.field(i).name: _values(values, where) for i, values in enumerate(array.flatten())}
        for is_valid in array.is_valid().to_pylist():
            value = {name: next(values) for name, values in fields.items()}
            yield value if is_valid else None
    elif types.is_list(array.type) or types.is_large_list(array.type):
        items = _values(array.flatten(), where)
        for length in array.value_lengths().to_pylist():
            yield None if length is None else list(islice(items, length))
    elif types.is_nested(array.type):
        raise ValueError(f"{where}: a column is a {array.type}, which is not read here: write it as a list or a struct")
    else:
        yield from (value.as_py() for value in array)


def import_pyarrow(what: str) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise ValueError(f"data.path: {what} need the package pyarrow: pip install 'spurline[data]'") from None
    return pyarrow
