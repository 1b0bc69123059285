"""Steps that are not finite: named, recorded, and skipped or not."""

import json
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch

from spurline.config import Job
from spurline.testing.tiny import tiny_run, write_words
from spurline.train.bad_steps import Evidence, _together
from spurline.train.run import train
from spurline.train.trainer import Trainer, make_trainer


@pytest.fixture
def config(tmp_path):
    (tmp_path / "text").mkdir()
    return tiny_run(
        write_words(tmp_path / "text"),
        job=Job(str(tmp_path / "run")),
        training={"local_batch_size": 2, "global_batch_size": 6},
        metrics={"validation_batches": 0, "sample_tokens": 0, "tensorboard": False},
    )


def skipping(config, **training):
    return replace(config, training=replace(config.training, on_bad_step="skip", **training))


def poison_loss(trainer, micro_batch, by=math.nan):
    """The loss of one micro-batch of the next step is multiplied by `by`; returns how to stop that."""
    right, calls = trainer.loss_of, iter(range(10**6))
    trainer.loss_of = lambda batch: right(batch) * (by if next(calls) == micro_batch else 1)
    return lambda: setattr(trainer, "loss_of", right)


def poison_gradient(trainer, layer):
    """Gradients are not finite from this layer's output on down."""
    return trainer.model.layers[layer].register_forward_hook(
        lambda module, args, output: output.register_hook(lambda grad: grad * math.inf) and None
    )


def message_of(metrics):
    with pytest.raises(ValueError, match="step") as raised:
        metrics.read()
    return str(raised.value)


def test_the_micro_batch_whose_loss_is_not_finite_is_named(config):
    trainer = make_trainer(config)
    trainer.step(1)
    stop = poison_loss(trainer, micro_batch=1)
    trainer.step(2)
    stop()
    told = message_of(trainer.step(3))
    assert told.startswith(
        "step 2: the loss is nan and the gradient norm nan: micro-batch 2 of rank 0 (its loss is nan); "
        "47 of 47 gradients are not finite, in the order of the backward pass first output.weight, norm.weight, "
    )
    assert "largest finite gradient norms now" not in told
    assert "largest finite gradient norms before: " in told
    assert "Try a lower --optimizer.lr" in told


def test_the_first_layer_whose_gradient_is_not_finite_is_named_with_a_loss_that_is(config):
    trainer = make_trainer(replace(config, training=replace(config.training, max_grad_norm=0.0)))
    trainer.step(1)
    handle = poison_gradient(trainer, "1")
    trainer.optimizer.zero_grad = lambda: None
    metrics = trainer.step(2)
    norms = gradient_norms(trainer)
    handle.remove()
    told = message_of(metrics)
    assert "micro-batch 1 of rank 0 (its loss is finite, its gradient is not), micro-batch 2" in told
    of_layer_1 = [name for name in dict(trainer.model.named_parameters()) if name.startswith("layers.1.")]
    assert f"in the order of the backward pass first {of_layer_1[-1]}, {of_layer_1[-2]}, " in told
    largest = max(norms[name] for name in norms if name.startswith("layers.2."))
    assert f"layers.2 {largest:.3g}" in told


def gradient_norms(trainer):
    parameters = trainer.model.named_parameters()
    return {name: torch.linalg.vector_norm(parameter.grad).item() for name, parameter in parameters}


def test_a_parameter_that_gets_its_first_gradient_later_is_named_too(config):
    trainer = make_trainer(config)
    trainer.model.norm.weight.requires_grad_(False)
    trainer.step(1)
    trainer.model.norm.weight.requires_grad_(True)
    stop = poison_loss(trainer, micro_batch=0)
    metrics = trainer.step(2)
    stop()
    assert "47 of 47 gradients are not finite, in the order of the backward pass first output.weight, norm.weight" in (
        message_of(metrics)
    )


def test_gradients_of_all_pipeline_stages_are_counted():
    def evidence(names):
        return Evidence([], names[:2], {names[0]: len(names)}, {}, {})

    first, last = ["embedding.weight", "layers.0.w", "layers.1.w"], ["layers.2.w", "norm.weight"]
    found = _together([evidence(first), evidence(first), evidence(last)], first)
    assert "4 of 5 gradients are not finite" in found.describe()
    assert (found.as_json()["num_not_finite"], found.as_json()["num_parameters"]) == (4, 5)


def test_a_skipped_step_leaves_everything_as_if_it_had_not_been_taken(config):
    trainer, expected = make_trainer(skipping(config)), make_trainer(config)
    said = []
    trainer.bad_steps.say = said.append
    for step in (1, 2, 3):
        stop = poison_loss(trainer, 0, math.inf) if step == 2 else lambda: None
        metrics = trainer.step(step)
        stop()
        if step != 2:
            expected.step(step)
        metrics.read()
    assert len(said) == 1
    assert said[0].startswith("warning: step 2 is skipped: the loss is inf and the gradient norm ")
    actual, right = trainer.model.state_dict(), expected.model.state_dict()
    assert [name for name in right if not torch.equal(actual[name], right[name])] == []


def test_several_bad_steps_between_two_readings_are_counted_and_each_is_recorded(config, tmp_path):
    trainer = make_trainer(skipping(config))
    said = []
    trainer.bad_steps.folder, trainer.bad_steps.say = tmp_path, said.append
    for step in range(1, 8):
        stop = poison_loss(trainer, 2) if step in (2, 3, 5) else lambda: None
        metrics = trainer.step(step)
        stop()
    metrics.read()
    assert "step 2 is skipped, and 2 more since the last line: " in said[0]
    recorded = [json.loads(line) for line in (tmp_path / "bad_steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in recorded] == [2, 3, 5]
    assert [line["first_sequence"] for line in recorded] == [6, 12, 24]
    assert recorded[0]["where"][0]["micro_batch"] == 2
    assert recorded[2]["sample_ids"] == trainer.data.train.sample_ids(24, 6)
    trainer.step(8).read()
    assert len(said) == 1, "bad steps are told once"


@pytest.mark.parametrize("log_interval", [1, 8])
def test_a_run_goes_on_past_bad_steps_until_there_are_too_many_in_a_row(config, tmp_path, capsys, log_interval):
    config = replace(config, metrics=replace(config.metrics, log_interval=log_interval))
    step_of = Trainer.step

    def step(self, number):
        stop = poison_loss(self, 1) if number in bad else lambda: None
        metrics = step_of(self, number)
        stop()
        return metrics

    with mock.patch.object(Trainer, "step", step):
        bad = {2, 3, 5, 6}
        train("deepseek_v3", "deepseek_v3_debugmodel", skipping(config, max_bad_steps=2))
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert lines[-1]["step"] == 8
        assert lines[-1]["loss"] > 0
        assert lines[-1]["bad_steps"] == 4
        assert "warning: step 2 is skipped" in capsys.readouterr().out
        config = replace(config, job=replace(config.job, overwrite=True))
        bad = {3, 4, 5}
        with pytest.raises(ValueError, match=r"3 steps in a row were not finite, and --training.max_bad_steps is 2"):
            train("deepseek_v3", "deepseek_v3_debugmodel", skipping(config, max_bad_steps=2))
        bad = {4}
        with pytest.raises(ValueError, match=r"step 4: .*`spurline replay .*run --step 4` looks for the place"):
            train("deepseek_v3", "deepseek_v3_debugmodel", config)
    recorded = [json.loads(line) for line in (tmp_path / "run" / "bad_steps.jsonl").read_text().splitlines()]
    assert [(line["step"], line["action"]) for line in recorded] == [(4, "stop")], "of this run alone"
