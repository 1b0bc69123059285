"""Shell completion: what may come next, and that the shells take the scripts."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spurline.cli import COMMANDS, main
from spurline.tools.completion import candidates


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tr"], ["train"]),
        (["train", "--config", "deepseek_v3_d"], ["deepseek_v3_debugmodel"]),
        (["train", "--module", "qwen3_"], ["qwen3_vl"]),
        (["train", "--training.seq"], ["--training.seq_len"]),
        (["train", "--checkpoint.no_e"], ["--checkpoint.no_enable"]),
        (["checkpoint", ""], ["inspect", "ls", "prune", "verify"]),
        (["generate", "--max_t"], ["--max_tokens"]),
        (["generate", "--temp"], ["--temperature"]),
        (["runs", "c"], ["compare"]),
        (["convert", ""], ["from-hf", "merge", "to-hf", "to-peft", "upcycle"]),
        (["configs", "qwen3_0"], ["qwen3_0_6b"]),
        (["help", "tr"], ["train"]),
        (["train", "--training.dtype", ""], ["bfloat16", "float32"]),
        (["train", "--lr-scheduler.decay-type", "c"], ["cosine"]),
        (["plan", "--model.unknown", ""], []),
        (["convert", "from-hf", "in", "out", "--dtype", "b"], ["bfloat16"]),
        (["doctor", "--de"], []),
        (["nonsense", "--x"], []),
        (["report", "out"], []),
    ],
)
def test_what_may_come_next(words, expected):
    found = candidates(words)
    assert [word for word in expected if word not in found] == []
    assert len(found) == len(expected) or words[-1] in ("deepseek_v3_d", "qwen3_")


def test_every_command_is_completed_and_has_options():
    assert set(COMMANDS) <= set(candidates([""]))
    for command in COMMANDS:
        assert "--help" in candidates([command, "--"])


TAB_IN = {
    "bash": """
source ./script
COMP_WORDS=(spurline train --training.seq_l); COMP_CWORD=2; _spurline; echo ${COMPREPLY[@]}
""",
    "fish": """
source ./script
complete -C "spurline train --training.seq_l"
""",
    # An interactive shell behind a terminal: functions of zsh's completion can't be called from a script.
    "zsh": r"""
zmodload zsh/zpty
zpty inner zsh -f -i
zpty -w inner 'autoload -U compinit; compinit -u -D; source ./script; bindkey "^I" complete-word; print SE""T'
zpty -r -m inner until_set '*SET*'
zpty -w -n inner $'spurline train --training.seq_l\t'
zpty -r -m inner typed '*train --training.seq_len*'
print -r -- "--training.${${typed##*--training.}[1,7]}"
""",
}
"""What a Tab after `spurline train --training.seq_l` adds, as a script of the shell."""


@pytest.mark.parametrize("shell", TAB_IN)
def test_shells_complete_by_the_script(shell, capsys, tmp_path):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(script)
    (tmp_path / "spurline").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m spurline "$@"\n')
    (tmp_path / "spurline").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "HOME": str(tmp_path),
    }
    command = [shell, "-c", TAB_IN[shell]]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["--training.seq_len"], done.stderr


def test_unknown_shell_is_one_line(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert capsys.readouterr().err == "spurline completion: give one of bash, zsh, fish, got tcsh\n"
