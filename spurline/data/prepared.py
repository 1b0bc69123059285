"""Prepared data: memory-mapped token files. Torch-free."""

from __future__ import annotations

import os

import numpy as np

from spurline.data.prepared_index import TOKENIZER_FILE, Index, PreparedSource
from spurline.data.stream import DocumentStream
from spurline.data.tokenizer import ByteTokenizer, Tokenizer

DOCUMENT = np.dtype([("start", "<i8"), ("hash", "<u8")])
"""Record of a document: position of its first token, and the hash that determines the train/validation split."""


def open_source(folder: str, index: Index, source: PreparedSource) -> DocumentStream:
    """The memory-mapped tokens of one source of a prepared folder."""
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
