"""Runs that stop and go on: bit for bit in the same layout, and with the same samples in any other."""

import contextlib
import errno
import io
import itertools
import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from spurline.config import Checkpoint, Data, Debug, Job, LRScheduler, Metrics, Parallelism, RunConfig, Training
from spurline.models.qwen3_vl.configs import qwen3_vl_debugmodel_moe
from spurline.moe.config import MoEConfig
from spurline.testing import RankPool
from spurline.testing.params import slow_but
from spurline.testing.tiny import tiny_model
from spurline.train import run as run_module
from spurline.train.checkpoint.folder import CheckpointFolder
from spurline.train.checkpoint.writer import ChecksummedStream
from spurline.train.metrics.step_metrics import StepMetrics
from spurline.train.run import train
from spurline.train.trainer import Trainer, make_trainer

SEQUENCES = 8
# What a run repeats exactly; the others are time and memory.
REPEATABLE = (
    "step",
    "loss",
    "balance_loss",
    "grad_norm",
    "lr",
    "expert_load",
    "capacity",
    "tokens_seen",
    "validation_loss",
)


class Layout(NamedTuple):
    world: int
    tp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    pp: int = 1

    @property
    def dp(self) -> int:
        return self.world // (self.pp * self.cp * self.tp)


LAYOUTS = {
    "alone": Layout(1),
    "fsdp2": Layout(2),
    "ep2": Layout(2, ep=2),
    "fsdp-ep-tp": Layout(4, tp=2, ep=2),
    "cp-ep": Layout(2, cp=2, ep=2),
    "pp-ep": Layout(4, pp=2, ep=2),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("text")
    words = random.Random(0)
    content = " ".join("".join(words.choices("aeinrst", k=words.randint(1, 6))) for _ in range(1500))
    (folder / "a.txt").write_text(content)
    return str(folder)


def make_config(text: str, folder: Path, layout: Layout, backend: str = "auto", **checkpoint: Any) -> RunConfig[Any]:
    moe = MoEConfig(hidden_dim=16, num_experts=8, top_k=2, num_shared_experts=1, bias_update_rate=1e-3)
    return RunConfig(
        job=Job(str(folder)),
        model=tiny_model(num_layers=2, moe=replace(moe, experts_backend=backend)),
        training=Training(
            steps=6,
            seq_len=16,
            local_batch_size=SEQUENCES // (layout.dp * layout.pp),  # as many micro-batches as stages
            global_batch_size=SEQUENCES,
            threads=1,
        ),
        lr_scheduler=LRScheduler(warmup_steps=2),
        parallelism=Parallelism(
            1,
            -1,
            layout.tp,
            layout.ep,
            layout.etp,
            context_parallel_degree=layout.cp,
            pipeline_parallel_degree=layout.pp,
        ),
        data=Data(path=text, validation_fraction=0.05),
        metrics=Metrics(validation_batches=1, validation_interval=0, sample_tokens=0, tensorboard=False),
        checkpoint=Checkpoint(**{"enable": True, "interval": 2, **checkpoint}),
    )


class Outcome(NamedTuple):
    out: str
    weights: dict[str, torch.Tensor]
    ids_by_step: dict[int, list[int]]
    """What this rank read."""


def run(rank: int, config: RunConfig[Any], sigterm_after: int = 0, of_rank: int = 0) -> Outcome:
    """A whole run, by one of its ranks; a signal may reach one rank in the middle of a step."""
    made: list[Trainer] = []
    ids_by_step: dict[int, list[int]] = {}

    def noted(*args: Any, **options: Any) -> Trainer:
        trainer = make_trainer(*args, **options)
        made.append(trainer)
        step, micro_batches = trainer.step, trainer.micro_batches_on_host
        sample_ids = trainer.data.train.sample_ids

        def signalled(number: int) -> StepMetrics:
            if number == sigterm_after and rank == of_rank:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(number)

        def read(number: int) -> Any:
            ids_by_step[number] = []
            trainer.data.train.sample_ids = lambda *args: [
                ids_by_step[number].append(i) or i for i in sample_ids(*args)
            ]
            return micro_batches(number)

        trainer.step, trainer.micro_batches_on_host = signalled, read  # type: ignore[method-assign]
        return trainer

    out = io.StringIO()
    size = dist.get_world_size() if dist.is_initialized() else 1
    with (
        mock.patch.dict(os.environ, {"WORLD_SIZE": str(size)}),
        mock.patch.object(run_module, "make_trainer", noted),
        contextlib.redirect_stdout(out),
    ):
        train("deepseek_v3", "deepseek_v3_debugmodel", config)
    state = made[0].model.state_dict()
    weights = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}
    return Outcome(out.getvalue(), {name: weight.clone() for name, weight in weights.items()}, ids_by_step)


