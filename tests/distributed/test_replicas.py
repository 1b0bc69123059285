"""Ranks that hold copies of a tensor find out which copy has changed; copies that were trained alike are alike."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from spurline.config import Parallelism, RunConfig
from spurline.parallel.world import joined_world
from spurline.testing import RankPool
from spurline.testing.tiny import tiny_model, tiny_run, write_words
from spurline.train.replicas import ReplicaCheck
from spurline.train.run import train
from spurline.train.trainer import Trainer, make_trainer


def times_minus_three(own: Tensor) -> None:
    own.mul_(-3)


def one_bit(own: Tensor) -> None:
    own.view(torch.int32).flatten()[-1].bitwise_xor_(1)


def told_after(rank: int, config: RunConfig[Any], faults: list[tuple[str, int, Callable[[Tensor], None]]]) -> list[str]:
    """What is said after two good steps, and after each fault (tensor, rank, how it changes), which is then undone."""
    environment = {"WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, environment), joined_world(config.parallelism) as world:
        trainer = make_trainer(config, world)
        replicas = ReplicaCheck(trainer.model, world, interval=1)
        told = [said(replicas, 0)]
        for step in (1, 2):
            trainer.step(step)
            told.append(said(replicas, step))
        for name, on_rank, change in faults:
            tensor = trainer.model.state_dict()[name]
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            before = own.clone()
            if rank == on_rank:
                change(own.detach())
            told.append(said(replicas, 9))
            own.detach().copy_(before)
        return told


def said(replicas: ReplicaCheck, step: int) -> str:
    try:
        replicas.check(step, saving=False)
        replicas.finish()
    except ValueError as error:
        return str(error)
    return ""


ATTENTION, NORM = "layers.1.attention.wq_b.weight", "layers.2.attention_norm.weight"
GATE, BIAS, EXPERTS = (
    "layers.1.moe.router.gate_ED",
    "layers.1.moe.router.expert_bias_E",
    "layers.2.moe.experts.w2_EDF",
)


@pytest.mark.parametrize(
    ("parallelism", "faults"),
    [
        (
            Parallelism(2, 2, expert_parallel_degree=2),
            [
                (ATTENTION, 3, times_minus_three, "ranks 1, 3 hold different values (dp_replicate)"),
                (EXPERTS, 0, one_bit, "ranks 0, 2 hold different values (dp_replicate)"),
                (BIAS, 2, one_bit, "rank 2 against ranks 0, 1, 3 (data)"),
            ],
        ),
        (
            Parallelism(1, 2, tensor_parallel_degree=2, expert_parallel_degree=2),
            [
                (NORM, 1, one_bit, "ranks 0, 1 hold different values (tp)"),
                (GATE, 2, times_minus_three, "ranks 2, 3 hold different values (tp)"),
            ],
        ),
        (Parallelism(4, 1), [(ATTENTION, 2, one_bit, "rank 2 against ranks 0, 1, 3 (dp_replicate)")]),
    ],
    ids=["hsdp", "tp", "four copies"],
)
def test_the_copy_that_has_changed_is_named(
    ranks: RankPool, tmp_path: Any, parallelism: Parallelism, faults: list[tuple[Any, ...]]
) -> None:
    config = tiny_run(
        write_words(tmp_path),
        tiny_model(moe={"bias_update_rate": 1e-3}),
        parallelism=parallelism,
        training={"steps": 2},
    )
    told = ranks.run(told_after, 4, config, [fault[:3] for fault in faults])
    assert told[1:] == told[:-1], "all ranks say the same"
    assert told[0][:3] == ["", "", ""]
    for (name, _, _, who), line in zip(faults, told[0][3:], strict=True):
        assert line.startswith(f"step 9: the copies of {name} differ: {who}.")


def train_with_a_fault(rank: int, config: RunConfig[Any]) -> str:
    """A whole run, in which a matrix of one replica is multiplied by -3 after step 3; returns its error."""
    step = Trainer.step

    def faulty(self: Trainer, number: int) -> Any:
        metrics = step(self, number)
        if number == 3 and rank == 1:
            times_minus_three(self.model.state_dict()[ATTENTION].to_local().detach())
        return metrics

    environment = {"WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, environment), mock.patch.object(Trainer, "step", faulty):
        try:
            train("deepseek_v3", "deepseek_v3_debugmodel", config)
        except ValueError as error:
            return str(error)
    return ""


def test_a_run_whose_replicas_differ_ends_without_another_checkpoint(ranks: RankPool, tmp_path: Any) -> None:
    (tmp_path / "text").mkdir()
    config = tiny_run(
        write_words(tmp_path / "text"),
        job={"dump_folder": str(tmp_path / "run")},
        parallelism=Parallelism(2, 1),
        checkpoint={"enable": True, "interval": 2},
        metrics={"validation_batches": 0, "sample_tokens": 0, "tensorboard": False},
    )
    told = ranks.run(train_with_a_fault, 2, config)
    assert told[0] == told[1]
    # With the default interval of 100 steps, the checkpoint of step 4 is the next occasion.
    assert told[0].startswith("step 4: the copies of ")
    assert "ranks 0, 1 hold different values (dp_replicate)" in told[0]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    sooner = replace(config, debug=replace(config.debug, check_replicas_interval=3))
    assert ranks.run(train_with_a_fault, 2, sooner)[0].startswith("step 3: the copies of ")
