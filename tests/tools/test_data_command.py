import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PREPARE_HELP = ("SOURCE ...", "--out FOLDER", "--tokenizer PATH", "--weights", "--workers N", "hf://NAME")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "books").mkdir()
    for i in range(5):
        (tmp_path / "books" / f"{i}.txt").write_text(f"Book {i}. " * 200)
    (tmp_path / "web.jsonl").write_text("".join(json.dumps({"body": f"Page {i}. " * 20}) + "\n" for i in range(30)))
    return tmp_path


def test_prepare_then_ls_then_verify(spurline, sources):
    code, out, err = spurline("data", "prepare", "books", "--out", "prepared")
    assert (code, err) == (0, "")
    num_tokens = sum(len((sources / "books" / f"{i}.txt").read_text()) + 1 for i in range(5))
    assert out.splitlines() == [
        "wrote prepared",
        "tokenizer: bytes, 257 ids as uint16",
        "source  weight  documents  tokens  shards   bytes",
        f"books        -          5   {num_tokens:,}       1  {2 * num_tokens:,}",
    ]
    assert spurline("data", "ls", "prepared") == (0, out.removeprefix("wrote prepared\n"), "")
    code, out, err = spurline("data", "verify", "prepared")
    assert (code, err) == (0, "")
    assert out.startswith("all 2 files intact: ")


def test_sources_have_weights_and_options_stand_anywhere(spurline, sources):
    command = ("data", "prepare", "--weights", "3,0.5", "books", "--out=prepared", "web.jsonl", "--text-field", "body")
    assert spurline(*command, "--workers", "2").code == 0
    rows = [line.split() for line in spurline("data", "ls", "prepared").out.splitlines()[2:]]
    assert [row[:3] for row in rows] == [["books", "3", "5"], ["web.jsonl", "1/2", "30"]]


def test_everything_that_is_wrong_is_told_before_anything_is_read(spurline, sources):
    (sources / "full").mkdir()
    (sources / "full" / "file").write_text("x")
    code, out, err = spurline(
        *("data", "prepare", "nowhere", "books", "--pattern", "*.md", "--tokenizer", "none.json"),
        *("--weights", "1", "--workers", "-1", "--out", "full"),
    )
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "spurline data prepare: 6 problems",
        "  'nowhere' does not exist or is not accessible",
        "  --tokenizer 'none.json' does not exist or is not accessible, and is not one that comes with Spurline"
        " (python_2048)",
        "  --pattern '*.md' matches no file in 'books' (hidden files are not read)",
        "  --weights has 1 numbers for 2 sources",
        "  --workers must be positive, got -1",
        "  --out: 'full' is not empty: choose another folder, or remove it first",
    ]


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["prepare"], "spurline data prepare: SOURCE is missing, as in spurline data prepare books/ --out prepared/"),
        (["prepare", "books"], "spurline data prepare: --out is missing: give the output folder"),
        (
            ["prepare", "books", "--out", "x", "--weights", "0"],
            "spurline data prepare: --weights must be",
        ),
        (
            ["prepare", "books", "--wrkers", "2"],
            "spurline data prepare: --wrkers: no such option. Did you mean --workers?",
        ),
        (["prepare", "books", "--workers", "two"], "spurline data prepare: --workers: 'two' is not an integer"),
        (["ls"], "spurline data ls: FOLDER is missing\n"),
        (["ls", "books", "web.jsonl"], "spurline data ls: expected one FOLDER, got 2: books web.jsonl"),
        (["ls", "books"], "spurline data ls: 'books' is not prepared data"),
        (["verify", "web.jsonl"], "spurline data verify: 'web.jsonl' is not prepared data"),
        (["prepair"], "spurline data: there is no 'prepair'. Did you mean prepare? Choose from: prepare, join, ls, "),
    ],
)
@pytest.mark.usefixtures("sources")
def test_wrong_command_is_explained_in_one_line(spurline, argv, complaint):
    code, out, err = spurline("data", *argv)
    assert (code, out) == (2, "")
    assert err.startswith(complaint)
    assert len(err.splitlines()) == 1


def test_bad_input_is_named_and_nothing_is_left(spurline, sources):
    code, _, err = spurline("data", "prepare", "web.jsonl", "--out", "prepared")
    assert code == 2
    assert err == (
        "spurline data prepare: 'web.jsonl', line 1: no field 'text' (it has 'body'): choose one with --text_field\n"
    )
    (sources / "books" / "3.txt").write_bytes(b"caf\xe9")
    code, _, err = spurline("data", "prepare", "books", "--out", "prepared")
    assert code == 2
    assert err.startswith("spurline data prepare: 'books/3.txt' is not UTF-8 text (byte 0xe9 at offset 3)")
    assert sorted(path.name for path in sources.iterdir()) == ["books", "web.jsonl"]


def test_prepared_data_is_no_source(spurline, sources):
    assert spurline("data", "prepare", "books", "--out", "prepared").code == 0
    assert spurline("data", "prepare", "prepared", "--out", "twice").err == (
        "spurline data prepare: 'prepared' is prepared already\n"
    )


