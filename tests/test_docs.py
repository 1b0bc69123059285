"""The commands and the code in the README do what it says."""

import re
import shlex
from pathlib import Path

import pytest

from spurline.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = [line.split("  #")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith("spurline ")]


def test_the_python_blocks_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {}
    assert len(blocks("python")) >= 3
    for block in blocks("python"):
        exec(block, namespace)
    errors = eval(capsys.readouterr().out)
    assert max(errors.values()) < 1e-5


def test_the_commands_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of their own; those that train, with two steps of a small batch."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text(README)
    small = ["--training.steps", "2", "--training.local_batch_size", "1", "--training.seq_len", "32"]
    small += ["--metrics.sample_tokens", "4", "--metrics.validation_batches", "1"]
    assert len(commands()) > 10
    for command in commands():
        arguments = shlex.split(command)[1:]
        if arguments[0] == "train" and not {"--help", "--dry-run"} & set(arguments):
            arguments += small
        try:
            code = main(arguments)
        except SystemExit as exit:  # what --help does
            code = exit.code
        assert code == 0, command


def test_files_named_in_the_readme_exist() -> None:
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (Path(__file__).parent.parent / path).exists(), path
