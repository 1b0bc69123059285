"""Tokenizers in the tokenizer.json format of the Hugging Face `tokenizers` package."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from spurline.data.token_bytes import Counts, count_bytes
from spurline.data.tokenizer import Decoder, TextDecoder, Tokens, token_dtype
from spurline.untrusted import read_bytes, read_json, reason

if TYPE_CHECKING:
    import tokenizers

# Common names of the token between documents, most common first.
_BOUNDARY_NAMES = (
    *("<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>", "<｜begin▁of▁sentence｜>"),
    *("<bos>", "<s>", "<eos>", "</s>", "[BOS]", "[EOS]"),
)


MAX_VOCAB_SIZE = 2**31


class FileTokenizer:
    """A tokenizer of the `tokenizers` package, with a special token that marks document boundaries."""

    def __init__(self, content: str, boundary_token: str, where: str) -> None:
        """`content` is the JSON; `where` names its origin in error messages."""
        self.content = content
        self._tokenizer = _parse(content, where)
        # Special tokens that occur in documents are encoded as plain text.
        self._tokenizer.encode_special_tokens = True
        boundary_id = self._tokenizer.token_to_id(boundary_token)
        if boundary_id is None:
            raise ValueError(f"{where}: there is no token {boundary_token!r} to mark document boundaries")
        self.boundary_token = boundary_token
        self.boundary_id = int(boundary_id)
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(f"{where}: it has the token id {self.vocab_size - 1}, more than {MAX_VOCAB_SIZE - 1}")
        self._dtype = token_dtype(self.vocab_size)
        self._for_chat: tokenizers.Tokenizer | None = None

    @classmethod
    def load(cls, path: str, boundary_token: str = "") -> FileTokenizer:
        """Load a tokenizer.json file, or a folder with one (default boundary: as recorded in the folder)."""
        file = Path(os.path.expanduser(path))
        if file.is_dir():
            file /= "tokenizer.json"
        try:
            content = read_bytes(file).decode("utf-8")
        except OSError as error:
            raise ValueError(f"data.tokenizer: can't read {str(file)!r}: {reason(error)}") from None
        except UnicodeDecodeError:
            raise ValueError(f"data.tokenizer: {str(file)!r} is not a tokenizer.json file: not UTF-8") from None
        except ValueError as error:
            raise ValueError(f"data.tokenizer: {str(file)!r}: {error}") from None
        where = f"data.tokenizer {str(file)!r}"
        boundary_token = boundary_token or _recorded_boundary(file.parent) or _usual_boundary(content, where)
        return cls(content, boundary_token, where)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.content, self.boundary_token, "the tokenizer")

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.boundary_token}\0{self.content}".encode()).hexdigest()

    @cached_property
    def token_bytes(self) -> Counts:
        return count_bytes(self._tokenizer, self.vocab_size)

    def token_id(self, name: str) -> int | None:
        """The id of a token such as <|vision_start|>, or None."""
        return self._tokenizer.token_to_id(name)

    def encode(self, text: str) -> Tokens:
        """Text to ids, without a boundary token; lone surrogates become question marks."""
        text = text.encode("utf-8", errors="replace").decode("utf-8")
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=self._dtype)

    def encode_rendered(self, text: str) -> tokenizers.Encoding:
        """Encode a text in which special tokens are written by name, as chat templates do."""
        if self._for_chat is None:
            self._for_chat = _parse(self.content, "the tokenizer")
            self._for_chat.no_truncation()
            self._for_chat.no_padding()
        return self._for_chat.encode(text, add_special_tokens=False)

    def is_special(self, token_id: int) -> bool:
        """Whether an id is an added token rather than ordinary text, such as <|im_end|>."""
        return token_id in self._tokenizer.get_added_tokens_decoder()

    def decode(self, ids: npt.ArrayLike) -> str:
        """Ids to text; special tokens and ids outside the vocabulary are dropped, invalid UTF-8 becomes U+FFFD."""
        return self._decode(np.asarray(ids, dtype=np.int64).tolist())

    def decoder(self) -> Decoder:
        return TextDecoder(self._decode)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ValueError("this needs the package tokenizers: pip install tokenizers") from None
    return tokenizers


def _parse(content: str, where: str) -> tokenizers.Tokenizer:
    # The parser raises plain Exceptions.
    package = import_tokenizers()
    try:
        return package.Tokenizer.from_str(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in the Rust code is not an Exception
        first_line = str(error).partition("\n")[0]
        raise ValueError(f"{where}: not a valid tokenizer.json: {first_line}") from None


def _recorded_boundary(folder: Path) -> str:
    """The bos_token, else eos_token, in the tokenizer_config.json of a Hugging Face folder; empty if there is none."""
    try:
        config = read_json(folder / "tokenizer_config.json")
    except (OSError, ValueError):
        return ""
    for name in ("bos_token", "eos_token") if isinstance(config, dict) else ():
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str) and content:
            return content
    return ""


def _usual_boundary(content: str, where: str) -> str:
    """The special token for document boundaries: by its name, or the only special token."""
    special = [token.content for token in _parse(content, where).get_added_tokens_decoder().values() if token.special]
    for name in _BOUNDARY_NAMES:
        if name in special:
            return name
    if len(special) == 1:
        return special[0]
    raise ValueError(
        f"{where}: can't determine the document boundary token: it has none of {', '.join(_BOUNDARY_NAMES)}, and its"
        " folder has no tokenizer_config.json with a bos_token or eos_token"
    )
