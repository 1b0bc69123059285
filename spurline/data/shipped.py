"""Tokenizers that come with the package, chosen by name. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER = Path(__file__).parent / "tokenizers"


def tokenizer_path(tokenizer: str) -> str:
    """Where a tokenizer is: the folder of a shipped one, by its name, else the path itself, with ~ expanded."""
    return str(_FOLDER / tokenizer) if tokenizer in shipped_tokenizers() else os.path.expanduser(tokenizer)


def shipped_tokenizers() -> list[str]:
    """The names of those that come with the package."""
    return sorted(path.parent.name for path in _FOLDER.glob("*/tokenizer.json"))
