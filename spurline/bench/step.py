"""Training step of a debug model against the same model in `transformers`, each in its own process.

Both have the same shape (with different random weights), see the same tokens, clip gradients and take a fused AdamW
step; both are also measured compiled. Ours includes the balance loss of its config. The processes alternate, a few
steps at a time, so that other load on the machine affects all equally.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import IO, Any

import torch

from spurline.bench.figures import Figure
from spurline.bench.footprint import most_resident_bytes, resident_bytes
from spurline.bench.measure import Timing
from spurline.data import DataSets, open_data
from spurline.models import family_configs

MODELS = {"deepseek_v3_debugmodel": "deepseek_v3", "qwen3_debugmodel_moe": "qwen3"}
CANDIDATES = (
    "spurline",
    "spurline compiled",
    "transformers grouped_mm",
    "transformers eager",
    "transformers compiled",
)
STEPS_A_TURN = 3
Step = Callable[[int], object]
"""Runs the optimizer step with this number."""


def step(threads: int, seconds: float, cases: list[str]) -> Iterator[Figure]:
    """Seconds per step and memory, of ours and of `transformers` with its fastest experts implementation.

    Peak memory is for the full process, including about 300 MB for torch and the data; growth is what the model, the
    optimizer and the steps add.
    """
    for config in MODELS:
        with_workers = {name: _Worker(config, name, threads) for name in CANDIDATES}
        try:
            workers = {name: worker for name, worker in with_workers.items() if worker.is_there()}
            started, times = time.perf_counter(), {name: list[float]() for name in workers}
            while time.perf_counter() - started < seconds or len(times["spurline"]) < 5:
                for name, worker in workers.items():
                    times[name].append(worker.ask("steps")["seconds"])
            memory = {name: worker.ask("memory") for name, worker in workers.items()}
        finally:
            for worker in with_workers.values():
                worker.end()
        timings = {name: Timing(values) for name, values in times.items()}
        peers = [name for name in timings if name.startswith("transformers")]
        for what, unit, value in (
            ("seconds", "ms", {name: timing.median * 1e3 for name, timing in timings.items()}),
            ("peak memory", "MB", {name: sizes["peak"] / 1e6 for name, sizes in memory.items()}),
            ("growth", "MB", {name: sizes["growth"] / 1e6 for name, sizes in memory.items()}),
        ):
            best = min((value[name] for name in peers), default=None)
            for name in value:
                spread = timings[name].spread if what == "seconds" else None
                ratio = value[name] / best if best else None
                yield Figure("step", config, what, name, value[name], unit, threads, spread, None, ratio)


class _Worker:
    """A process that trains one candidate, a few steps per request."""

    def __init__(self, config: str, name: str, threads: int) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "spurline.bench.step", config, name, str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def is_there(self) -> bool:
        return self.ask("steps") is not None and self.ask("steps") is not None  # these are also the warmup

    def ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{what}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def end(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process may have exited, e.g. without transformers
            self._process.stdin.close()
        self._process.wait()


def _serve(config: str, name: str, threads: int, requests: IO[str]) -> None:
    run = family_configs(MODELS[config])[config]()
    run = replace(run, training=replace(run.training, steps=1_000_000))  # until stdin is closed
    torch.set_num_threads(threads)
    data = open_data(run.data, run.training.seq_len, run.training.seed)
    import_module("torch._dynamo")  # imported by both within a few steps: not part of the model's memory
    logging.getLogger("torch").setLevel(logging.ERROR)  # hide warnings about graph breaks
    compiled = name.endswith(" compiled")
    if name.startswith("spurline"):
        make_step = _ours(run, data, compiled)
    else:
        make_step = _theirs(run, data, MODELS[config], "eager" if name.endswith(" eager") else "grouped_mm", compiled)
    before = resident_bytes()
    take_step = make_step()
    number = 0
    for request in requests:
        answer: dict[str, float] = {}
        if request.strip() == "steps":
            begin = time.perf_counter()
            for _ in range(STEPS_A_TURN):
                number += 1
                take_step(number)
            answer["seconds"] = (time.perf_counter() - begin) / STEPS_A_TURN
        else:
            peak = most_resident_bytes()
            answer |= {"peak": peak, "growth": peak - before}
        print(json.dumps(answer), flush=True)


def _ours(run: Any, data: DataSets, compiled: bool) -> Callable[[], Step]:
    from spurline.train.allocator import keep_freed_memory
    from spurline.train.trainer import make_trainer

    keep_freed_memory()  # as `spurline train` does
    run = replace(run, compile=replace(run.compile, enable=compiled))
    return lambda: make_trainer(run, data=data).step


def _theirs(run: Any, data: DataSets, family: str, experts: str, compiled: bool) -> Callable[[], Step]:
    import transformers

    from spurline.hf.families import architecture_for

    architecture = architecture_for(family, run.model)
    config = transformers.AutoConfig.for_model(
        architecture.model_type, **architecture.write(run.model), use_cache=False
    )
    kind: Any = transformers.AutoModelForCausalLM._model_mapping[type(config)]  # imports the model's module

    def make_step() -> Step:
        model = kind._from_config(config, experts_implementation=experts)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
        if compiled:
            model.compile()
        return partial(_take_their_step, model, optimizer, data, run.training.local_batch_size)

    return make_step


def _take_their_step(model: Any, optimizer: torch.optim.Optimizer, data: DataSets, size: int, number: int) -> None:
    batch = data.train.batch((number - 1) * size, size)
    loss = model(input_ids=batch.tokens_BL, labels=batch.labels_BL, shift_labels=batch.labels_BL).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad()
    loss.item()


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.stdin)
