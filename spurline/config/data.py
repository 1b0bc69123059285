"""The data section."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from spurline.config.checks import at_least
from spurline.typed_json import ADDED_LATER


@dataclass(frozen=True)
class Data:
    path: str = ""
    """Comma-separated sources: files or folders of text, JSONL or Parquet, prepared folders, hf://NAME.
    Empty: the source code of the Python standard library."""
    pattern: str = "*"
    """Glob that selects files within a folder, at any depth (e.g. *.md)."""
    validation_fraction: float = 0.02
    """Fraction of the tokens held out for validation (0: none)."""
    weights: str = ""
    """Comma-separated sampling weight of each source, e.g. 3,1 (empty: in proportion to size).
    The sources within a prepared folder keep the relative weights given to `spurline data prepare`."""
    text_field: str = "text"
    """Name of the text field in JSONL, Parquet and Hugging Face datasets."""
    tokenizer: str = ""
    """A tokenizer.json file, a folder that contains one, or the name of a tokenizer shipped with Spurline
    (python_2048). Empty: the tokenizer of the prepared data, or bytes if there is none."""
    mask_documents: bool = False
    """Restrict attention to tokens of the same document within a packed sequence."""
    kind: Literal["text", "chat", "pictures"] = "text"
    """text; chat: records with `messages`, or with `prompt` and `completion`; pictures: images with captions, from a
    JSONL file of {"image": path, "text": ...} (with an empty data.path: generated images of colored shapes)."""
    max_pixels: int = 65_536
    """Downscale images with more pixels than this."""

    chat_template: str = field(default="", metadata=ADDED_LATER)
    """Chat: a built-in template (chatml, llama3, plain, none) or a Jinja file (empty: from the tokenizer's folder).
    none: prompt and completion unchanged, between boundary tokens."""
    loss_on: Literal["assistant", "all"] = field(default="assistant", metadata=ADDED_LATER)
    """Chat: compute the loss on the tokens of assistant turns only, or on all tokens."""
    long_samples: Literal["truncate", "skip"] = field(default="truncate", metadata=ADDED_LATER)
    """Chat: what to do with samples longer than training.seq_len; either way they are counted."""
    invalid_samples: Literal["error", "skip"] = field(default="error", metadata=ADDED_LATER)
    """Chat: what to do with records that are not a valid conversation or that the template rejects: stop with an
    error, or skip and count them."""

    @property
    def separates_documents(self) -> bool:
        """Whether attention is restricted to tokens of the same document; for conversations it always is."""
        return self.mask_documents or self.kind == "chat"

    def problems(self) -> list[str]:
        found: list[str] = []
        if not 0 <= self.validation_fraction < 1:
            found.append(f"validation_fraction must be in [0, 1), got {self.validation_fraction}")
        found += at_least(self, max_pixels=1024)
        if self.mask_documents and self.kind == "pictures":
            found.append("mask_documents is supported for data.kind text and chat only")
        if self.kind == "chat" and not self.path:
            found.append("kind chat needs data.path: a JSONL file of conversations")
        if self.weights and not self.shares:
            found.append(f"weights must be comma-separated positive numbers, such as 3,1, got {self.weights!r}")
        return found

    @property
    def shares(self) -> list[Fraction]:
        """The weights as exact fractions; empty if none are given or they are invalid."""
        try:
            shares = [Fraction(weight.strip()) for weight in self.weights.split(",")]
        except (ValueError, ZeroDivisionError):
            return []
        return shares if min(shares) > 0 else []
