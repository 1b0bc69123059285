"""A loss that jumps and stays up: its steps are taken back, and its data is left out."""

import contextlib
import json
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from spurline.config import Job, Parallelism, RunConfig
from spurline.moe.dispatch.capacity import capacity_dispatchers
from spurline.testing import RankPool
from spurline.testing.tiny import tiny_model, tiny_run, write_words
from spurline.train.checkpoint.folder import CheckpointFolder
from spurline.train.metrics.loss_spikes import LossSpikes
from spurline.train.run import train
from spurline.train.step_back import SpikeWatch, step_back
from spurline.train.trainer import Trainer

PER_STEP = 4


def test_a_spike_lasts_when_it_has_as_many_logged_steps_in_a_row():
    spikes = LossSpikes(patience=3, window=10, fewest=5)
    assert [spikes.add(step, 2 + step % 2 / 10) for step in range(1, 11)] == [None] * 10
    assert [spikes.add(step, loss) for step, loss in ((11, 9.0), (12, 9.0), (13, 2.0))] == [None] * 3
    assert [spikes.add(14, 9.0), spikes.add(15, float("nan")), spikes.add(16, 8.0)] == [None] * 3
    spike = spikes.add(17, 9.0)
    assert (spike.first_step, spike.loss) == (14, 9.0)
    assert spike.usual == pytest.approx(2.05, abs=0.02)
    assert spikes.add(18, 9.0) is None, "told once"
    spikes.forget()
    assert [spikes.add(step, 9.0) for step in (14, 15)] == [None, None]
    assert spikes.add(16, 9.0).first_step == 14


def test_nothing_is_unusual_before_there_are_enough_values():
    spikes = LossSpikes(patience=1)
    assert [spikes.add(step, 100.0**step) for step in range(1, 20)] == [None] * 19


@pytest.fixture
def config(tmp_path):
    (tmp_path / "text").mkdir()
    return tiny_run(
        write_words(tmp_path / "text"),
        job=Job(str(tmp_path / "run")),
        training={"steps": 34, "local_batch_size": PER_STEP, "on_loss_spike": "step_back"},
        optimizer={"lr": 1e-4},
        checkpoint={"enable": True, "interval": 10},
        metrics={"validation_batches": 0, "sample_tokens": 0, "tensorboard": False},
    )


def run(config: RunConfig[Any], first_bad: int, num_bad: int) -> None:
    """The loss of steps that read some of these sequences is ten times what it should be."""
    loss_of, made = Trainer.loss_of, Trainer.micro_batches_on_host
    is_bad: list[bool] = []

    def read(self: Trainer, step: int) -> Any:
        first = self.first_sequence(step)
        is_bad.append(first_bad < first + self.global_batch_size and first < first_bad + num_bad)
        return made(self, step)

    def loss(self: Trainer, batch: Any) -> Any:
        return loss_of(self, batch) * (10 if is_bad.pop(0) else 1)

    # Without the thread that reads ahead, a loss follows each reading.
    with (
        mock.patch.object(Trainer, "micro_batches_on_host", read),
        mock.patch.object(Trainer, "loss_of", loss),
        mock.patch.object(Trainer, "prefetching", return_value=contextlib.nullcontext()),
    ):
        train("deepseek_v3", "deepseek_v3_debugmodel", config)


