"""Soak test: runs with injected faults under torchrun with restarts must end like the run without faults.

    python -m spurline.testing.soak faults --faults 100 --seconds 1200    # `make soak`
    python -m spurline.testing.soak runs --runs 200                       # `make soak-runs`

`faults` trains a tiny model on 4 gloo ranks (FSDP2 and EP) once without faults, then repeatedly with random faults, one
per attempt, in two jobs at a time; every other job writes its checkpoints in the background. It compares losses, every
byte of the last checkpoint and the samples of each step with the first run, checks that each fault was reported, and
prints a table of fault, point and outcome. `runs` starts complete runs one after the other and counts those that abort.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spurline import config_io
from spurline.config import RunConfig
from spurline.testing.run_result import run_result
from spurline.testing.tiny import tiny_model, tiny_run, write_words

RANKS, STEPS, INTERVAL, VALIDATION = 4, 36, 2, 4
WATCHDOG_SECONDS = 10
# Text that must appear in logs/errors.log of the run; empty for faults that a run survives silently.
MESSAGES = {
    "kill": "rank {rank} is gone",
    "stop": "rank {rank} has been silent",
    "raise": "InjectedError: a fault on purpose",
    "hang": "rank {rank} did not arrive",
    "nan": "the loss is nan",
    "splits": "which expects",
    "full_disk": "No space left on device (rank {rank})",
    "read_error": "rank {rank}: OSError",
    "bit_flip": "the gradient norm",
    "slow": "",
}


@dataclass(frozen=True)
class Planned:
    """A planned fault of a job: what happens where, when, and on which rank."""

    kind: str
    point: str
    step: int
    rank: int
    attempt: int

    @property
    def noted_as(self) -> tuple[int, str]:
        """Attempt and kind in the log of faults."""
        return self.attempt, "slow" if self.kind == "hang" else self.kind

    @property
    def text(self) -> str:
        kind = self.noted_as[1]
        seconds = {"hang": 600, "slow": 1}.get(self.kind, 0)
        return f"{kind}@{self.point}:step={self.step},rank={self.rank},attempt={self.attempt},seconds={seconds},bit=30"


def plan_job(draw: random.Random, num_faults: int) -> list[Planned]:
    """Random faults in increasing steps, and one after the last step.

    There is one fatal fault per attempt, and occasionally a slow operation as well.
    """
    faults: list[Planned] = []
    step = 3
    while len(faults) < num_faults - 1 and step < STEPS - 3:
        attempt = sum(fault.kind != "slow" for fault in faults)
        kind, point = draw.choice(FAULTS)
        at = step
        if point not in ("start", "load") and draw.random() < 0.25:
            faults.append(Planned("slow", draw.choice(("data", "exchange", "backward")), step, pick(draw), attempt))
            at += 4  # batches are prefetched
        if point in ("save", "write", "publish", "validation"):
            every = VALIDATION if point == "validation" else INTERVAL
            at += -at % every
        elif kind == "hang":
            at += at % 2  # not the first step of an attempt, which may take longer
        elif kind == "bit_flip":
            at += 1 - at % 2  # not at a checkpoint: the weight is huge, but finite until the next step
        faults.append(Planned(kind, point, 0 if point in ("start", "load") else at, pick(draw, point), attempt))
        step = at + 1
    attempt = sum(fault.kind != "slow" for fault in faults)
    return [*faults, Planned(*draw.choice(FAULTS_AT_THE_END), 0, pick(draw), attempt)]


def pick(draw: random.Random, point: str = "") -> int:
    return 0 if point == "publish" else draw.randrange(RANKS)  # only the first rank publishes


FAULTS = [
    *(("kill", point) for point in ("data", "exchange", "backward", "optimizer", "save", "write", "publish", "load")),
    *(("stop", point) for point in ("start", "exchange", "backward", "write")),
    *(("raise", point) for point in ("start", "load", "data", "forward", "backward", "validation", "publish")),
    *(("hang", point) for point in ("data", "forward")),
    ("nan", "forward"),
    ("splits", "exchange"),
    ("full_disk", "write"),
    ("read_error", "data"),
    ("bit_flip", "optimizer"),
]
FAULTS_AT_THE_END = [("kill", "end"), ("raise", "end"), ("stop", "end"), ("stop", "leave")]


class Soak:
    """The jobs of a soak test, in one folder."""

    def __init__(self, folder: Path, more: list[str]) -> None:
        self.folder, self.more = folder, more
        self.slowest = 0.0
        """Seconds until a fault was named, at most."""
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "text").mkdir(parents=True)
        write_words(folder / "text")
        config_io.save(folder / "config.json", "deepseek_v3", "deepseek_v3_debugmodel", self.config())

    def config(self) -> RunConfig[Any]:
        return tiny_run(
            self.folder / "text",
            tiny_model(num_layers=2, moe={"check_exchange": True, "bias_update_rate": 1e-3}),
            training={"steps": STEPS, "local_batch_size": 1, "global_batch_size": RANKS},
            parallelism={"expert_parallel_degree": 2},
            checkpoint={"enable": True, "interval": INTERVAL},
            comm={"watchdog_seconds": WATCHDOG_SECONDS},
            metrics={
                "validation_batches": 1,
                "validation_interval": VALIDATION,
                "sample_tokens": 0,
                "tensorboard": False,
                "report": False,
            },
        )

    def run(
        self, name: str, faults: list[Planned], *options: str, ranks: int = RANKS
    ) -> subprocess.CompletedProcess[str]:
        """Run one job under torchrun to its end."""
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
            *("--max-restarts", str(len(faults)), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
        ]
        train = ["-m", "spurline", "train", "--config_file", str(self.folder / "config.json")]
        folder = self.folder / name
        folder.mkdir()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            "SPURLINE_FAULTS": ";".join(fault.text for fault in faults) or ";",
            "SPURLINE_FAULTS_LOG": str(folder / "faults.jsonl"),
        }
        command = [*torchrun, *train, "--job.dump_folder", str(folder), *self.more, *options]
        # A fault is handled within a few watchdog timeouts, and an attempt takes seconds.
        seconds = (len(faults) + 1) * (12 * WATCHDOG_SECONDS + 120)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)

    def result(self, name: str) -> dict[str, Any]:
        """Results that must not depend on faults: metrics, the last checkpoint, the samples of each step."""
        samples: dict[tuple[int, int], set[tuple[int, ...]]] = {}
        for entry in self.notes(name):
            if "samples" in entry and entry["step"] <= STEPS:
                samples.setdefault((entry["step"], entry["rank"]), set()).add(tuple(entry["samples"]))
        return {**run_result(self.folder / name)._asdict(), "samples": dict(sorted(samples.items()))}

    def notes(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name / "faults.jsonl").read_text().splitlines()]

    def judge(self, name: str, faults: list[Planned], expected: dict[str, Any], done: Any) -> list[str]:
        """The problems of a job; empty if every fault was reported and the results match the undisturbed run."""
        problems = []
        if done.returncode:
            problems.append(f"exit code {done.returncode}: {done.stderr[-2000:]}")
        else:
            actual = self.result(name)
            problems += [f"other {part} than without faults" for part in actual if actual[part] != expected[part]]
        if "terminate called" in done.stderr:
            problems.append("a process has aborted")
        log = self.folder / name / "logs" / "errors.log"
        errors = log.read_text().splitlines() if log.exists() else []
        noted = [entry for entry in self.notes(name) if "kind" in entry]
        if len(noted) != len(faults):
            problems.append(f"{len(noted)} of {len(faults)} faults have happened")
        for fault in faults:
            words = MESSAGES[fault.kind].format(rank=fault.rank)
            if not words or fault.point == "start":  # before the ranks have a log
                continue
            told = [line for line in errors if f" attempt {fault.attempt}: " in line]
            if not any(words in line for line in told):
                problems.append(f"{fault.text}: {words!r} was not said, but {told}")
                continue
            happened = [entry["time"] for entry in noted if (entry["attempt"], entry["kind"]) == fault.noted_as]
            seconds = _time_of(told[0]) - max(happened, default=time.time())
            self.slowest = max(self.slowest, seconds)
            if seconds > 3 * WATCHDOG_SECONDS:
                problems.append(f"{fault.text}: was named after {seconds:.0f} s")
        return problems


def _time_of(line: str) -> float:
    """The time at the beginning of a line of errors.log, in whole seconds."""
    return time.mktime(time.strptime(line[:19], "%Y-%m-%d %H:%M:%S"))


def soak_faults(num_faults: int, seconds: float, seed: int, folder: Path, jobs: int, more: list[str]) -> int:
    """Jobs with random faults, `jobs` at a time: ranks that start or wait for a watchdog leave a core idle."""
    started, draw = time.monotonic(), random.Random(seed)
    soak = Soak(folder, more)
    done = soak.run("undisturbed", [])
    if done.returncode:
        print(done.stderr)
        return 1
    expected = soak.result("undisturbed")
    plans: list[list[Planned]] = []
    while (left := num_faults - sum(map(len, plans))) > 0:
        plans.append(plan_job(draw, min(12, left)))

    def problems_of(number: int) -> list[str] | None:
        """Run a job and judge it; None if the time is up."""
        if time.monotonic() - started > seconds:
            return None
        name, faults = job_name(number), plans[number]
        try:
            mode = ("async", "disabled")[number % 2]
            return soak.judge(name, faults, expected, soak.run(name, faults, "--checkpoint.async_mode", mode))
        except subprocess.TimeoutExpired:
            return ["it hangs"]

    table: Counter[tuple[str, str, str]] = Counter()
    problems_of_job: dict[int, list[str]] = {}
    total = 0
    with ThreadPoolExecutor(jobs) as pool:
        for number, problems in enumerate(pool.map(problems_of, range(len(plans)))):
            if problems is None:
                continue
            problems_of_job[number] = problems
            total += len(plans[number])
            table.update(outcomes_of(plans[number], problems))
            minutes = (time.monotonic() - started) / 60
            text = f"{job_name(number)}: {len(plans[number])} faults, {total} in all, {minutes:.1f} min"
            print(text, *problems, sep="\n  ", flush=True)
            if not problems:
                shutil.rmtree(folder / job_name(number))
    print("\n| fault | where | outcome | times |\n| --- | --- | --- | --- |")
    for (kind, point, outcome), times in sorted(table.items()):
        print(f"| {kind} | {point} | {outcome} | {times} |")
    failed, minutes = sum(map(bool, problems_of_job.values())), (time.monotonic() - started) / 60
    print(f"\n{total} faults in {len(problems_of_job)} jobs, {failed} failed, seed {seed}, {minutes:.1f} minutes")
    print(f"each was named within {soak.slowest:.0f} s (the limit of the watchdog is {WATCHDOG_SECONDS} s)")
    if total < num_faults:
        print(f"only {total} of {num_faults} faults: --seconds {seconds:g} were over")
    return 1 if failed or total < num_faults else 0


def job_name(number: int) -> str:
    return f"job_{number + 1:03}"


def outcomes_of(faults: list[Planned], problems: list[str]) -> list[tuple[str, str, str]]:
    """Kind, point and outcome of each fault; a problem that is not that of one fault is that of all."""
    texts = [fault.text for fault in faults]
    shared = [problem for problem in problems if not problem.startswith(tuple(texts))]
    outcomes = []
    for fault in faults:
        failed = shared or any(problem.startswith(fault.text) for problem in problems)
        good = "finished" if fault.kind == "slow" else "named, restarted, same end"
        outcomes.append((fault.kind, fault.point, "FAILED" if failed else good))
    return outcomes


def soak_runs(num_runs: int, seconds: float, folder: Path, more: list[str]) -> int:
    """Complete runs on two ranks with EP and checkpoints, asynchronous in every other run."""
    started = time.monotonic()
    soak = Soak(folder, more)
    outcomes: Counter[str] = Counter()
    short = ["--training.steps", "3", "--training.global_batch_size", "2", "--checkpoint.interval", "1"]
    for number in range(num_runs):
        if time.monotonic() - started > seconds:
            break
        mode = ("disabled", "async")[number % 2]
        done = soak.run("run", [], *short, "--checkpoint.async_mode", mode, ranks=2)
        is_good = done.returncode == 0 and "terminate called" not in done.stderr
        outcomes["finished" if is_good else "aborted"] += 1
        if not is_good:
            print(f"run {number + 1}: exit code {done.returncode}\n{done.stderr[-2000:]}", flush=True)
        shutil.rmtree(folder / "run")
        if number % 20 == 19:
            minutes = (time.monotonic() - started) / 60
            print(f"{number + 1} runs, {outcomes['aborted']} aborted, {minutes:.1f} minutes", flush=True)
    minutes = (time.monotonic() - started) / 60
    print(f"{outcomes.total()} runs in a row: {dict(outcomes)}, {minutes:.1f} minutes")
    if outcomes.total() < num_runs:
        print(f"only {outcomes.total()} of {num_runs} runs: --seconds {seconds:g} were over")
    return 1 if outcomes["finished"] < num_runs else 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m spurline.testing.soak", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("faults", "runs"))
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=900, help="no job is started later")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="jobs with faults at a time")
    parser.add_argument("--folder", type=Path, default=Path("outputs/soak"), help="is emptied first")
    known, more = parser.parse_known_args(argv)
    if known.what == "runs":
        return soak_runs(known.runs, known.seconds, known.folder, more)
    return soak_faults(known.faults, known.seconds, known.seed, known.folder, known.jobs, more)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
