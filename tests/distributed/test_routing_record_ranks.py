"""A recording of one layout, replayed in another: every token visits the same experts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spurline.config import Parallelism, RunConfig
from spurline.parallel.degrees import resolve_degrees
from spurline.parallel.mesh import build_meshes
from spurline.parallel.world import World
from spurline.testing import RankPool
from spurline.testing.tiny import tiny_model, tiny_run
from spurline.testing.verification.measure import _data
from spurline.train.routing_record import Shape, read_step
from spurline.train.trainer import make_trainer

MODEL = tiny_model(num_mtp_layers=1)


def config(parallelism: Parallelism, size: int, seed: int = 0, **debug: Any) -> RunConfig[Any]:
    # 15 positions: two ranks have 8 and 7 of them.
    training = {"steps": 2, "seq_len": 15, "global_batch_size": 8, "local_batch_size": size, "seed": seed}
    # Recomputed blocks route again, in a pipeline after the forward passes of other micro-batches.
    sections = {"training": training, "debug": debug, "activation_checkpoint": {"mode": "full"}}
    return replace(tiny_run("unused", MODEL, **sections), parallelism=parallelism)


def two_steps(world: World, config: RunConfig[Any]) -> list[Any]:
    trainer = make_trainer(config, world, _data(config))
    return [trainer.step(step).read()["expert_load"] for step in (1, 2)]


def on_rank(rank: int, config: RunConfig[Any]) -> list[Any]:
    degrees = resolve_degrees(config.parallelism, 4)
    return two_steps(World(torch.device("cpu"), degrees, build_meshes(degrees, "cpu")), config)


@pytest.mark.parametrize(
    ("layout", "files"),
    [
        pytest.param(Parallelism(tensor_parallel_degree=2, expert_parallel_degree=2), 4, marks=pytest.mark.slow),
        (Parallelism(context_parallel_degree=2, tensor_parallel_degree=2), 4),
        # The first stage is the dense layer and one with experts, or the dense layer alone.
        (Parallelism(pipeline_parallel_degree=2, context_parallel_degree=2), 4),
        pytest.param(Parallelism(context_parallel_degree=2, expert_parallel_degree=2), 4, marks=pytest.mark.slow),
        pytest.param(Parallelism(pipeline_parallel_degree=2, expert_parallel_degree=2), 4, marks=pytest.mark.slow),
    ],
)
def test_recording_of_one_process_is_replayed_on_four_ranks(
    ranks: RankPool, tmp_path: Path, layout: Parallelism, files: int
) -> None:
    """On ranks it is recorded again, with other weights: both recordings are the same."""
    first, second = tmp_path / "first", tmp_path / "second"
    loads = two_steps(World.alone("cpu"), config(Parallelism(), 8, record_routing=str(first)))
    debug = {"replay_routing": str(first), "record_routing": str(second)}
    for of_rank in ranks.run(on_rank, 4, config(layout, 2, seed=3, **debug)):  # several micro-batches a rank
        assert of_rank == loads
    assert len(list(second.glob("step-00000001-rank-*.npz"))) == files
    shape = Shape(**json.loads((first / "routing.json").read_text()))
    for step in (1, 2):
        expected, found = read_step(first, step, shape), read_step(second, step, shape)
        assert all((found[layer] == expected[layer]).all() for layer in expected)