def check_run(folder: Any, per_step: int) -> None:
    """Steps 25, 26 and 27 were bad; the run has gone on from step 20 with the data behind them."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 35))
    assert max(line["loss"] for line in lines) < 6
    (recorded,) = [json.loads(line) for line in (folder / "bad_steps.jsonl").read_text().splitlines()]
    assert (recorded["step"], recorded["action"], recorded["first_sequence"]) == (25, "step_back", 24 * per_step)


def test_the_steps_of_a_spike_are_taken_back_and_its_data_is_left_out(config, tmp_path, capsys):
    run(config, 24 * PER_STEP, 3 * PER_STEP)
    out = capsys.readouterr().out
    assert (
        "at step 25, and stays there\nstepping back to the checkpoint of step 20, and leaving out the 28 sequences"
        in out
    )
    check_run(tmp_path / "run", PER_STEP)
    assert CheckpointFolder(tmp_path / "run").record(34).extra["sequences_seen"] == (27 + 14) * PER_STEP


def test_capacity_that_grew_during_the_spike_is_taken_back(config, tmp_path):
    def grow_and_step_back(trainer: Trainer, *args: Any) -> Any:
        for dispatcher in capacity_dispatchers(trainer.model).values():
            dispatcher.factor = 4.0
        return step_back(trainer, *args)

    roomy = tiny_model({"dispatcher": "capacity", "capacity_factor": 3.5, "overflow": "grow"})
    with mock.patch("spurline.train.run.step_back", grow_and_step_back):
        run(replace(config, model=roomy), 24 * PER_STEP, 3 * PER_STEP)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["capacity"]["layers.1.moe"]["factor"] for line in lines] == [3.5] * 34


def test_the_data_stays_left_out_when_the_run_is_killed_before_its_next_checkpoint(config, tmp_path, capsys):
    steps_taken = []

    def interrupt(self: Trainer, step: int) -> Any:
        steps_taken.append(step)
        if step == 22 and steps_taken.count(step) == 2:
            raise KeyboardInterrupt
        return step_of(self, step)

    step_of = Trainer.step
    with mock.patch.object(Trainer, "step", interrupt), pytest.raises(KeyboardInterrupt):
        run(config, 24 * PER_STEP, 3 * PER_STEP)
    assert steps_taken[-3:] == [20 + 7, 21, 22]
    capsys.readouterr()
    run(config, 24 * PER_STEP, 3 * PER_STEP)
    out = capsys.readouterr().out
    assert "resuming from the checkpoint of step 20\n" in out
    assert "stepping back" not in out
    check_run(tmp_path / "run", PER_STEP)
    assert CheckpointFolder(tmp_path / "run").record(34).extra["sequences_seen"] == (27 + 14) * PER_STEP


def test_a_spike_that_comes_again_ends_the_run_at_last(config, tmp_path, capsys):
    training = replace(config.training, loss_spike_skip_data=False, max_step_backs=1)
    with pytest.raises(ValueError, match=r"step 25: the loss jumps after 1 step-backs"):
        run(replace(config, training=training), 24 * PER_STEP, 100)
    assert capsys.readouterr().out.count("stepping back to the checkpoint of step 20\n") == 1
    assert CheckpointFolder(tmp_path / "run").steps() == [10, 20]


def test_without_a_checkpoint_before_it_a_spike_is_a_warning(config, capsys):
    run(replace(config, checkpoint=replace(config.checkpoint, interval=1000)), 24 * PER_STEP, 12)
    assert "there is no checkpoint before that to step back to" in capsys.readouterr().out


def test_it_needs_checkpoints(config):
    assert replace(config, checkpoint=replace(config.checkpoint, enable=False)).problems() == [
        "training.on_loss_spike step_back needs checkpoints: set checkpoint.enable"
    ]


def run_on_ranks(rank: int, config: RunConfig[Any]) -> None:
    with mock.patch.dict(os.environ, {"WORLD_SIZE": str(dist.get_world_size())}):
        run(config, 24 * 2 * PER_STEP, 3 * 2 * PER_STEP)


@pytest.mark.parametrize("patience", [1, 3])
def test_a_spike_counts_once_until_it_was_rolled_back(patience):
    """Several ranks learn of it one step later, which still has a high loss."""
    training = SimpleNamespace(on_loss_spike="step_back", loss_spike_patience=patience, max_step_backs=2)
    trainer = SimpleNamespace(
        config=SimpleNamespace(training=training),
        world=SimpleNamespace(is_first=True),
        bad_steps=SimpleNamespace(folder=None),
    )
    said = []
    watch = SpikeWatch(trainer, said.append)

    def wanted(step, loss):
        return watch.wants_step_back(step, loss, lambda before: 20)

    assert [wanted(step, 2 + step % 2 / 10) for step in range(1, 25)] == [0] * 24
    spike = [wanted(step, 20.0) for step in range(25, 26 + patience)]
    assert spike == [0] * (patience - 1) + [25, 0]
    watch.forget()
    again = [wanted(step, 20.0) for step in range(21, 22 + patience)]
    assert again == [0] * (patience - 1) + [21, 0], "the second of two step-backs"
    assert len(said) == 2


@pytest.mark.slow
def test_all_ranks_step_back_together(ranks: RankPool, config, tmp_path):
    ranks.run(run_on_ranks, 2, replace(config, parallelism=Parallelism(1, 2)))
    check_run(tmp_path / "run", 2 * PER_STEP)
    # They learn of it one step later.
    assert CheckpointFolder(tmp_path / "run").record(34).extra["sequences_seen"] == (28 + 14) * 2 * PER_STEP
