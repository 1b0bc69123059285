from collections.abc import Callable
from pathlib import Path

import pytest

MakeFiles = Callable[[dict[str, str | bytes]], Path]


@pytest.fixture
def make_files(tmp_path: Path) -> MakeFiles:
    """Write files, given as name -> content, into a folder and return it."""

    def make(files: dict[str, str | bytes]) -> Path:
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return tmp_path

    return make
