from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from spurline.cli import main

DEBUG_MODEL = ["train", "--module", "deepseek_v3", "--config", "deepseek_v3_debugmodel"]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def spurline(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Outcome]:
    """Runs a command line in this process, in an empty folder, on one rank."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def run(*argv: str) -> Outcome:
        try:
            code = main(list(argv))
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def train(spurline: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Runs `spurline train` on the debug model with further options."""
    return lambda *options: spurline(*DEBUG_MODEL, *options)


@pytest.fixture
def problems(train: Callable[..., Outcome], tmp_path: Path) -> Callable[..., list[str]]:
    """What `spurline train` says is wrong with further options, having written nothing."""

    def run(*options: str) -> list[str]:
        before = sorted(tmp_path.rglob("*"))
        code, out, err = train(*options)
        assert (code, out) == (2, "")
        assert "Traceback" not in err
        assert sorted(tmp_path.rglob("*")) == before
        first, *more = err.splitlines()
        if not more:
            return [first.removeprefix("spurline train: ")]
        assert first == f"spurline train: {len(more)} problems"
        return [line.removeprefix("  ") for line in more]

    return run
