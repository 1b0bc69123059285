"""What a run does before its first step: it draws its weights, or loads them and draws nothing."""

import math

import pytest
import torch
from torch import nn

from spurline.config import Checkpoint
from spurline.hf.verify import _our_model
from spurline.testing.draws import CountDraws
from spurline.testing.tiny import tiny_model, tiny_run, write_words
from spurline.tools.generate import load_model
from spurline.train import run as run_module
from spurline.train.run import train

MODEL = tiny_model(num_layers=2, moe={"bias_update_rate": 1e-2})


@pytest.fixture(autouse=True)
def memory_that_is_not_zero(monkeypatch):
    """What `to_empty` hands out is often zero by luck."""
    to_empty = nn.Module.to_empty

    def dirty(module, **options):
        to_empty(module, **options)
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.data.fill_(math.nan if tensor.is_floating_point() else 99)
        return module

    monkeypatch.setattr(nn.Module, "to_empty", dirty)


@pytest.fixture
def run_for(tmp_path, monkeypatch):
    """Trains up to a step in a folder; returns the final model, and how many random numbers were drawn."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "text").mkdir()
    text, trainers = write_words(tmp_path / "text"), []
    make_trainer = run_module.make_trainer

    def noted(*args, **options):
        trainers.append(make_trainer(*args, **options))
        return trainers[-1]

    monkeypatch.setattr(run_module, "make_trainer", noted)

    def run(folder: str, steps: int) -> tuple[nn.Module, int]:
        config = tiny_run(
            text,
            MODEL,
            job={"dump_folder": str(tmp_path / folder)},
            metrics={"sample_tokens": 0},
            checkpoint=Checkpoint(enable=True, interval=2),
            debug={"stop_after": steps},
        )
        with CountDraws() as draws:
            train("deepseek_v3", "deepseek_v3_debugmodel", config)
        return trainers[-1].model, draws.num_drawn

    return run


def test_resumed_run_draws_nothing_and_goes_on_as_if_it_had_not_stopped(run_for) -> None:
    whole, num_drawn = run_for("whole", 4)
    assert num_drawn >= MODEL.num_params() - sum(p.numel() for p in whole.parameters() if p.ndim == 1)
    _, drawn_at_first = run_for("stopped", 2)
    assert drawn_at_first == num_drawn
    resumed, drawn_later = run_for("stopped", 4)
    assert drawn_later == 0
    for (name, tensor), expected in zip(
        [*resumed.named_parameters(), *resumed.named_buffers()], [*whole.parameters(), *whole.buffers()], strict=True
    ):
        assert torch.equal(tensor, expected), name
    assert resumed.layers["1"].moe.router.expert_bias_E.count_nonzero() > 0


def test_loading_a_model_to_use_it_draws_nothing(run_for, tmp_path) -> None:
    trained, _ = run_for("run", 2)
    config = tiny_run(tmp_path, MODEL)
    with CountDraws() as draws:
        loaded = [load_model(tmp_path / "run", config, step=2), _our_model(MODEL, tmp_path / "run", 2)]
    assert draws.num_drawn == 0
    for model in loaded:
        for name, parameter in trained.named_parameters():
            assert torch.equal(model.get_parameter(name), parameter.data), name
        for name, buffer in model.named_buffers():
            expected = trained.get_buffer(name) if name in trained.state_dict() else torch.zeros_like(buffer)
            assert torch.equal(buffer, expected), name
