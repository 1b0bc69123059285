"""The commands and the code in the README and in docs/ do what the pages say, and the site is whole."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
from _pytest.mark import ParameterSet
from doc_blocks import HAS, PAGES, ROOT, blocks_of
from earlier_runs import changes, files_of_runs, run_to_resume
from notebook import run_cells

from spurline.cli import main
from spurline.moe import registry

# Those that take seconds; all others are run by `make test-slow`.
QUICK = ("README.md", "docs/index.md", "docs/data.md")
SMALL = {
    "--training.steps": "2",
    "--training.local_batch_size": "1",
    "--training.seq_len": "32",
    "--metrics.sample_tokens": "4",
    "--metrics.validation_batches": "1",
}
TRAINS = ("train", "lr-find")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def pages_with(language: str) -> list[ParameterSet]:
    """The pages with such blocks to run, as parameters of a test."""
    pages = [p for p in PAGES if any(b.language == language and b.kind == "run" for b in blocks_of(p))]
    slow = {name_of(p): [pytest.mark.slow] for p in pages if language == "bash" and name_of(p) not in QUICK}
    return [pytest.param(p, id=name_of(p), marks=slow.get(name_of(p), [])) for p in pages]


@pytest.fixture
def _registered() -> Iterator[None]:
    """What examples register is forgotten."""
    with ExitStack() as stack:
        for known in (registry.ROUTERS, registry.KERNELS, registry.DISPATCHERS):
            stack.enter_context(mock.patch.dict(known))
        yield


def test_every_command_is_run_or_says_why_not() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page)]
    shown = [block for block in blocks if block.has_commands or block.language == "python"]
    assert len(shown) > 60
    unknown = [b.place for b in shown if b.mark and b.kind == "run"]
    assert not unknown, (
        f"a comment in front of a block that is none of `not run: WHY`, `run by TEST`, `file: NAME`: {unknown}"
    )
    not_run = [b.place for b in shown if b.kind == "run" and b.language not in ("bash", "console", "python")]
    assert not not_run, f"commands in a block of another language, without a mark: {not_run}"
    others = [
        b.place
        for b in shown
        if b.kind == "run" and b.language == "bash"
        for c in b.commands()
        if program(c)[:1] != ["spurline"]
    ]
    assert not others, f"commands that only a mark can explain: {others}"
    assert not [b.place for b in shown if b.kind == "not run" and len(b.reason) < 10]


def test_tests_that_pages_name_exist() -> None:
    named = [
        (page.name, found) for page in PAGES for found in re.findall(r"tests/[\w/]+\.py(?:::\w+)?", page.read_text())
    ]
    assert len(named) > 60
    for page, test in named:
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file(), f"{page}: {test}"
        assert not name or f"def {name}(" in (ROOT / path).read_text(), f"{page}: {test}"


def program(command: list[str]) -> list[str]:
    """A command without the variables in front of it."""
    return command[next((i for i, word in enumerate(command) if not re.match(r"[A-Z_]+=", word)), 0) :]


def run(command: list[str], place: str, before: dict[Path, str]) -> dict[Path, str]:
    """A command, in this process; those that train take two steps of a small batch on a small text, or a third one.

    `before` has the files of all runs so far, of which it may change only its own. Returns the files after it.
    """
    arguments = command[1:]
    resumed = run_to_resume(arguments)
    if arguments[0] in TRAINS and not {"--help", "--dry-run"} & set(arguments):
        given = {"--training.steps"} if arguments[0] == "lr-find" else set()
        small = SMALL | ({"--training.steps": "3"} if resumed else {})
        arguments += [word for name, value in small.items() if name not in given for word in (name, value)]
        if not {"--data.path", "--config-file"} & set(arguments):
            arguments += ["--data.path", "books"]
    try:
        code = main(arguments)
    except SystemExit as exit:  # what --help does
        code = exit.code
    assert code == 0, f"{place}: {' '.join(command)}"
    own, others = changes(arguments, resumed, before)
    assert not others, f"{place}: an earlier run was changed: {others}"
    assert not resumed or own, f"{place}: it took no further step"
    return files_of_runs()


@pytest.mark.parametrize("page", pages_with("bash"))
def test_commands_run_one_after_the_other(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of their own, with what the page says that is there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples/my_moe_pack"))
    shutil.copy(ROOT / "README.md", tmp_path)
    for folder in ("books", "my_text"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("All work and no play makes a dull model. " * 100)
    (tmp_path / "code.jsonl").write_text(json.dumps({"content": "def train(self):\n" * 100}) + "\n")
    files: dict[Path, str] = {}
    for line in HAS.get(name_of(page), []):
        files = run(["spurline", *line.split()], "before the page", files)
    for block in blocks_of(page):
        if block.kind == "file":
            Path(block.reason).write_text(block.text)
        if block.language == "bash" and block.kind == "run":
            for command in block.commands():
                files = run(program(command), block.place, files)


@pytest.mark.parametrize("page", pages_with("console"))
def test_output_shown_is_that_of_the_command(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A block of `console` is a command behind a $, and what it prints; lines may be broken in other places."""
    for block in blocks_of(page):
        if block.language == "console" and block.kind == "run":
            command, expected = re.fullmatch(r"\$ spurline (.*?[^\\])\n(.*)", block.text, re.DOTALL).groups()
            main(shlex.split(command.replace("\\\n", " ")))
            printed = capsys.readouterr()
            assert (printed.out + printed.err).split() == expected.split(), block.place


@pytest.mark.parametrize("page", [page for page in pages_with("python") if page.id != "README.md"])
@pytest.mark.usefixtures("_registered")
def test_python_blocks_run_one_after_the_other(page: Path) -> None:
    namespace: dict[str, object] = {}
    for block in blocks_of(page):
        if block.language == "python" and block.kind == "run":
            exec(compile(block.text, block.place, "exec"), namespace)


def test_the_example_of_the_readme_equals_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {}
    with mock.patch.dict(registry.KERNELS):
        for block in blocks_of(ROOT / "README.md"):
            if block.language == "python" and block.kind == "run":
                exec(block.text, namespace)
    errors = eval(capsys.readouterr().out)
    assert max(errors.values()) < 1e-5


@pytest.mark.slow
def test_the_script_of_the_page_about_judging_runs(tmp_path: Path) -> None:
    (block,) = (block for block in blocks_of(ROOT / "docs/judge.md") if block.kind == "file")
    (tmp_path / block.reason).write_text(block.text)
    done = subprocess.run([sys.executable, block.reason], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "docs/tutorial.ipynb").read_text())
    shown = [bool(cell.get("outputs")) for cell in notebook["cells"]]
    run_cells(notebook)
    assert shown == [bool(cell.get("outputs")) for cell in notebook["cells"]], (
        "run tests/notebook.py docs/tutorial.ipynb"
    )


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_files_that_pages_link_to_exist(page: str) -> None:
    for path in re.findall(r"(?:\]\(|src=\")([^)#:\"]+)", (ROOT / page).read_text()):
        assert (ROOT / path).exists(), path


def test_the_site_is_whole(tmp_path: Path) -> None:
    """Every page is reachable, and every link and anchor leads somewhere."""
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {path.name: path.read_text() for path in (tmp_path / "site").glob("*.html")}
    assert "parallelize_moe" in pages["api.html"]
    for name, text in pages.items():
        loaded = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"?(https?:[^\"\s>]+)", text)
        assert not loaded, f"{name} loads {loaded}"
