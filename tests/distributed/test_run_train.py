"""`run_train.sh`, as a person starts it: against `spurline train` on one rank, and what it says of bad input."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spurline.cli import main

ROOT = Path(__file__).parents[2]
PRESET = ["--module", "deepseek_v3", "--config", "deepseek_v3_debugmodel"]
# Eight sequences a step, whatever the number of ranks.
SMALL = {
    "training.steps": "3",
    "training.seq_len": "32",
    "training.local_batch_size": "2",
    "training.global_batch_size": "8",
    "training.threads": "1",
    "lr_scheduler.warmup_steps": "2",
    "metrics.validation_batches": "0",
    "metrics.sample_tokens": "4",
}
COMPILED = "--compile.enable --compile.components model,loss --compile.backend aot_eager"
EP = "--parallelism.expert_parallel_degree 2"
TP = "--parallelism.tensor_parallel_degree 2"
ETP = "--parallelism.expert_tensor_parallel_degree 2"
HSDP = "--parallelism.data_parallel_replicate_degree 2"
CP = "--parallelism.context_parallel_degree 2"
PP = "--parallelism.pipeline_parallel_degree 2"
FORCED = "--debug.moe_force_load_balance"

Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def _leave_torch_as_it_was():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    words = random.Random(0)
    text = " ".join("".join(words.choices("aeinrst", k=words.randint(1, 6))) for _ in range(3000))
    (tmp_path / "text.txt").write_text(text)
    return tmp_path / "text.txt"


@pytest.fixture
def start() -> Start:
    """Starts a command of this environment in the project's folder, and waits for its end."""

    def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **variables}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    return run


def options(text: Path, folder: Path, *more: str) -> list[str]:
    named = {"data.path": str(text), "job.dump_folder": str(folder), **SMALL}
    return [*(word for name, value in named.items() for word in (f"--{name}", value)), *" ".join(more).split()]


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_trains_like_one_rank(start: Start, text: Path, num_ranks: int, *more: str) -> subprocess.CompletedProcess:
    ranks, alone = text.parent / "ranks", text.parent / "alone"
    done = start("./run_train.sh", *options(text, ranks, *more), NGPU=str(num_ranks))
    assert done.returncode == 0, done.stderr
    here = [word for word in more if not word.startswith(("--parallelism", "--compile"))]
    assert main(["train", *PRESET, *options(text, alone, *here)]) == 0

    actual, expected = records_of(ranks), records_of(alone)
    assert len(actual) == len(expected) >= 3
    same_rows = True
    for record, one_rank in zip(actual, expected, strict=True):
        tolerance = 1e-5 if record["step"] == 1 else 1e-3
        # Once rounding has sent a row to another expert, norms differ by more than rounding.
        same_rows = same_rows and record["expert_load"] == one_rank["expert_load"]
        for key in ("loss", "grad_norm", "balance_loss") if same_rows else ("loss",):
            assert record[key] == pytest.approx(one_rank[key], rel=tolerance), f"{key} of step {record['step']}"
        assert record["tokens_seen"] == one_rank["tokens_seen"] == 8 * 32 * record["step"]
    assert actual[0]["expert_load"] == expected[0]["expert_load"]
    return done


def test_two_ranks_train_like_one_and_only_the_first_is_heard(start: Start, text: Path) -> None:
    done = assert_trains_like_one_rank(start, text, 2, EP, TP)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert all(line.startswith("[rank0]:") for line in lines)
    assert "[rank0]:3 steps of 256 tokens on 2 ranks (tp 2, ep 2), threads per rank: 1, freed memory is kept" in lines
    folder = text.parent / "ranks"
    assert lines[-2:] == [f"[rank0]:run folder: {folder}", f"[rank0]:report: {folder / 'report.html'}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "more"),
    [
        (2, [EP, COMPILED]),
        (2, [EP, COMPILED.replace("aot_eager", "inductor")]),
        (4, [EP, COMPILED]),
        (4, [EP, TP, COMPILED, "--activation_checkpoint.mode selective"]),
        (4, [EP, TP, ETP, COMPILED]),
        (4, [EP, ETP, COMPILED]),
        (4, [EP, COMPILED, FORCED]),
        (4, [EP, TP, COMPILED, FORCED]),
        (4, [EP, TP, ETP, FORCED, "--training.steps 20"]),
        (4, [EP, HSDP, "--training.steps 20"]),
        (4, [EP, TP, COMPILED, "--training.steps 20"]),
        (4, [EP, PP, "--training.steps 16"]),
        (4, [EP, CP, "--training.steps 16"]),
    ],
)
def test_ranks_train_like_one(start: Start, text: Path, num_ranks: int, more: list[str]) -> None:
    assert_trains_like_one_rank(start, text, num_ranks, *more)


def run_until(start: Start, text: Path, folder: Path, num_ranks: int, layout: str, stop_after: int = 0) -> list[Any]:
    """Runs 16 steps, or continues the run in the folder, up to a step; returns what is the same in every run."""
    more = [layout, "--training.steps 16 --checkpoint.enable", f"--debug.stop_after {stop_after}"]
    done = start("./run_train.sh", *options(text, folder, *more), NGPU=str(num_ranks))
    assert done.returncode == 0, done.stderr
    keys = ("step", "loss", "grad_norm", "balance_loss", "expert_load", "tokens_seen")
    return [{key: record[key] for key in keys} for record in records_of(folder)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [f"{PP} {EP}", f"{CP} {EP}"])
