"""Ctrl-C in a run, as a person types it: once and twice, on one rank and under `spurline launch`."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spurline.cli import main
from spurline.testing.tiny import write_words

ROOT = Path(__file__).parents[2]
TINY = """
--module deepseek_v3 --config deepseek_v3_debugmodel --data.path text --training.threads 1 --training.steps 100000
--training.seq_len 16 --training.local_batch_size 2 --metrics.validation_batches 0 --metrics.sample_tokens 0
--metrics.no_tensorboard --metrics.no_report --model.vocab_size 257 --model.dim 16 --model.num_layers 2
--model.dense_hidden_dim 24 --model.num_heads 2 --model.q_lora_rank 8 --model.kv_lora_rank 8
--model.qk_nope_head_dim 4 --model.qk_rope_head_dim 4 --model.v_head_dim 4 --model.moe.hidden_dim 16
--model.moe.num_experts 4 --model.moe.top_k 2 --checkpoint.interval 1000000
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a run in a folder of its own; returns the process once it has taken a step."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    write_words(tmp_path / "text")
    started = []

    def run(*command, **variables):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **variables}
        command = [sys.executable, "-m", "spurline", *command, *TINY.split()]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        started.append(process)
        for line in process.stdout:
            if line.removeprefix("[rank0]:").startswith("step "):
                break
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def press_ctrl_c(process):
    """As a terminal does: all processes of the group get the signal."""
    os.killpg(process.pid, signal.SIGINT)


def test_once_saves_a_checkpoint_and_ends_with_its_own_exit_code(start, tmp_path, capsys):
    process = start("train")
    press_ctrl_c(process)
    out, err = process.communicate(timeout=500)
    assert process.returncode == 75, err
    assert err == "\nSIGINT received: saving a checkpoint after this step; again ends at once\n"
    run = Path("outputs/deepseek_v3_debugmodel/0001")
    taken = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{taken:08d}"]
    assert f"stopped after step {taken} (SIGINT received); resume it by the same command and --job.resume {run}" in out
    assert main(["train", "--job.resume", str(run), "--training.steps", str(taken + 1)]) == 0
    assert f"resuming from the checkpoint of step {taken}" in capsys.readouterr().out


def test_twice_ends_at_once(start):
    process = start("train", SPURLINE_FAULTS="slow@save:seconds=1000")
    press_ctrl_c(process)
    assert process.stderr.readline() == "\n"
    assert process.stderr.readline().startswith("SIGINT received: saving a checkpoint")
    press_ctrl_c(process)
    _, err = process.communicate(timeout=500)
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in err


def left_in(folder):
    """The processes that work in a folder, other than this one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.name != str(os.getpid()) and os.readlink(process / "cwd") == str(folder):
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


LAUNCH = ("launch", "--ranks", "2", "--")
SAVING = "[rank0]:SIGINT received: saving a checkpoint after this step; again ends at once\n"


def test_once_under_launch_saves_on_all_ranks_without_a_word_of_torchrun(start, tmp_path):
    process = start(*LAUNCH)
    press_ctrl_c(process)
    out, err = process.communicate(timeout=500)
    assert (process.returncode, err) == (75, f"[rank0]:\n{SAVING}")
    run = Path("outputs/deepseek_v3_debugmodel/0001")
    taken = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{taken:08d}"]
    assert f"[rank0]:stopped after step {taken} (SIGINT received); resume it by the same command" in out
    assert left_in(tmp_path) == []


def test_twice_under_launch_ends_all_ranks_at_once(start, tmp_path):
    process = start(*LAUNCH, SPURLINE_FAULTS="slow@save:seconds=1000")
    press_ctrl_c(process)
    while (line := process.stderr.readline()) != SAVING:
        assert line, "it has ended"
    press_ctrl_c(process)
    _, err = process.communicate(timeout=500)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in err
    assert left_in(tmp_path) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG")
def test_a_single_rank_ends_with_its_killed_launcher(start, tmp_path):
    process = start("launch", "--ranks", "1", "--")
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while left_in(tmp_path):
        assert time.monotonic() < deadline, "the rank lives on without its launcher"
        time.sleep(0.05)


@pytest.mark.parametrize("where", ["imports", "elsewhere"])
def test_once_ends_a_command_whose_libraries_drop_the_interrupt(where):
    drop = "try: os.kill(os.getpid(), signal.SIGINT); time.sleep(9)\n{0}except BaseException: pass"
    inside = "with ended_by_interrupt('spurline train'):\n  " + drop.format("  ")
    script = "import os, signal, time\nfrom spurline.tools.console import ended_by_interrupt\n"
    script += (inside if where == "imports" else drop.format("")) + "\nprint('trains')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, preexec_fn=hear_ctrl_c)
    expected = (130, "", "spurline train: interrupted\n") if where == "imports" else (0, "trains\n", "")
    assert (done.returncode, done.stdout, done.stderr) == expected


def hear_ctrl_c():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # in the background of a script, it is ignored
