"""What a trainer does with pipeline stages besides steps: validation, text, metrics, copies of parameters."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from spurline.config import Parallelism, RunConfig
from spurline.parallel.pipeline import PipelinedModel
from spurline.parallel.precision import converted_layers
from spurline.parallel.world import World, joined_world
from spurline.testing import RankPool
from spurline.testing.tiny import tiny_model, tiny_run, write_words
from spurline.train.rate_sweep import sweep
from spurline.train.sample import sample_text
from spurline.train.trainer import Trainer, make_trainer
from spurline.train.validation import validate

# What is measured in a step of one rank and of many alike; the names of layers are those of the whole model.
SAME = ("loss", "grad_norm", "balance_loss", "expert_load", "routing")


def results_of(trainer: Trainer) -> dict[str, Any]:
    records = [trainer.step(step).read() for step in (1, 2)]
    copies = {}
    if isinstance(trainer.model, PipelinedModel):
        ends = [trainer.model.parts[number] for number in (0, trainer.model.layout.num_stages - 1)
                if number in trainer.model.parts]  # fmt: skip
        copies = {str(number): part.get_parameter("embedding.weight").full_tensor() for number, part in enumerate(ends)}
    return {
        "validation": validate(trainer),
        "text": sample_text(trainer),
        "records": [{name: record[name] for name in SAME} for record in records],
        "copies": copies,
    }


def rates_tried(config: RunConfig[Any], world: World) -> list[list[float]]:
    return [trial.losses for trial in sweep(config, world, [1e-3, 1e-2], 3, say=lambda line: None)]


def rates_tried_on_rank(rank: int, config: RunConfig[Any]) -> list[list[float]]:
    environment = {"WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, environment), joined_world(config.parallelism) as world:
        return rates_tried(config, world)


def run_on_rank(rank: int, config: RunConfig[Any]) -> dict[str, Any]:
    environment = {"WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, environment), joined_world(config.parallelism) as world:
        return results_of(make_trainer(config, world))


@pytest.mark.parametrize(
    ("schedule", "degrees"),
    [
        ("1F1B", {"expert_parallel_degree": 2}),
        ("ZBV", {}),
        pytest.param("Interleaved1F1B", {"tensor_parallel_degree": 2}, marks=pytest.mark.slow),
        pytest.param("DualPipeV", {"context_parallel_degree": 2}, marks=pytest.mark.slow),
    ],
)
def test_validation_text_and_metrics_are_those_of_one_rank(
    ranks: RankPool, tmp_path: Path, schedule: Any, degrees: dict[str, int]
) -> None:
    moe = {"bias_update_rate": 1e-2, "aux_loss": "sequence", "num_experts": 4}
    model = tiny_model(num_layers=4, tied_embeddings=True, moe=moe)
    data_ranks = 2 if "expert_parallel_degree" in degrees else 1
    together = tiny_run(
        write_words(tmp_path),
        model,
        training={"local_batch_size": 2, "global_batch_size": 16, "seq_len": 13},
        optimizer={"groups": ("layers.0.* lr_factor=0.5", "norm.* lr_factor=2")},  # neither matches all stages
    )
    # A validation batch has the sequences of all data ranks.
    alone = replace(together, training=replace(together.training, local_batch_size=2 * data_ranks))
    parallelism = Parallelism(pipeline_parallel_degree=2, pipeline_parallel_schedule=schedule, **degrees)
    expected = results_of(make_trainer(alone, World.alone()))
    num_ranks = 4 if degrees else 2
    copies = []
    for actual in ranks.run(run_on_rank, num_ranks, replace(together, parallelism=parallelism), timeout=240):
        assert actual["validation"] == pytest.approx(expected["validation"], rel=1e-5)
        assert actual["text"] == expected["text"]
        for record, known in zip(actual["records"], expected["records"], strict=True):
            assert record["expert_load"] == known["expert_load"]
            assert record["routing"].keys() == known["routing"].keys()
            for name in ("loss", "grad_norm", "balance_loss"):
                assert record[name] == pytest.approx(known[name], rel=1e-5), name
        copies += actual["copies"].values()
    # The embedding is on the first and on the last stage, and stays the same on both, bit for bit.
    assert len(copies) == 2 * num_ranks // 2
    assert all(torch.equal(copy, copies[0]) for copy in copies)


def test_every_rate_of_a_sweep_starts_from_the_same_weights_on_all_stages(ranks: RankPool, tmp_path: Path) -> None:
    """The first rank has both copies of the embedding, and draws one of them."""
    model = tiny_model(num_layers=4, tied_embeddings=True)
    config = tiny_run(write_words(tmp_path), model, training={"local_batch_size": 2, "global_batch_size": 8})
    expected = rates_tried(replace(config, training=replace(config.training, local_batch_size=8)), World.alone())
    stages = Parallelism(pipeline_parallel_degree=2, pipeline_parallel_schedule="ZBV")
    for found in ranks.run(rates_tried_on_rank, 2, replace(config, parallelism=stages)):
        assert found == [pytest.approx(losses, rel=1e-5) for losses in expected]


def converted_on_rank(rank: int, config: RunConfig[Any]) -> dict[str, int] | str:
    environment = {"WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, environment), joined_world(config.parallelism) as world:
        try:
            return converted_layers(make_trainer(config, world).model)
        except ValueError as error:
            return str(error)


def test_layers_in_8_bits_are_chosen_and_listed_for_the_whole_model(ranks: RankPool, tmp_path: Path) -> None:
    model = tiny_model(num_layers=4)
    config = tiny_run(write_words(tmp_path), model, precision={"recipe": "float8", "layers": ("*.wo", "output")})
    config = replace(config, parallelism=Parallelism(pipeline_parallel_degree=2))
    # Each rank has two of the blocks, and only the last one has the output.
    assert ranks.run(converted_on_rank, 2, config) == [{"layers.*.attention.wo": 4, "output": 1}] * 2
    nowhere = replace(config, precision=replace(config.precision, layers=("*.wo", "lm_head")))
    for message in ranks.run(converted_on_rank, 2, nowhere):
        assert message.startswith("precision.layers 'lm_head' names no layer that can be converted")