def test_verify_names_every_damaged_file(spurline, sources):
    spurline("data", "prepare", "books", "--out", "prepared")
    tokens, documents = (sources / "prepared" / f"source0{suffix}" for suffix in ("-00000.tokens", ".documents"))
    content = bytearray(tokens.read_bytes())
    content[100] ^= 1
    tokens.write_bytes(content)
    documents.write_bytes(b"")
    code, out, _ = spurline("data", "verify", "prepared")
    assert code == 1
    assert out.splitlines() == [
        "'prepared/source0.documents' is empty",
        "'prepared/source0-00000.tokens' is damaged: its checksum differs from the index",
        "2 of 2 files are damaged: prepare the data again",
    ]
    assert "source0.documents' is empty" in spurline("data", "ls", "prepared").err


@pytest.mark.parametrize("argv", [["data"], ["data", "--help"]])
def test_help_lists_the_commands(spurline, argv):
    code, out, err = spurline(*argv)
    assert (code, err) == (0, "")
    for name in ("prepare", "ls", "verify"):
        assert f"\n  {name}" in out


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_of_prepare_teaches(spurline, flag):
    code, out, _ = spurline("data", "prepare", flag)
    assert code == 0
    for words in PREPARE_HELP:
        assert words in out


def test_progress_is_shown_on_a_terminal(spurline, monkeypatch, sources):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, _, err = spurline("data", "prepare", "books", "web.jsonl", "--text_field", "body", "--out", "prepared")
    assert code == 0
    assert "books" in err
    assert err.count("100%") >= 2


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_command_leaves_neither_files_nor_workers(tmp_path, how, code):
    fifo = tmp_path / "slow.txt"
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("text " * 10)
    os.mkfifo(fifo)
    script = (
        "import signal, sys; from spurline.data import prepare, sources; from spurline.cli import main\n"
        # Tests that were started in the background ignore Ctrl-C, and hand that on.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "prepare.BATCH_CHARACTERS = 1  # so that a worker starts before the slow file\n"
        f"sources.find_files = lambda data: iter([('a.txt', 'books/a.txt'), ('slow.txt', {str(fifo)!r})])\n"
        "if __name__ == '__main__': sys.exit(main(['data', 'prepare', 'books', '--out', 'out', '--workers', '2']))\n"
    )
    (tmp_path / "run.py").write_text(script)
    process = subprocess.Popen([sys.executable, "run.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    with open(fifo, "w"):  # the reader is there
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while len(workers := children.read_text().split()) < 2:  # one, and the tracker of its resources
            time.sleep(0.02)
        assert list(tmp_path.glob(".out.*tmp*/*.documents"))
        process.send_signal(how)
    # Only now does the slow file end: a signal that comes just before the process waits for a file is handled after it.
    _, err = process.communicate(timeout=300)
    assert process.returncode == code
    assert "Traceback" not in err
    end = time.monotonic() + 10
    while any(map(is_running, workers)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(map(is_running, workers))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["books", "run.py", "slow.txt"]


def test_help_and_errors_leave_torch_alone(tmp_path):
    code = (
        "import contextlib, io, sys; from spurline.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        "    for argv in ('data', 'data prepare --help', 'data prepare x', 'data ls x', 'tokenizer train x'):\n"
        "        with contextlib.suppress(SystemExit): main(argv.split())\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_parts_are_prepared_apart_and_joined(spurline, sources):
    command = ("data", "prepare", "books", "web.jsonl", "--text_field", "body", "--weights", "3,1")
    whole = spurline(*command, "--out", "whole")
    for number in (2, 1):
        code, out, err = spurline(*command, "--out", "joined", "--part", f"{number}/2")
        assert (code, out, err) == (0, f"wrote {sources / 'joined.parts' / f'00000{number}-of-000002'}\n", "")
    code, out, err = spurline("data", "join", "joined")
    assert (code, out, err) == (0, whole.out.replace("wrote whole", "wrote joined"), "")
    names = sorted(os.listdir(sources / "whole"))
    assert sorted(os.listdir(sources / "joined")) == names
    assert all((sources / "whole" / name).read_bytes() == (sources / "joined" / name).read_bytes() for name in names)
    assert spurline("data", "verify", "joined").code == 0


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ("3", "--part must be a part and the number of parts, such as 3/16, got '3'"),
        ("0/4", "--part 0/4: parts are counted from 1 to 4"),
    ],
)
def test_bad_part_is_one_line(spurline, sources, part, told):
    line = f"spurline data prepare: {told}\n"
    assert spurline("data", "prepare", "books", "--out", "out", "--part", part) == (2, "", line)


def test_part_that_is_there_and_parts_that_are_missing_are_one_line(spurline, sources):
    first = ("data", "prepare", "books", "--out", "out", "--part", "1/2")
    assert spurline(*first).code == 0
    folder = sources / "out.parts" / "000001-of-000002"
    again = f"spurline data prepare: '{folder}' is not empty: choose another folder, or remove it first\n"
    assert spurline(*first) == (2, "", again)
    missing = f"spurline data join: '{sources / 'out'}.parts': part 2 is missing of 2\n"
    assert spurline("data", "join", "out") == (2, "", missing)
    assert not (sources / "out").exists()
