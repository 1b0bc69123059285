from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is.
settings.register_profile("any_machine", deadline=None)
settings.load_profile("any_machine")

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
