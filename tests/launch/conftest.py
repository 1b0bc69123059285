from collections.abc import Callable
from pathlib import Path

import pytest

from spurline.cli import main

CONFIG = ["--config", "deepseek_v3_debugmodel"]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """What `spurline launch --print` prints for some options of its own and some of training."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def run(*options: str, train: tuple[str, ...] = ()) -> str:
        code = main(["launch", *options, "--print", "--", *CONFIG, *train])
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        assert list(tmp_path.iterdir()) == []
        return out

    return run