def run_all(ranks: RankPool, layout: Layout, config: RunConfig[Any], **options: Any) -> list[Outcome]:
    if layout.world == 1:
        return [run(0, config, **options)]
    return ranks.run(run, layout.world, config, *options.values())


def records_of(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: record[key] for key in REPEATABLE if key in record} for record in records]


@pytest.mark.parametrize(
    ("name", "async_mode"),
    slow_but(
        [("ep2", "async")],
        [*((name, "disabled") for name in LAYOUTS), ("alone", "async"), ("ep2", "async")],
    ),
)
def test_a_run_that_sigterm_has_stopped_goes_on_bit_for_bit(
    ranks: RankPool, text: str, tmp_path: Path, name: str, async_mode: str
) -> None:
    check_resume(ranks, LAYOUTS[name], make_config(text, tmp_path, LAYOUTS[name], async_mode=async_mode), tmp_path)


def test_capacity_that_grew_on_a_later_stage_goes_on_bit_for_bit(ranks: RankPool, text: str, tmp_path: Path) -> None:
    """The rank that writes the checkpoint has only the dense layer, so it doesn't know the factor itself."""
    config = make_config(text, tmp_path, layout := Layout(2, pp=2))
    moe = replace(config.model.moe, dispatcher="capacity", capacity_factor=0.5, overflow="grow")
    check_resume(ranks, layout, replace(config, model=replace(config.model, moe=moe)), tmp_path)
    factors = CheckpointFolder(tmp_path / "stopped").record(4).extra["capacity_factors"]
    assert list(factors) == ["layers.1.moe"]
    assert factors["layers.1.moe"] > 0.5


@pytest.mark.parametrize("name", ["alone", pytest.param("ep2", marks=pytest.mark.slow)])
def test_prediction_modules_go_on_bit_for_bit(ranks: RankPool, text: str, tmp_path: Path, name: str) -> None:
    config = make_config(text, tmp_path, LAYOUTS[name])
    check_resume(ranks, LAYOUTS[name], replace(config, model=replace(config.model, num_mtp_layers=1)), tmp_path)


def test_a_model_that_sees_pictures_goes_on_bit_for_bit(ranks: RankPool, text: str, tmp_path: Path) -> None:
    text_config, pictures = make_config(text, tmp_path, LAYOUTS["alone"]), qwen3_vl_debugmodel_moe()
    sections = {name: getattr(text_config, name) for name in ("metrics", "checkpoint", "lr_scheduler")}
    training = replace(pictures.training, steps=6, local_batch_size=2, threads=1)
    check_resume(ranks, LAYOUTS["alone"], replace(pictures, training=training, **sections), tmp_path)


def check_resume(ranks: RankPool, layout: Layout, config: RunConfig[Any], tmp_path: Path) -> None:
    whole = run_all(ranks, layout, replace(config, job=Job(str(tmp_path / "whole"))))
    config = replace(config, job=Job(str(tmp_path / "stopped")))
    stopped = run_all(ranks, layout, config, sigterm_after=3, of_rank=layout.world - 1)
    last = 3 if layout.world == 1 else 4  # several ranks learn of the signal while the next step computes
    assert f"stopped after step {last} (SIGTERM received); run the same command to resume" in stopped[0].out
    assert [record["step"] for record in records_of(tmp_path / "stopped")] == list(range(1, last + 1))
    resumed = run_all(ranks, layout, config)
    assert f"resuming from the checkpoint of step {last}" in resumed[0].out
    assert records_of(tmp_path / "stopped") == records_of(tmp_path / "whole")
    for actual, expected in zip(resumed, whole, strict=True):
        assert [
            name for name in expected.weights if not torch.equal(actual.weights[name], expected.weights[name])
        ] == []


