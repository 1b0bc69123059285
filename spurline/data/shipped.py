"""Tokenizers shipped with the package, selected by name. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER = Path(__file__).parent / "tokenizers"


def tokenizer_path(tokenizer: str) -> str:
    """The path of a tokenizer: the folder of a shipped one if it is a name, else the path itself, with ~ expanded."""
    return str(_FOLDER / tokenizer) if tokenizer in shipped_tokenizers() else os.path.expanduser(tokenizer)


def shipped_tokenizers() -> list[str]:
    """The names of the tokenizers shipped with the package."""
    return sorted(path.parent.name for path in _FOLDER.glob("*/tokenizer.json"))
