"""Tokenizers in the JSON format of the `tokenizers` package, which Hugging Face models bring along."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from spurline.data.tokenizer import Decoder, TextDecoder, Tokens, token_dtype

if TYPE_CHECKING:
    import tokenizers

# Names under which models know the token between documents, the most usual first.
_BOUNDARY_NAMES = (
    *("<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>", "<｜begin▁of▁sentence｜>"),
    *("<bos>", "<s>", "<eos>", "</s>", "[BOS]", "[EOS]"),
)


class FileTokenizer:
    """A tokenizer of the `tokenizers` package, with the one special token that marks where a document begins."""

    def __init__(self, content: str, boundary_token: str, where: str) -> None:
        """`content` is the JSON; `where` it is from is told to the user if something is wrong with it."""
        self.content = content
        self._tokenizer = _parse(content, where)
        # A document that quotes a special token means its letters, not the token.
        self._tokenizer.encode_special_tokens = True
        boundary_id = self._tokenizer.token_to_id(boundary_token)
        if boundary_id is None:
            raise ValueError(f"{where}: there is no token {boundary_token!r}, which marks where a document begins")
        self.boundary_token = boundary_token
        self.boundary_id = int(boundary_id)
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self._dtype = token_dtype(self.vocab_size)

    @classmethod
    def load(cls, path: str, boundary_token: str = "") -> FileTokenizer:
        """From a JSON file, or a folder with a tokenizer.json; by default with the boundary that is recorded there."""
        file = Path(os.path.expanduser(path))
        if file.is_dir():
            file /= "tokenizer.json"
        try:
            content = file.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"data.tokenizer: can't read {str(file)!r}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"data.tokenizer: {str(file)!r} is not the JSON of a tokenizer: not UTF-8") from None
        where = f"data.tokenizer {str(file)!r}"
        boundary_token = boundary_token or _recorded_boundary(file.parent) or _usual_boundary(content, where)
        return cls(content, boundary_token, where)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.content, self.boundary_token, "the tokenizer")

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.boundary_token}\0{self.content}".encode()).hexdigest()

    def token_id(self, name: str) -> int | None:
        """The id of a special token, such as <|vision_start|>, if there is one of this name."""
        return self._tokenizer.token_to_id(name)

    def encode(self, text: str) -> Tokens:
        """Text to ids, without boundary; what UTF-8 can't say (a lone surrogate) becomes a question mark."""
        text = text.encode("utf-8", errors="replace").decode("utf-8")
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=self._dtype)

    def decode(self, ids: npt.ArrayLike) -> str:
        """Ids to text; special tokens and ids past the vocabulary are dropped, broken UTF-8 shows as U+FFFD."""
        return self._decode(np.asarray(ids, dtype=np.int64).tolist())

    def decoder(self) -> Decoder:
        return TextDecoder(self._decode)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ValueError("this needs the package tokenizers: pip install 'spurline[hf]'") from None
    return tokenizers


def _parse(content: str, where: str) -> tokenizers.Tokenizer:
    # The package's own parser raises bare Exceptions, a new one for every kind of mistake.
    package = import_tokenizers()
    try:
        return package.Tokenizer.from_str(content)
    except Exception as error:
        raise ValueError(f"{where}: not the JSON of a tokenizer: {error}") from None


def _recorded_boundary(folder: Path) -> str:
    """The token with which the tokenizer_config.json of a Hugging Face folder begins, or else ends, a text."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    for name in ("bos_token", "eos_token"):
        token = config.get(name)
        if token:
            return str(token["content"] if isinstance(token, dict) else token)
    return ""


def _usual_boundary(content: str, where: str) -> str:
    """The special token that marks the place between two documents, by its name or by being the only one."""
    special = [token.content for token in _parse(content, where).get_added_tokens_decoder().values() if token.special]
    for name in _BOUNDARY_NAMES:
        if name in special:
            return name
    if len(special) == 1:
        return special[0]
    raise ValueError(
        f"{where}: which special token marks where a document begins? There is none of {', '.join(_BOUNDARY_NAMES)}"
        " and no tokenizer_config.json that names a bos_token or eos_token beside it"
    )