def chain(ranks: RankPool, text: str, folder: Path, layouts: list[tuple[Layout, str]]) -> dict[int, list[int]]:
    """One run whose layout changes after each two steps; returns what was read in each step, of all ranks."""
    ids_by_step: dict[int, list[int]] = {}
    for number, (layout, backend) in enumerate(layouts, 1):
        config = replace(make_config(text, folder, layout, backend), debug=Debug(stop_after=2 * number))
        outcomes = run_all(ranks, layout, config)
        assert ("resuming from the checkpoint" in outcomes[0].out) == (number > 1)
        # The ranks of a pipeline, and of a cp or tp group, read the same.
        for outcome in outcomes[: layout.world // layout.pp : layout.cp * layout.tp]:
            for step, ids in outcome.ids_by_step.items():
                ids_by_step.setdefault(step, []).extend(ids)
    return ids_by_step


CHAINS = {
    "4-2-1 ranks": [(Layout(4, ep=2), "auto"), (Layout(2), "loop"), (Layout(1), "auto")],
    "ep 1-2-4": [(Layout(1), "auto"), (Layout(2, ep=2), "auto"), (Layout(4, ep=4), "auto")],
    "pp 2, ep 2, alone": [(Layout(4, pp=2, ep=2), "auto"), (Layout(2, ep=2), "auto"), (Layout(1), "auto")],
    "alone, cp 2, pp 2": [(Layout(1), "auto"), (Layout(2, cp=2), "auto"), (Layout(4, pp=2, ep=2), "auto")],
    "ep 4-1-2, tp, etp": [(Layout(4, tp=2, ep=4), "auto"), (Layout(2, tp=2), "auto"), (Layout(4, ep=2, etp=2), "loop")],
}


@pytest.mark.parametrize("name", slow_but(["ep 4-1-2, tp, etp"], CHAINS))
def test_ranks_may_change_and_every_sample_is_read_once(ranks: RankPool, text: str, tmp_path: Path, name: str) -> None:
    (alone,) = run_all(ranks, Layout(1), make_config(text, tmp_path / "whole", Layout(1)))
    ids_by_step = chain(ranks, text, tmp_path / "changing", CHAINS[name])
    assert {step: sorted(ids) for step, ids in ids_by_step.items()} == {
        step: sorted(ids) for step, ids in alone.ids_by_step.items()
    }
    seen = [i for ids in ids_by_step.values() for i in ids]
    assert len(seen) == len(set(seen)) == 6 * SEQUENCES
    for record, expected in zip(records_of(tmp_path / "changing"), records_of(tmp_path / "whole"), strict=True):
        assert record["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert record["expert_load"] == expected["expert_load"]


def run_with_a_full_disk(rank: int, config: RunConfig[Any], full_on: int) -> str:
    write = ChecksummedStream.write

    def full(self: ChecksummedStream, data: Any) -> int:
        if "step-00000004" in str(self._file.name):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    patched = mock.patch.object(ChecksummedStream, "write", full) if rank == full_on else contextlib.nullcontext()
    with patched, pytest.raises(ValueError, match="can't write") as refused:
        run(rank, config)
    return str(refused.value)


@pytest.mark.parametrize(
    ("full_on", "async_mode"), slow_but([(1, "async")], itertools.product([0, 1], ["disabled", "async"]))
)
def test_a_full_disk_on_one_rank_ends_all_with_its_message(
    ranks: RankPool, text: str, tmp_path: Path, full_on: int, async_mode: str
) -> None:
    layout = LAYOUTS["ep2"]
    config = make_config(text, tmp_path, layout, async_mode=async_mode)
    told = ranks.run(run_with_a_full_disk, 2, config, full_on)
    reason = f"No space left on device (rank {full_on}). Older checkpoints are unchanged"
    assert told == [f"can't write the checkpoint of step 4: {reason}"] * 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000002"]
    assert "resuming from the checkpoint of step 2" in run_all(ranks, layout, config)[0].out


def test_damage_is_found_by_all_ranks_together(ranks: RankPool, text: str, tmp_path: Path) -> None:
    layout = LAYOUTS["fsdp2"]
    config = make_config(text, tmp_path, layout)
    run_all(ranks, layout, replace(config, debug=Debug(stop_after=4)))
    shard = tmp_path / "checkpoints" / "step-00000004" / "rank-00001-00000.tensors"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    out = run_all(ranks, layout, config)[0].out
    (line,) = [line for line in out.splitlines() if "damaged" in line]
    assert line.startswith("falling back to the checkpoint of step 2: that of step 4 is damaged, '")
    assert "step-00000004/rank-00001-00000.tensors' is damaged" in line
    assert [record["step"] for record in records_of(tmp_path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("worlds", [(2, 1, 4)])
def test_the_default_batch_size_follows_the_ranks_and_every_sample_is_read_once(
    ranks: RankPool, text: str, tmp_path: Path, worlds: tuple[int, ...]
) -> None:
    read: list[int] = []
    for number, world in enumerate(worlds, 1):
        config = replace(make_config(text, tmp_path, Layout(world)), debug=Debug(stop_after=2 * number))
        config = replace(config, training=replace(config.training, local_batch_size=4, global_batch_size=-1))
        for outcome in run_all(ranks, Layout(world), config):
            read += [i for ids in outcome.ids_by_step.values() for i in ids]
    num_sequences = 2 * 4 * sum(worlds)
    expected = make_trainer(make_config(text, tmp_path, Layout(1))).data.train.sample_ids(0, num_sequences)
    assert sorted(read) == sorted(expected)
    assert len(set(read)) == num_sequences
    assert records_of(tmp_path)[-1]["tokens_seen"] == num_sequences * 16
