"""Muon on sharded parameters against Muon on one process, and checkpoints of it from one layout to another."""

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from spurline.comm import exchange
from spurline.config import Compile, Data, LRScheduler, Metrics, Optimizer, Parallelism, RunConfig, Training
from spurline.models.common.init import initialize
from spurline.models.deepseek_v3.configs import DeepSeekV3Config
from spurline.parallel.model import parallelize_model
from spurline.parallel.world import World, joined_world
from spurline.testing import RankPool
from spurline.testing.equivalence import relative_error
from spurline.testing.tiny import tiny_model
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.optimizer.build import build_optimizer
from spurline.train.trainer import make_trainer

SEQUENCES = 8


class Layout(NamedTuple):
    world: int
    dp_replicate: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    def parallelism(self) -> Parallelism:
        return Parallelism(self.dp_replicate, -1, self.tp, self.ep, self.etp)


ALONE = Layout(1)
FSDP_EP = Layout(4, ep=2)
MUON = Optimizer(name="muon", lr=0.02, groups=("*.experts.w2_EDF lr_factor=0.5",))
MODEL = tiny_model(moe={"hidden_dim": 20})


def with_experts(**changes: Any) -> DeepSeekV3Config:
    return replace(MODEL, moe=replace(MODEL.moe, **changes))


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


# The same gradients in every layout: then only rounding of the update itself is left.


def set_gradients(model: nn.Module, step: int) -> None:
    for index, parameter in enumerate(model.parameters()):
        gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1000 * step + index))
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            gradient = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
        parameter.grad = gradient


def updated_weights(world: World, model_config: DeepSeekV3Config, optimizer: Optimizer, num_steps: int = 3):
    """All weights after some steps, whole."""
    with torch.device("meta"):
        model = model_config.build()
    parallelize_model(model, world.meshes, "none", Compile())
    model.to_empty(device="cpu")
    initialize(model, 0)
    made = build_optimizer(model, optimizer)
    for step in range(1, num_steps + 1):
        set_gradients(model, step)
        made.step()
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def updated_on_rank(rank: int, layout: Layout, *args: Any) -> dict[str, Tensor]:
    environment = {"WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, environment), joined_world(layout.parallelism()) as world:
        return updated_weights(world, *args)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        pytest.param(Layout(2), MODEL, id="fsdp2"),
        pytest.param(Layout(2, tp=2), MODEL, id="tp2", marks=pytest.mark.slow),
        pytest.param(Layout(2, ep=2), MODEL, id="ep2", marks=pytest.mark.slow),
        pytest.param(FSDP_EP, MODEL, id="fsdp-ep", marks=pytest.mark.slow),
        pytest.param(Layout(4, ep=2, etp=2), MODEL, id="ep-etp"),
        pytest.param(Layout(4, tp=2, ep=2), replace(MODEL, dense_hidden_dim=22), id="fsdp-tp-ep-uneven"),
        pytest.param(Layout(4, dp_replicate=2, tp=2), MODEL, id="hsdp-tp", marks=pytest.mark.slow),
        pytest.param(Layout(4, ep=2), with_experts(num_experts=6), id="experts-cut-by-width", marks=pytest.mark.slow),
        pytest.param(Layout(4), replace(MODEL, q_lora_rank=9, kv_lora_rank=3), id="uneven-and-empty-shards"),
    ],
)
def test_update_of_every_shard_is_that_of_one_process(ranks: RankPool, layout: Layout, model: DeepSeekV3Config) -> None:
    expected = updated_weights(World.alone(), model, MUON)
    for actual in ranks.run(updated_on_rank, layout.world, layout, model, MUON):
        errors = {name: relative_error(actual[name], expected[name]) for name in expected}
        assert {name: error for name, error in errors.items() if error > 3e-6} == {}


def test_update_in_bfloat16_is_that_of_one_process(ranks: RankPool) -> None:
    layout, optimizer = Layout(4, tp=2, ep=2), replace(MUON, ns_dtype="bfloat16")
    expected = updated_weights(World.alone(), MODEL, optimizer)
    in_float32 = updated_weights(World.alone(), MODEL, MUON)
    for actual in ranks.run(updated_on_rank, layout.world, layout, MODEL, optimizer):
        for name in expected:
            assert relative_error(actual[name], expected[name]) < 1e-2, name
    assert not torch.equal(expected["layers.1.moe.experts.w1_EFD"], in_float32["layers.1.moe.experts.w1_EFD"])


def collectives_of_step(rank: int, layout: Layout, optimizer: Optimizer) -> dict[str, int]:
    with (
        mock.patch.dict(os.environ, {"WORLD_SIZE": str(dist.get_world_size())}),
        joined_world(layout.parallelism()) as world,
    ):
        with torch.device("meta"):
            model = MODEL.build()
        parallelize_model(model, world.meshes, "none", Compile())
        model.to_empty(device="cpu")
        initialize(model, 0)
        made = build_optimizer(model, optimizer)
        set_gradients(model, 1)
        with (
            mock.patch.object(exchange, "_all_to_all", wraps=exchange._all_to_all) as exchanged,
            CommDebugMode() as by_dtensor,
        ):
            made.step()
        sizes = [call.args[0].numel() for call in exchanged.call_args_list]
        return {"exchanges": len(sizes), "elements": sum(sizes), "by DTensor": by_dtensor.get_total_counts()}


