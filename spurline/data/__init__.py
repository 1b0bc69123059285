"""From text and images to batches: sources, tokenizers, packing, loaders. Importing this package is torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spurline.config import Data
from spurline.data.sources import check_data as check_text

if TYPE_CHECKING:
    from spurline.data.chat import Questions
    from spurline.data.loader import TrainBatches, ValidationBatches
    from spurline.data.tokenizer import Tokenizer

__all__ = ["DataSets", "check_data", "open_data"]


@dataclass(frozen=True)
class DataSets:
    tokenizer: Tokenizer
    train: TrainBatches
    validation: ValidationBatches | None
    """None if nothing is held out, or the text is too short to hold anything out."""
    num_documents: int
    num_tokens: int
    """Total tokens of training and validation documents, including boundary tokens."""
    fingerprint: Callable[[], str] = lambda: ""
    """Computes a hash of all documents: from the checksums of prepared data, otherwise from the tokens. For images it
    covers names, captions and sizes."""
    notes: list[str] = field(default_factory=list)
    """Messages for the user about what was done with the data."""
    questions: Questions | None = None
    """Held-out prompts of chat data."""


def check_data(data: Data) -> list[str]:
    """Errors in the data options that can be found without reading all of the data."""
    if data.kind == "text":
        return check_text(data)
    if data.kind == "chat":
        from spurline.data.chat_samples import check_chat

        return (check_text(data) or check_chat(data)) if data.path else []
    from spurline.data.picture_samples import check_pictures

    return check_pictures(data)


def open_data(data: Data, seq_len: int, seed: int) -> DataSets:
    """Read, split and pack the dataset; raises a ValueError if it is invalid."""
    if data.kind == "pictures":
        from spurline.data.pictures import open_pictures

        return open_pictures(data, seq_len, seed)
    if data.kind == "chat":
        from spurline.data.chat import open_chat

        return open_chat(data, seq_len, seed)
    from spurline.data.loader import TrainBatches, ValidationBatches, text_batch, text_batch_by_documents
    from spurline.data.text import open_text

    text = open_text(data, seq_len, seed)
    make_batch = text_batch_by_documents if data.mask_documents else text_batch
    return DataSets(
        tokenizer=text.tokenizer,
        train=TrainBatches(text.train, seed, make_batch, text.order),
        validation=ValidationBatches(text.validation, make_batch) if text.validation is not None else None,
        num_documents=text.num_documents,
        num_tokens=text.num_tokens,
        fingerprint=text.fingerprint,
    )
