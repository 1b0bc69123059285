"""Ranks that are killed, stopped, or fail: through a real torchrun, against an undisturbed run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from spurline.config import Job, RunConfig
from spurline.testing import RankPool
from spurline.testing.run_result import run_result
from spurline.testing.tiny import write_words
from spurline.tools.options import resolve
from spurline.train.run import train

ROOT = Path(__file__).parents[2]
# Two layers, one with experts; 4 x 16 tokens a step.
TINY = """
--data.validation_fraction 0.1 --training.threads 1 --training.steps 8 --training.seq_len 16
--training.local_batch_size 2 --optimizer.lr 4e-3 --lr_scheduler.warmup_steps 2 --metrics.validation_batches 1
--metrics.sample_tokens 0 --metrics.no_tensorboard --metrics.no_report --model.vocab_size 257 --model.dim 16
--model.num_layers 2 --model.dense_hidden_dim 24 --model.num_heads 2 --model.q_lora_rank 8 --model.kv_lora_rank 8
--model.qk_nope_head_dim 4 --model.qk_rope_head_dim 4 --model.v_head_dim 4 --model.moe.hidden_dim 16
--model.moe.num_experts 4 --model.moe.top_k 2 --parallelism.expert_parallel_degree 2
--checkpoint.enable --checkpoint.interval 2 --comm.watchdog_seconds 10
"""
PRESET = ["--module", "deepseek_v3", "--config", "deepseek_v3_debugmodel"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp("text"))


def options(text: Path, folder: Path, *more: str) -> list[str]:
    return ["--data.path", str(text), "--job.dump_folder", str(folder), *TINY.split(), *more]


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start():
    """Starts a command in the project's folder; what is left of it at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(*command: str, **variables: str) -> subprocess.Popen[str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **variables}
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()  # its ranks end with it
        process.communicate()


def run_here(rank: int, config: RunConfig[Any]) -> None:
    with mock.patch.dict(os.environ, {"WORLD_SIZE": "2"}):
        train("deepseek_v3", "deepseek_v3_debugmodel", config)


def config_of(text: Path, folder: Path, *more: str) -> RunConfig[Any]:
    with mock.patch.dict(os.environ, {"WORLD_SIZE": "2"}):
        config = resolve([*PRESET, *options(text, folder, *more)]).run_config
    return replace(config, job=Job(str(folder)))


