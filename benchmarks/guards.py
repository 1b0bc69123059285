"""CPU time of the guards in a healthy training step: for the debug model, and for one ten times larger.

    python benchmarks/guards.py [--steps 40]

Guards detect and locate non-finite steps (train/metrics/tally.py, train/bad_steps.py) and compare replicas
(train/replicas.py), a pass over the parameters every hundredth step. Measured as CPU time inside their calls, and by
alternating steps with and without them, which needs a quiet machine. One thread, one rank.
The watchdog's thread (train/watchdog.py) sends a heartbeat every 5 seconds, which also renews the run folder's lock
(train/folder_lock.py): measured as rank 0 of two ranks that share a store.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from spurline.config import RunConfig
from spurline.models.deepseek_v3.configs import deepseek_v3_debugmodel
from spurline.parallel.rendezvous import Meeting
from spurline.train.bad_steps import BadSteps
from spurline.train.folder_lock import FolderLock
from spurline.train.metrics.tally import StepTally
from spurline.train.replicas import _sum_of_bits
from spurline.train.side_channel import SideChannel
from spurline.train.trainer import Trainer, make_trainer
from spurline.train.watchdog import Watchdog

REPLICA_INTERVAL = 100
SECONDS_BETWEEN_BEATS = 5.0
GUARDS = [(StepTally, "note"), (BadSteps, "note"), (BadSteps, "note_micro_batch"), (BadSteps, "_look_at_input_grad")]


def configs() -> Iterator[tuple[str, RunConfig[Any]]]:
    preset = deepseek_v3_debugmodel()
    config = replace(preset, training=replace(preset.training, threads=1, steps=10_000))
    yield "debug model", config
    model = config.model
    wide = replace(
        model,
        dim=3 * model.dim,
        dense_hidden_dim=3 * model.dense_hidden_dim,
        moe=replace(model.moe, hidden_dim=4 * model.moe.hidden_dim),
    )
    yield "ten times larger", replace(config, model=wide)


def nothing(*args: Any) -> None:
    return None


@contextmanager
def without_guards() -> Iterator[None]:
    """Reduce the guards to a check that the step is finite."""

    def decide(self: StepTally, step: int, num_tokens: Tensor, loss: Tensor, grad_norm: Tensor) -> Tensor:
        return (~torch.isfinite(loss + grad_norm)).float()

    with (
        mock.patch.object(StepTally, "note", decide),
        mock.patch.object(BadSteps, "note", nothing),
        mock.patch.object(BadSteps, "note_micro_batch", nothing),
        mock.patch.object(BadSteps, "_watch_input", nothing),
    ):
        yield


@contextmanager
def timed(spent: list[float]) -> Iterator[None]:
    """Add the CPU time inside the guards' calls to spent[0]."""

    def wrap(owner: type, name: str) -> Any:
        right: Callable[..., Any] = getattr(owner, name)

        def measured(*args: Any) -> Any:
            begin = time.process_time()
            result = right(*args)
            spent[0] += time.process_time() - begin
            return result

        return mock.patch.object(owner, name, measured)

    patches = [wrap(owner, name) for owner, name in GUARDS]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def cpu_seconds(trainer: Trainer, step: int) -> float:
    begin = time.process_time()
    trainer.step(step)
    return time.process_time() - begin


def beat_seconds(trainer: Trainer, number: int = 200) -> float:
    """CPU time of a heartbeat of one of two ranks and of the marks of a step, in the watchdog's thread."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        lock, spent = FolderLock(folder), []
        lock.take()
        channels = [SideChannel(Meeting(rank, 2, store, store.clone())) for rank in (0, 1)]
        watchdog, other = (Watchdog(channel=channel) for channel in channels)
        watchdog.module_names = {id(module): name for name, module in trainer.model.named_modules()}

        def beat() -> None:
            for _ in range(number):
                channels[1].send(other._beat())
                begin = time.thread_time()
                lock.beat()
                watchdog._watch_others(channels[0], False)
                for _ in range(8):
                    watchdog.mark(1, "step")
                spent.append(time.thread_time() - begin)

        thread = threading.Thread(target=beat)
        thread.start()
        thread.join()
        lock.release()
    return statistics.median(spent)


def measure(name: str, config: RunConfig[Any], steps: int) -> None:
    trainer = make_trainer(config)
    for step in (1, 2, 3):
        trainer.step(step)
    plain, guarded, inside = [], [], []
    for number in range(steps):
        step = 4 + 3 * number
        with without_guards():
            plain.append(cpu_seconds(trainer, step))
        guarded.append(cpu_seconds(trainer, step + 1))
        spent = [0.0]
        with timed(spent):
            cpu_seconds(trainer, step + 2)
        inside.append(spent[0])
    usual = statistics.median(plain)
    begin = time.process_time()
    for _ in range(5):
        torch.stack([_sum_of_bits(parameter) for parameter in trainer.model.parameters()])
    copies = (time.process_time() - begin) / 5 / REPLICA_INTERVAL
    beats = beat_seconds(trainer) * usual / SECONDS_BETWEEN_BEATS
    ratio = statistics.median(with_ / without for with_, without in zip(guarded, plain, strict=True))
    low, _, high = statistics.quantiles([a / b for a, b in zip(guarded, plain, strict=True)], n=4)
    size = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(
        f"{name}: {size / 1e6:.1f}M parameters, {usual * 1e3:.0f} ms of CPU time a step\n"
        f"  inside the guards of bad steps  {statistics.median(inside) / usual:.3%} of a step"
        f" ({statistics.median(inside) * 1e6:.0f} us)\n"
        f"  comparing copies, per step      {copies / usual:.3%} ({copies * 1e6:.0f} us)\n"
        f"  watchdog and folder, per step   {beats / usual:.3%} ({beats * 1e6:.0f} us)\n"
        f"  steps with and without guards   {ratio - 1:+.2%} (quartiles {low - 1:+.2%}, {high - 1:+.2%})",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="rounds of three steps")
    for name, config in configs():
        measure(name, config, parser.parse_args().steps)