def test_a_run_that_stopped_goes_on_bit_for_bit_in_the_same_layout(start: Start, text: Path, layout: str) -> None:
    whole = run_until(start, text, text.parent / "whole", 4, layout)
    assert len(run_until(start, text, text.parent / "stopped", 4, layout, stop_after=8)) == 8
    assert run_until(start, text, text.parent / "stopped", 4, layout) == whole


@pytest.mark.slow
def test_a_run_in_stages_goes_on_without_them_on_fewer_ranks(start: Start, text: Path) -> None:
    """4 ranks with pp 2 and ep 2, then 2 ranks with ep 2, then 1 rank."""
    changing = text.parent / "changing"
    for num_ranks, layout, stop_after in ((4, f"{PP} {EP}", 5), (2, EP, 11), (1, "", 0)):
        found = run_until(start, text, changing, num_ranks, layout, stop_after)
    alone = run_until(start, text, text.parent / "alone", 1, "")
    assert [record["step"] for record in found] == list(range(1, 17))
    for record, expected in zip(found, alone, strict=True):
        assert record["loss"] == pytest.approx(expected["loss"], rel=1e-5 if record["step"] == 1 else 1e-3)


BAD = f"{TP.replace('2', '3')} {ETP} --training.seq_len 2 --model.moe.top_k 9"
PROBLEMS = [
    "spurline train: 6 problems",
    "  model.moe.top_k 9 is larger than num_experts 8: a token visits an expert once at most",
    "  parallelism: data_parallel_replicate_degree 1 x tensor_parallel_degree 3 = 3 must divide the number of ranks,"
    " but there are 2 ranks",
    "  parallelism.expert_tensor_parallel_degree 2 needs an expert_parallel_degree above 1",
    "  training.seq_len 2 is shorter than parallelism.tensor_parallel_degree 3, whose ranks share the positions of a"
    " sequence",
    "  parallelism.tensor_parallel_degree 3 does not divide the model's 4 attention heads",
    "  parallelism.tensor_parallel_degree 3 does not divide model.dense_hidden_dim 512; nearest that works for all of"
    " these: --parallelism.tensor_parallel_degree 2 --parallelism.expert_tensor_parallel_degree 1",
]


def test_all_problems_are_told_at_once_before_any_rank_starts(start: Start, text: Path) -> None:
    folder = text.parent / "run"
    done = start("./run_train.sh", *options(text, folder, BAD), NGPU="2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == PROBLEMS
    assert not folder.exists()


@pytest.mark.slow
def test_a_back_end_that_is_not_here_is_told_once_and_nothing_is_written(start: Start, text: Path) -> None:
    """Only ranks know their device: the first says it, and the launcher adds how it ended."""
    folder = text.parent / "run"
    triton = "--training.device cpu --model.moe.experts_backend triton"
    done = start("./run_train.sh", *options(text, folder, triton), NGPU="2", TRITON_INTERPRET="0")
    assert done.returncode == 2
    assert [line.partition(", not on cpu")[0] for line in [*done.stdout.splitlines(), *done.stderr.splitlines()]] == [
        "[rank0]:spurline train: experts_backend 'triton' runs on NVIDIA's and AMD's accelerators",
        "spurline launch: rank 0 ended with exit code 2",
    ]
    assert not folder.exists()


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ("--parallelism.data_parallel_shard_degree 3", "x tensor_parallel_degree 1 = 3, but there are 4 ranks"),
        ("--parallelism.expert_parallel_degree 16", "expert_parallel_degree 16 is more than the model's 8 experts"),
        ("--parallelism.expert_parallel_degree 3", "expert_parallel_degree 3 does not divide the model's 8 experts"),
        ("--training.local_batch_size 3", "training.global_batch_size 8 is not a multiple of"),
        (f"{EP} --model.moe.hidden_dim 5 {ETP}", "expert_tensor_parallel_degree 2 does not divide the experts' hidden"),
    ],
)  # fmt: skip
def test_ranks_that_can_not_share_the_model_are_refused(start: Start, text: Path, bad: str, told: str) -> None:
    folder = text.parent / "run"
    done = start("./run_train.sh", *options(text, folder, bad), NGPU="4")
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert "torch" not in done.stderr.replace("torchrun starts them", "")
    assert not folder.exists()


def test_ranks_that_torchrun_started_tell_problems_once(start: Start, text: Path) -> None:
    folder = text.parent / "run"
    torchrun = ["torchrun", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = start(*torchrun, "-m", "spurline", "train", *PRESET, *options(text, folder, BAD))
    assert done.returncode != 0
    for line in PROBLEMS:
        assert done.stderr.count(line) == 1
    assert not folder.exists()


def test_help_and_dry_run_start_no_ranks(start: Start, text: Path) -> None:
    folder = text.parent / "run"
    for option, told in (("--help", "usage: spurline train"), ("--dry-run", "(16 sequences of 32)")):
        done = start("./run_train.sh", *options(text, folder, "--training.global_batch_size -1", option), NGPU="8")
        assert (done.returncode, done.stderr) == (0, "")
        assert told in done.stdout
        assert "[rank0]" not in done.stdout
    assert not folder.exists()


@pytest.mark.parametrize("number", ["0", "two", "-1", "1.5"])
def test_number_of_ranks_has_to_be_one(start: Start, number: str) -> None:
    done = start("./run_train.sh", NGPU=number)
    assert (done.returncode, done.stderr) == (2, f"run_train.sh: NGPU must be a number of ranks, got '{number}'\n")
