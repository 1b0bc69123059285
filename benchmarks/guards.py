"""CPU time that the guards of a healthy training step take: of the debug model's step, and of one ten times larger.

    python benchmarks/guards.py [--steps 40]

Guards are what a step does to find and name one that is not finite (train/metrics/tally.py, train/bad_steps.py), and
the comparison of copies (train/replicas.py), a pass over the parameters every hundredth step. Measured by the CPU time
inside their calls, and by steps with and without them in turn, which needs a quiet machine. One thread, one rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from spurline.config import RunConfig
from spurline.models.deepseek_v3.configs import deepseek_v3_debugmodel
from spurline.train.bad_steps import BadSteps
from spurline.train.metrics.tally import StepTally
from spurline.train.replicas import _sum_of_bits
from spurline.train.trainer import Trainer, make_trainer

REPLICA_INTERVAL = 100
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
    """A step that only decides whether it is finite."""

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
    """Adds up the CPU time inside the guards' calls, in spent[0]."""

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
    ratio = statistics.median(with_ / without for with_, without in zip(guarded, plain, strict=True))
    low, _, high = statistics.quantiles([a / b for a, b in zip(guarded, plain, strict=True)], n=4)
    size = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(
        f"{name}: {size / 1e6:.1f}M parameters, {usual * 1e3:.0f} ms of CPU time a step\n"
        f"  inside the guards of bad steps  {statistics.median(inside) / usual:.3%} of a step"
        f" ({statistics.median(inside) * 1e6:.0f} us)\n"
        f"  comparing copies, per step      {copies / usual:.3%} ({copies * 1e6:.0f} us)\n"
        f"  steps with and without guards   {ratio - 1:+.2%} (quartiles {low - 1:+.2%}, {high - 1:+.2%})",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="rounds of three steps")
    for name, config in configs():
        measure(name, config, parser.parse_args().steps)
