"""Text datasets: one path or a mixture of several, prepared or raw, as an infinite order of windows. Torch-free."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from spurline.config import Data
from spurline.data.hf_datasets import is_dataset
from spurline.data.mixture import SampleOrder
from spurline.data.packing import JoinedWindows, Packed, Windows, pack, pack_stream
from spurline.data.prepared import open_source
from spurline.data.prepared_index import is_prepared, load_index
from spurline.data.sources import combined_hash, each_path, read_documents, source_size
from spurline.data.tokenizer import Tokenizer, tokenizer_for

LARGE_BYTES = 256 * 10**6


@dataclass(frozen=True)
class TextData:
    tokenizer: Tokenizer
    train: JoinedWindows
    order: SampleOrder
    """Order in which the training windows are read."""
    validation: JoinedWindows | None
    num_documents: int
    num_tokens: int
    fingerprint: Callable[[], str]
    """A hash of all documents, in their order."""


def open_text(data: Data, seq_len: int, seed: int) -> TextData:
    """Read raw sources, memory-map prepared ones, and split each into training and validation windows."""
    tokenizer = tokenizer_for(data)
    packed: list[Packed] = []
    weights: list[Fraction] = []
    paths = each_path(data)
    if data.shares and len(data.shares) != len(paths):
        raise ValueError(f"data.weights has {len(data.shares)} numbers, but data.path has {len(paths)} paths")
    for number, one in enumerate(paths):
        of_path, inner_weights = _open_path(one, tokenizer, seq_len)
        sizes = [Fraction(len(source.train)) for source in of_path]
        inner_weights = inner_weights or sizes
        weight = data.shares[number] if data.shares else sum(sizes)
        packed += of_path
        weights += [weight * inner / sum(inner_weights) for inner in inner_weights]
    train = JoinedWindows([source.train for source in packed])
    held_out: list[Windows] = [source.validation for source in packed if source.validation is not None]
    return TextData(
        tokenizer=tokenizer,
        train=train,
        order=SampleOrder(train.part_sizes, weights, seed),
        validation=JoinedWindows(held_out) if held_out else None,
        num_documents=sum(source.num_documents for source in packed),
        num_tokens=sum(source.num_tokens for source in packed),
        fingerprint=lambda: combined_hash(source.stream.fingerprint() for source in packed),
    )


def _open_path(data: Data, tokenizer: Tokenizer, seq_len: int) -> tuple[list[Packed], Sequence[Fraction]]:
    """The sources of a path, and the sampling weights they were prepared with, if any."""
    folder = os.path.expanduser(data.path)
    if not is_prepared(folder):
        _mention_if_large(data)
        return [pack(read_documents(data), tokenizer, seq_len, data.validation_fraction, data.path)], []
    index = load_index(folder)
    if index.tokenizer_fingerprint != tokenizer.fingerprint:
        whose = f"data.tokenizer {data.tokenizer!r}" if data.tokenizer else "that of the other data"
        raise ValueError(
            f"data.path {folder!r} was prepared with a different tokenizer than {whose}: prepare it with the same one"
        )
    packed = [
        pack_stream(
            open_source(folder, index, source), tokenizer.boundary_id, seq_len, data.validation_fraction, source.path
        )
        for source in index.sources
    ]
    return packed, [Fraction(source.weight) for source in index.sources if source.weight]


def _mention_if_large(data: Data) -> None:
    if is_dataset(data.path):
        return  # its size in bytes is not known
    num_bytes = source_size(data) or 0
    if num_bytes > LARGE_BYTES and os.environ.get("RANK", "0") == "0":
        print(
            f"data: every rank reads and tokenizes {data.path} ({num_bytes / 1e9:.1f} GB) in memory at every start;"
            f" `spurline data prepare {data.path} --out FOLDER` does it once",
            file=sys.stderr,
        )
