"""The bubble of pipeline schedules on gloo ranks, compared with the prediction of `spurline plan`.

    python benchmarks/pipeline_bubble.py [--pp 4] [--micro_batches 8] [--delay 0.5] [--schedules 1F1B ZBV ...]

Every block sleeps for `delay` seconds in its forward pass and twice as long in its backward pass, so that step time
consists of sleeps and of waiting for other ranks, and hardly depends on the machine. The bubble is the fraction of a
step in which a rank is in neither a forward nor a backward pass. The first step, which connects the ranks, is not
measured.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spurline.parallel.pipeline import PipelinedModel, TrainingPipeline, make_layout
from spurline.parallel.stages import SCHEDULES, num_stages
from spurline.simulate.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    pipeline_times,
    schedule_order,
)
from spurline.testing import RankPool
from spurline.testing.tiny import tiny_model
from spurline.train.loss import cross_entropy_sum

BACKWARD_FACTOR = 2.0


class _SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()  # split backward passes detach it from its graph in place, which a view does not allow

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


def measure(rank: int, schedule: str, num_layers: int, micro_batches: int, delay: float, steps: int) -> float:
    """The bubble of this rank, in the best of `steps` steps."""
    torch.set_num_threads(1)
    config = tiny_model(num_layers=num_layers, num_dense_layers=0, vocab_size=32)
    group = dist.group.WORLD
    assert group is not None
    layout = make_layout(config, 8, schedule, group)
    model = PipelinedModel(config.build(), layout, lambda part: None)

    def sleep_in_forward(block: Any, args: Any, out: Tensor) -> Tensor:
        time.sleep(delay)
        slept: Tensor = _SleepInBackward.apply(out, BACKWARD_FACTOR * delay)
        return slept

    for block in model.layers.values():
        block.register_forward_hook(sleep_in_forward)
    tokens_BL = torch.zeros(1, 8, dtype=torch.int64)
    in_passes: list[float] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        in_passes.append(time.perf_counter() - started)

    pipeline = TrainingPipeline(model, micro_batches, tokens_BL, phase)

    def loss_of(part: Any, tokens_BL: Tensor, hidden_BlD: Tensor | None) -> Tensor:
        out: Tensor = part(tokens_BL, labels_BL=tokens_BL, loss_sum=cross_entropy_sum, hidden_BlD=hidden_BlD)
        return out

    bubbles = []
    for _ in range(steps + 1):
        in_passes.clear()
        dist.barrier()
        started = time.perf_counter()
        pipeline.step([tokens_BL] * micro_batches, loss_of)
        dist.barrier()
        bubbles.append(1 - sum(in_passes) / (time.perf_counter() - started))
    return min(bubbles[1:])


def planned(schedule: str, pp: int, num_layers: int, micro_batches: int) -> float:
    layers = num_layers // num_stages(schedule, pp)
    seconds = {FORWARD: 1.0, BACKWARD: BACKWARD_FACTOR}
    seconds |= {BACKWARD_INPUT: BACKWARD_FACTOR, BACKWARD_WEIGHT: 0.0}  # the sleep is on the path to the inputs
    order = schedule_order(schedule, pp, micro_batches)
    return pipeline_times(order, lambda kind, stage: layers * seconds[kind]).bubble


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--micro_batches", type=int, default=8)
    parser.add_argument("--delay", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--schedules", nargs="+", default=["GPipe", "1F1B", "Interleaved1F1B"], choices=list(SCHEDULES))
    args = parser.parse_args()
    num_layers = 2 * args.pp
    print(f"pp {args.pp}, {args.micro_batches} micro-batches, {num_layers} layers, {args.delay} s a layer")
    with RankPool() as pool:
        for schedule in args.schedules:
            work = schedule, num_layers, args.micro_batches, args.delay, args.steps
            bubbles = pool.run(measure, args.pp, *work, timeout=600)
            mean, plan = sum(bubbles) / len(bubbles), planned(schedule, args.pp, num_layers, args.micro_batches)
            print(f"{schedule:22} bubble {mean:6.1%}, planned {plan:6.1%}, ratio {mean / plan:.3f}", flush=True)


if __name__ == "__main__":
    main()
