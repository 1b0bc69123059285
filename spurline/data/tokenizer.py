"""The built-in tokenizer: a token is a byte."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8 text; one more marks where a document begins."""

    boundary_id = 256
    vocab_size = 257

    def encode(self, text: str) -> npt.NDArray[np.uint16]:
        """Text to ids, without boundary; what UTF-8 can't say (a lone surrogate) becomes a question mark."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: npt.ArrayLike) -> str:
        """Ids to text; boundaries and ids past the vocabulary are dropped, broken UTF-8 shows as U+FFFD."""
        id_array = np.asarray(ids)
        return id_array[id_array < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")