def test_experts_sharded_by_expert_are_not_communicated(ranks: RankPool) -> None:
    only_experts = Optimizer(groups=("*.experts.* optimizer=muon",))
    for counts in ranks.run(collectives_of_step, 4, FSDP_EP, only_experts):
        assert counts == {"exchanges": 0, "elements": 0, "by DTensor": 0}


def test_matrices_that_are_cut_are_sent_once_in_each_direction(ranks: RankPool) -> None:
    only_down = Optimizer(groups=("*.shared_experts.w2_DF optimizer=muon", "*.attention.wo.* optimizer=muon"))
    per_rank = ranks.run(collectives_of_step, 4, Layout(4), only_down)
    num_elements = 2 * 16 * 20 + 3 * 16 * 16  # of two shared experts and of three attention layers
    # There, every rank sends its quarter of each; back, each sends the matrices that it has worked on.
    assert sum(counts["elements"] for counts in per_rank) == 2 * num_elements
    assert [counts["exchanges"] for counts in per_rank] == [4] * 4


# Whole training steps.


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("text")
    words = random.Random(0)
    (folder / "a.txt").write_text(" ".join("".join(words.choices("aeinrst", k=5)) for _ in range(1500)))
    return str(folder)


def make_config(text: str, layout: Layout) -> RunConfig[DeepSeekV3Config]:
    return RunConfig(
        model=MODEL,
        training=Training(
            steps=6,
            seq_len=16,
            local_batch_size=SEQUENCES * layout.tp // layout.world,
            global_batch_size=SEQUENCES,
            threads=1,
        ),
        optimizer=replace(MUON, lr=4e-3),
        lr_scheduler=LRScheduler(warmup_steps=2),
        parallelism=layout.parallelism(),
        data=Data(path=text, validation_fraction=0.0),
        metrics=Metrics(validation_batches=0),
    )


class Outcome(NamedTuple):
    losses: list[float]
    weights: dict[str, Tensor]


def train_steps(config: RunConfig[Any], world: World, first: int, last: int, load: str = "", save: str = "") -> Outcome:
    """Steps first to last, from the checkpoint of the step before in folder `load`, to one in folder `save`."""
    trainer = make_trainer(config, world)
    if load:
        CheckpointManager(Path(load), 1, 0).load(first - 1, trainer.model, trainer.optimizer)
    losses = [trainer.step(step).read()["loss"] for step in range(first, last + 1)]
    if save:
        CheckpointManager(Path(save), 1, 0).save(last, trainer.model, trainer.optimizer, {})
    return Outcome(losses, {name: whole(tensor) for name, tensor in trainer.model.state_dict().items()})


def train_on_rank(rank: int, config: RunConfig[Any], *args: Any) -> Outcome:
    environment = {"WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, environment), joined_world(config.parallelism) as world:
        return train_steps(config, world, *args)


def differing(actual: Outcome, expected: Outcome) -> list[str]:
    return [name for name, weight in expected.weights.items() if not torch.equal(actual.weights[name], weight)]


def test_steps_and_resume_with_muon(ranks: RankPool, text: str, tmp_path: Path) -> None:
    sharded, alone = make_config(text, FSDP_EP), make_config(text, ALONE)
    folder = str(tmp_path)
    straight = ranks.run(train_on_rank, 4, sharded, 1, 6)
    first_half = ranks.run(train_on_rank, 4, sharded, 1, 3, "", folder)
    resumed = ranks.run(train_on_rank, 4, sharded, 4, 6, folder)
    for before, after, whole_run in zip(first_half, resumed, straight, strict=True):
        assert before.losses + after.losses == whole_run.losses
        assert differing(after, whole_run) == []

    expected = train_steps(alone, World.alone(), 1, 6)
    assert straight[0].losses == pytest.approx(expected.losses, rel=2e-4)
    assert expected.losses[-1] < expected.losses[0] - 0.1, "nothing was learned"
    # From four ranks to one: the same state, so what follows differs by rounding alone.
    moved = train_steps(alone, World.alone(), 4, 6, folder)
    assert moved.losses == pytest.approx(straight[0].losses[3:], rel=2e-4)
    trainer = make_trainer(alone, World.alone())
    CheckpointManager(tmp_path, 1, 0).load(3, trainer.model, trainer.optimizer)
    momentum = trainer.optimizer.state[trainer.model.layers["1"].moe.experts.w1_EFD]["momentum_buffer"]
    assert momentum.shape == (8, 20, 16)
    assert momentum.abs().sum() > 0
