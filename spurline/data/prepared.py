"""Prepared data: folders of memory-mapped tokens that training reads as they are. Free of torch."""

from __future__ import annotations

import os

import numpy as np

from spurline.data.prepared_index import TOKENIZER_FILE, Index, PreparedSource
from spurline.data.stream import DocumentStream
from spurline.data.tokenizer import ByteTokenizer, Tokenizer

DOCUMENT = np.dtype([("start", "<i8"), ("hash", "<u8")])
"""What is kept of a document: its first token in the stream, and the hash that decides its side of a split."""


def open_source(folder: str, index: Index, source: PreparedSource) -> DocumentStream:
    """The tokens of one of the sources in a prepared folder, memory-mapped."""
    dtype = np.dtype(index.dtype).newbyteorder("<")
    records_D = np.fromfile(os.path.join(folder, source.documents.name), DOCUMENT)
    return DocumentStream(
        parts=[np.memmap(os.path.join(folder, shard.name), dtype, mode="r") for shard in source.shards],
        start_D=np.ascontiguousarray(records_D["start"]),
        hash_D=np.ascontiguousarray(records_D["hash"]),
    )


def prepared_tokenizer(folder: str, index: Index) -> Tokenizer:
    """The tokenizer that the folder was prepared with."""
    if index.tokenizer is None:
        return ByteTokenizer()
    from spurline.data.tokenizer_file import FileTokenizer

    return FileTokenizer.load(os.path.join(folder, TOKENIZER_FILE), index.boundary_token)
