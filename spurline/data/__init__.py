"""Text to batches: sources, tokenizer, packing, loader. Importing this package does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spurline.config import Data
from spurline.data.sources import check_data

if TYPE_CHECKING:
    from spurline.data.loader import TrainBatches, ValidationBatches
    from spurline.data.tokenizer import ByteTokenizer

__all__ = ["DataSets", "check_data", "open_data"]


@dataclass(frozen=True)
class DataSets:
    tokenizer: ByteTokenizer
    train: TrainBatches
    validation: ValidationBatches | None
    """None when nothing is held out, or the text is too short for it."""
    num_documents: int
    num_tokens: int
    """Tokens of all documents, training and validation, with their boundaries."""


def open_data(data: Data, seq_len: int, seed: int) -> DataSets:
    """Read, pack and split the data set that `data` names; a ValueError says what is wrong with it."""
    from spurline.data.loader import TrainBatches, ValidationBatches
    from spurline.data.packing import pack
    from spurline.data.sources import read_documents
    from spurline.data.tokenizer import ByteTokenizer

    tokenizer = ByteTokenizer()
    packed = pack(read_documents(data), tokenizer, seq_len, data.validation_fraction)
    return DataSets(
        tokenizer=tokenizer,
        train=TrainBatches(packed.train, seed),
        validation=ValidationBatches(packed.validation) if packed.validation is not None else None,
        num_documents=packed.num_documents,
        num_tokens=packed.num_tokens,
    )