def pids_in(folder: Path) -> set[int]:
    """Every process that was a rank of the run."""
    logs = "".join(path.read_text() for path in (folder / "logs").glob("rank_*.log"))
    return {int(pid) for pid in re.findall(r"process (\d+) on \S+, \d+ ranks", logs)}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(happened: Callable[[], bool], seconds: float = 500) -> None:
    """For tests that fail if it never happens; how long it takes decides nothing."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_killed_stopped_and_failing_ranks_are_named_and_the_restarted_run_ends_bit_for_bit(
    start: Start, ranks: RankPool, text: Path, tmp_path: Path
) -> None:
    faults = [
        "kill@backward:step=3,rank=1,attempt=0",
        "stop@exchange:step=5,rank=1,attempt=1",
        "raise@forward:step=7,rank=1,attempt=2",
    ]
    # All attempts share the number that the first one has claimed, also when `latest` names another run since.
    folder = tmp_path / "runs" / "0001"
    numbered = [*options(text, Path()), "--job.dump_folder=", "--job.runs_folder", str(folder.parent)]
    process = start("./run_train.sh", *numbered, NGPU="2", RESTARTS="3", SPURLINE_FAULTS=";".join(faults))
    out, err = process.communicate(timeout=1500)
    assert process.returncode == 0, err
    console = out + err
    # Only rank 0 is shown on the console, and all of this happened on rank 1.
    assert "spurline train: rank 1 is gone: process " in console
    assert "in step 3 (killed?)" in console
    assert re.search(r"spurline train: step 5: rank 1 has been silent for 8 s \(its process is stopped\)", console)
    assert "rank 0 waits for it" in console
    assert "spurline train: rank 1: InjectedError: a fault on purpose at forward of step 7" in console
    assert "[rank0]:restart 3, because rank 1: InjectedError" in console
    assert "terminate called" not in console

    logs = folder / "logs"
    stacks = (logs / "stacks_attempt_1_rank_0.txt").read_text()
    assert "(most recent call first)" in stacks
    assert re.search(r"^rank 0 .*forward.* of step 5, in \w+", stacks, re.MULTILINE)
    assert "Traceback" in (logs / "rank_1.log").read_text()
    assert len((logs / "errors.log").read_text().splitlines()) == 3
    assert len(pids_in(folder)) == 8
    assert not any(map(is_running, pids_in(folder)))
    assert not (folder / "run.lock").exists()

    ranks.run(run_here, 2, config_of(text, tmp_path / "undisturbed"))
    assert run_result(folder) == run_result(tmp_path / "undisturbed")
    assert sorted(path.name for path in folder.parent.iterdir()) == ["0001", "latest"]


def test_ranks_that_stop_before_the_folder_is_claimed_or_after_the_last_step_are_named(
    start: Start, text: Path, tmp_path: Path
) -> None:
    """Each would leave the others to the timeout of the process group, half an hour, and the test to its own."""
    faults = "stop@meet:rank=1,attempt=0; stop@leave:rank=1,attempt=1"
    folder = tmp_path / "run"
    process = start("./run_train.sh", *options(text, folder), NGPU="2", RESTARTS="2", SPURLINE_FAULTS=faults)
    out, err = process.communicate(timeout=500)
    console = out + err
    assert process.returncode == 0, console
    silent = r"step {}: rank {} has been silent for 8 s \(its process is stopped\)"
    assert "start of step 0" in console
    assert re.search(silent.format(0, 1), console)
    assert re.search(silent.format(8, 1), (folder / "logs" / "errors.log").read_text())
    assert "all 8 steps have been taken" in console
    assert json.loads((folder / "state.json").read_text())["state"] == "finished"


def test_error_is_named_while_the_rank_that_failed_waits_for_its_checkpoint(
    start: Start, text: Path, tmp_path: Path
) -> None:
    faults = "slow@write:rank=1,seconds=3600; raise@forward:step=4,rank=1"
    folder = tmp_path / "run"
    command = ["./run_train.sh", *options(text, folder, "--checkpoint.async_mode", "async")]
    process = start(*command, NGPU="2", SPURLINE_FAULTS=faults, SPURLINE_FAULTS_LOG=str(tmp_path / "faults"))
    out, err = process.communicate(timeout=500)
    error = "rank 1: InjectedError: a fault on purpose at forward of step 4"
    assert f"[rank0]:{error}; waiting for what the ranks have begun" in out
    assert f"spurline train: {error}" in err
    assert "did not arrive" not in out + err
    assert "Traceback" in (folder / "logs" / "rank_1.log").read_text()
    assert error in (folder / "logs" / "errors.log").read_text()


def rank_alone(start: Start, rank: int, port: int, *arguments: str) -> subprocess.Popen[str]:
    """One rank of two, started without torchrun."""
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return start(sys.executable, "-m", "spurline", "train", *PRESET, *arguments, **variables, **where)


@pytest.mark.slow
def test_ranks_with_other_options_are_refused_on_all_ranks(start: Start, text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = rank_alone(start, 0, 29871, *options(text, folder))
    second = rank_alone(start, 1, 29871, *options(text, folder, "--training.seed", "1", "--checkpoint.interval", "3"))
    line = (
        "ranks were started with different options: training.seed is 0 on rank 0 and 1 on rank 1; checkpoint.interval"
        " is 2 on rank 0 and 3 on rank 1. Start all ranks with the same command\n"
    )
    assert (*first.communicate(timeout=500), first.returncode) == ("", f"spurline train: {line}", 2)
    assert (*second.communicate(timeout=500), second.returncode) == ("", f"spurline train, rank 1: {line}", 2)
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG")
def test_ranks_end_with_a_killed_torchrun_and_the_next_job_takes_the_folder_over(
    start: Start, text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = ["./run_train.sh", *options(text, folder, "--training.steps", "100000")]
    first = start(*command, NGPU="2")
    wait_until(lambda: (folder / "checkpoints").is_dir() and bool(list((folder / "checkpoints").glob("step-*"))))
    refused = start(*command, NGPU="2")
    _, err = refused.communicate(timeout=500)
    assert refused.returncode == 4
    assert f"{folder} belongs to process " in err
    assert first.poll() is None
    pids = pids_in(folder)
    assert len(pids) == 2
    first.kill()
    wait_until(lambda: not any(map(is_running, pids)))
    assert (folder / "run.lock").exists()
    resumed = start(*command[:-2], "--training.steps", "100000", NGPU="2")
    wait_until(lambda: len(pids_in(folder)) == 4)
    resumed.send_signal(signal.SIGUSR1)
    out, _ = resumed.communicate(timeout=500)
    assert resumed.returncode == 75
    assert "resuming from the checkpoint of step" in out
    assert "(SIGUSR1 received); run the same command to resume" in out
    assert not any(map(is_running, pids_in(folder)))
