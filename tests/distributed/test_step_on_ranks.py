"""What ranks tell each other between steps, and a step that fails on one of them."""

import math
import os
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
from spurline.train.agreement import Agreement
from spurline.train.trainer import Trainer, make_trainer


def exchange_four_times(rank: int) -> tuple[list[list[bool]], list[bool]]:
    agreement = Agreement(dist.group.WORLD)
    known = [agreement.exchange(rank == 1 and step == 1, rank == 0 and step == 2) for step in range(4)]
    return known, agreement.finish()


def test_what_one_rank_says_all_know_at_the_next_step(ranks: RankPool) -> None:
    nothing, first, second = [False, False], [True, False], [False, True]
    for known, last in ranks.run(exchange_four_times, 2):
        assert known == [nothing, nothing, first, second]
        assert last == nothing


def test_a_rank_alone_knows_at_once() -> None:
    agreement = Agreement(None)
    assert agreement.exchange(True, False) == [True, False]
    assert agreement.finish() == []


def everything(trainer: Trainer) -> list[Tensor]:
    state = [value for p in trainer.model.parameters() for value in trainer.optimizer.state[p].values()]
    tensors = [*trainer.model.parameters(), *trainer.model.buffers(), *state]
    persistent = [t for t in tensors if t.is_floating_point()]
    return [(t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in persistent]


def fail_on_one_rank(rank: int, config: RunConfig[Any]) -> tuple[bool, str, float]:
    environment = {"WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, environment), joined_world(config.parallelism) as world:
        trainer = make_trainer(config, world)
        trainer.step(1)
        biases = dict(trainer.model.named_buffers())
        before, right = everything(trainer), trainer.loss_sum
        if rank == 1:
            trainer.loss_sum = lambda logits, labels: right(logits, labels) * math.nan
        metrics = trainer.step(2)
        trainer.loss_sum = right
        # What a router has accumulated for the metrics of a step is not what it has learned.
        after = everything(trainer)
        names = [name for name, b in biases.items() if b.is_floating_point()]
        num_parameters = len(list(trainer.model.parameters()))
        learned = [
            i
            for i in range(len(before))
            if not num_parameters <= i < num_parameters + len(names) or names[i - num_parameters].endswith("bias_E")
        ]
        try:
            metrics.read()
            message = ""
        except ValueError as error:
            message = str(error)
        same = all(torch.equal(before[i], after[i]) for i in learned)
        return same, message, trainer.step(3).read()["loss"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_step_that_fails_on_one_rank_changes_nothing_on_any(ranks: RankPool, tmp_path, optimizer: str) -> None:
    write_words(tmp_path)
    model = tiny_model(moe={"bias_update_rate": 1e-3})
    config = tiny_run(tmp_path, model, optimizer={"name": optimizer}, training={"local_batch_size": 2})
    results = ranks.run(fail_on_one_rank, 2, config)
    for same, message, loss in results:
        assert same
        assert message.startswith(
            "step 2: the loss is nan and the gradient norm nan: micro-batch 1 of rank 1 (its loss is nan); "
        )
        assert math.isfinite(loss)
    assert len({loss for *_, loss in results}) == 1


def timeouts_of_groups(rank: int, seconds: int) -> set[float]:
    """The timeouts, in seconds, of the groups that a world was given."""
    with (
        mock.patch.dict(os.environ, {"WORLD_SIZE": str(dist.get_world_size())}),
        joined_world(Parallelism(expert_parallel_degree=2), "cpu", seconds) as world,
    ):
        assert world.meshes is not None
        groups = (world.host_group, world.group, world.meshes.expert_mesh.get_group(), world.meshes.batch_group)
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        return {backend.options._timeout.total_seconds() for backend in backends}


def test_timeout_holds_for_every_group(ranks: RankPool) -> None:
    assert ranks.run(timeouts_of_groups, 2, 77) == [{77.0}] * 2
    assert all(77.0 not in timeouts for timeouts in ranks.run(timeouts_of_groups, 2, 0))
