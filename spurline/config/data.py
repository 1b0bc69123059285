"""The section of the data."""

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
    """A tokenizer.json file, a folder that has one, or the name of one that comes with Spurline (python_2048).
    Empty: the tokenizer of the prepared data, else bytes."""
    mask_documents: bool = False
    """Restrict attention to tokens of the same document within a packed sequence."""
    kind: Literal["text", "chat", "pictures"] = "text"
    """Text; conversations, from records with `messages` or with `prompt` and `completion`; or images with captions,
    from a JSONL file of {"image": path, "text": ...} (with an empty data.path: generated images of colored shapes)."""
    max_pixels: int = 65_536
    """Downscale images with more pixels than this."""

    chat_template: str = field(default="", metadata=ADDED_LATER)
    """Chat: a built-in template (chatml, llama3, plain, none) or a Jinja file (empty: that of the tokenizer's folder).
    none: prompt and completion as they are, with boundary tokens around them."""
    loss_on: Literal["assistant", "all"] = field(default="assistant", metadata=ADDED_LATER)
    """Chat: tokens to learn, those of assistant turns or all."""
    long_samples: Literal["truncate", "skip"] = field(default="truncate", metadata=ADDED_LATER)
    """Chat: what to do with samples that are longer than training.seq_len; they are counted either way."""
    invalid_samples: Literal["error", "skip"] = field(default="error", metadata=ADDED_LATER)
    """Chat: what to do with records that are no conversation, or that the template refuses; skip counts them."""

    @property
    def separates_documents(self) -> bool:
        """Whether attention is restricted to tokens of the same document; conversations never see each other."""
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
