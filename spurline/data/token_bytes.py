"""Bytes of text per token id of a tokenizer, which make losses of different tokenizers comparable.

V ids in a vocabulary. Torch-free.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import tokenizers

Counts = npt.NDArray[np.int64]
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def count_bytes(tokenizer: tokenizers.Tokenizer, vocab_size: int) -> Counts:
    """The UTF-8 bytes (V,) that each id adds to a text, by decoding it; 0 for special tokens and unused ids.

    An id is decoded after other text, because at the start of a text many tokenizers drop a token's leading space. A
    partial character decodes to a replacement character, so its bytes are counted in the token's own spelling: one
    letter per byte (byte-level BPE), or <0x0A> (SentencePiece).
    """
    from tokenizers import pre_tokenizers

    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    before = tokenizer.encode("a", add_special_tokens=False).ids
    num_before = len(tokenizer.decode(before, skip_special_tokens=True).encode())
    texts = tokenizer.decode_batch([[*before, token_id] for token_id in range(vocab_size)], skip_special_tokens=True)
    counts_V = np.array([len(text.encode()) - num_before for text in texts], np.int64)
    for token_id, text in enumerate(texts):
        if _REPLACEMENT in text:
            spelling = tokenizer.id_to_token(token_id) or ""
            if _BYTE.fullmatch(spelling):
                counts_V[token_id] = 1
            elif alphabet.issuperset(spelling):
                counts_V[token_id] = len(spelling)
    return counts_V.clip(0)
