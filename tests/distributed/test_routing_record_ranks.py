"""A recording of one layout, replayed in another: every token visits the same experts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    return replace(tiny_run("unused", MODEL, training=training, debug=debug), parallelism=parallelism)


def two_steps(world: World, config: RunConfig[Any]) -> list[Any]:
    trainer = make_trainer(config, world, _data(config))
    return [trainer.step(step).read()["expert_load"] for step in (1, 2)]


def on_rank(rank: int, config: RunConfig[Any]) -> list[Any]:
    degrees = resolve_degrees(config.parallelism, 4)
    return two_steps(World(torch.device("cpu"), degrees, build_meshes(degrees, "cpu")), config)


def test_recording_of_one_process_is_replayed_on_four_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """On ranks it is recorded again, with other weights: both recordings are the same."""
    first, second = tmp_path / "first", tmp_path / "second"
    loads = two_steps(World.alone("cpu"), config(Parallelism(), 8, record_routing=str(first)))
    layout = Parallelism(tensor_parallel_degree=2, expert_parallel_degree=2)
    debug = {"replay_routing": str(first), "record_routing": str(second)}
    for of_rank in ranks.run(on_rank, 4, config(layout, 2, seed=3, **debug)):  # two micro-batches a rank
        assert of_rank == loads
    assert len(list(second.glob("step-00000001-rank-*.npz"))) == 4
    shape = Shape(**json.loads((first / "routing.json").read_text()))
    for step in (1, 2):
        expected, found = read_step(first, step, shape), read_step(second, step, shape)
        assert all((found[layer] == expected[layer]).all() for layer in expected)
