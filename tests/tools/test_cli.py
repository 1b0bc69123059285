import itertools
import os
import re
import subprocess
import sys
from importlib import import_module

import pytest

from spurline import __version__
from spurline.cli import COMMANDS

WITHOUT_TORCH = """
import contextlib, io, sys
from spurline.cli import main

preset = "--module deepseek_v3 --config deepseek_v3_debugmodel"
words = "completion words --"
heavy = lambda: {"torch", "numpy"} & sys.modules.keys()
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    main(["--help"])
    assert "tyro" not in sys.modules and "rich" not in sys.modules
    usual = ["configs", "train --help", f"train {preset} --help", "train", "plan --help", "audit"]
    for command in [*usual, f"{words} train --training.dtype b", f"{words} convert fr"]:
        with contextlib.suppress(SystemExit):
            main(command.split())
        assert not heavy(), (command, heavy())
print("done")
"""


def test_alone_it_shows_the_way(spurline):
    code, out, err = spurline()
    assert (code, err) == (0, "")
    shown = [line.split() for line in out.splitlines() if line.startswith("  spurline ")]
    assert len(shown) == 3
    assert all(words[1] in COMMANDS for words in shown)
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("argv", [["-h"], ["--help"], ["help"]])
def test_help_lists_every_command_with_its_summary(spurline, argv):
    code, out, err = spurline(*argv)
    assert (code, err) == (0, "")
    for name, (summary, _) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", out, re.MULTILINE)
    assert "spurline train --module" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("command", [["doctor"], ["convert", "from-hf"]])
def test_help_of_a_command_is_shown_either_way(spurline, command):
    shown = spurline(*command, "--help")
    assert (shown.code, shown.err) == (0, "")
    assert f"usage: spurline {' '.join(command)}" in shown.out
    assert spurline("help", *command) == shown


def test_help_of_an_option_breaks_lines_only_where_they_are_full(spurline, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    _, out, _ = spurline("train", "--help")
    option = out.partition("--precision.layers ")[2].partition("--precision.grad_dtype")[0]
    lines = [line.strip("│ ") for line in option.splitlines()[1:-1]]
    assert len(lines) >= 3
    for line, following in itertools.pairwise(lines):
        assert len(line) + 1 + len(following.split()[0]) > 100 - len("│       ") - len(" │")


def test_help_of_a_misspelled_command_suggests_the_nearest(spurline):
    assert spurline("help", "trian") == (2, "", "spurline: unknown command 'trian'. Did you mean train?\n")


def test_version(spurline):
    assert spurline("--version") == (0, f"spurline {__version__}\n", "")


def test_misspelled_command_suggests_the_nearest(spurline):
    assert spurline("trian") == (2, "", "spurline: unknown command 'trian'. Did you mean train?\n")


def test_unlike_command_lists_what_there_is(spurline):
    assert spurline("xyz") == (2, "", "spurline: unknown command 'xyz'. Commands: " + ", ".join(COMMANDS) + "\n")


def test_help_configs_and_errors_leave_torch_alone(tmp_path):
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_runs_as_a_module_with_its_exit_code():
    done = subprocess.run(
        [sys.executable, "-m", "spurline", "configs", "--module", "x"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("spurline configs: --module: there is no 'x'.")


def output_to_nobody(*argv, unbuffered=False):
    """The exit code and stderr of a command whose reader has closed the pipe."""
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    environment = os.environ | {"PYTHONUNBUFFERED": "1" if unbuffered else ""}
    command = [sys.executable, "-m", "spurline", *argv]
    done = subprocess.run(command, stdout=writing_end, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writing_end)
    return done.returncode, done.stderr


@pytest.mark.parametrize("argv", [["configs"], ["train", "--help"], ["runs", "."]])
def test_reader_that_closed_the_pipe_is_no_traceback(argv):
    assert output_to_nobody(*argv) == (141, "")


def test_reader_that_leaves_while_a_text_is_generated_is_no_error(train, tmp_path):
    tiny = ["--training.steps", "1", "--training.seq_len", "16", "--job.dump_folder", "run"]
    assert train(*tiny).code == 0
    generate = ["generate", str(tmp_path / "run"), "--prompt", "a", "--max_tokens", "2"]
    assert output_to_nobody(*generate, unbuffered=True) == (141, "")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_interrupt_is_one_line_in_every_command(spurline, monkeypatch, command):
    def interrupted(argv):
        raise KeyboardInterrupt

    module, function = COMMANDS[command][1].split(":")
    monkeypatch.setattr(import_module(module), function, interrupted)
    assert spurline(command) == (130, "", f"spurline {command}: interrupted\n")


def test_interrupt_while_the_first_modules_are_imported_is_one_line(spurline, monkeypatch):
    class Interrupted(dict):
        def __contains__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setattr("spurline.cli.COMMANDS", Interrupted())
    assert spurline("train") == (130, "", "spurline: interrupted\n")
