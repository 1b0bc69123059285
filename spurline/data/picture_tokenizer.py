"""A text tokenizer extended by image tokens. Torch-free."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from spurline.data.tokenizer import Decoder, Tokenizer, Tokens
from spurline.data.tokenizer_file import FileTokenizer

_NAMES = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")


class PictureTokenizer:
    """A text tokenizer with three more tokens: image start, image feature, image end."""

    def __init__(self, text: Tokenizer) -> None:
        self._text = text
        self.start_id, self.feature_id, self.end_id = self.picture_ids = _picture_ids(text)
        self.vocab_size = max(text.vocab_size, max(self.picture_ids) + 1)
        self.boundary_id = text.boundary_id
        self.fingerprint = f"{text.fingerprint} with pictures"

    @property
    def token_bytes(self) -> npt.NDArray[np.int64]:
        return np.pad(self._text.token_bytes, (0, self.vocab_size - self._text.vocab_size))

    def picture(self, num_features: int) -> list[int]:
        return [self.start_id, *[self.feature_id] * num_features, self.end_id]

    def encode(self, text: str) -> Tokens:
        return self._text.encode(text)

    def decode(self, ids: npt.ArrayLike) -> str:
        return self._text.decode(ids)

    def decoder(self) -> Decoder:
        return self._text.decoder()


def _picture_ids(text: Tokenizer) -> tuple[int, int, int]:
    """The ids of Qwen's image tokens if the tokenizer has them, else three new ids after its vocabulary."""
    if isinstance(text, FileTokenizer):
        start, feature, end = (text.token_id(name) for name in _NAMES)
        if start is not None and feature is not None and end is not None:
            return start, feature, end
    return text.vocab_size, text.vocab_size + 1, text.vocab_size + 2
