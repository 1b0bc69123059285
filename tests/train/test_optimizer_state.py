"""Several optimizers as one: steps, state dicts of torch's own making, and checkpoints that go on exactly."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from spurline.config import Optimizer
from spurline.models.common.init import initialize
from spurline.testing.tiny import tiny_model
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.optimizer.adamw import ShardedAdamW
from spurline.train.optimizer.build import build_optimizer
from spurline.train.optimizer.combined import CombinedOptimizer
from spurline.train.optimizer.muon import Muon

MUON = Optimizer(name="muon", lr=0.02, groups=("embedding.* lr_factor=0.5",))


def make_model() -> nn.Module:
    config = tiny_model(vocab_size=32, num_layers=2, num_heads=2, moe={"num_experts": 4})
    model = config.build()
    initialize(model, 0)
    return model


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        model.zero_grad()


def assert_same_weights(actual: nn.Module, expected: nn.Module) -> None:
    weights = dict(expected.named_parameters())
    assert [name for name, p in actual.named_parameters() if not torch.equal(p, weights[name])] == []


def test_parts_update_what_is_theirs_and_nothing_else() -> None:
    model = make_model()
    optimizer = build_optimizer(model, MUON)
    assert isinstance(optimizer, CombinedOptimizer)
    assert [type(part) for part in optimizer.parts] == [ShardedAdamW, Muon]
    take_steps(model, optimizer, range(1, 2))
    kept = {name: set(optimizer.state[p]) for name, p in model.named_parameters()}
    assert kept["layers.1.moe.experts.w1_EFD"] == {"momentum_buffer"}
    assert kept["layers.1.moe.router.gate_ED"] == {"step", "exp_avg", "exp_avg_sq"}
    assert kept["norm.weight"] == {"step", "exp_avg", "exp_avg_sq"}

    # The same by two optimizers that know nothing of each other.
    apart = make_model()
    of_muon = [p for name, p in apart.named_parameters() if kept[name] == {"momentum_buffer"}]
    vectors = [p for p in apart.parameters() if p.ndim < 2]
    alone = {id(p) for p in (*of_muon, *vectors, apart.embedding.weight)}
    others = [p for p in apart.parameters() if id(p) not in alone]
    adamw = torch.optim.AdamW(
        [
            {"params": others},
            {"params": vectors, "weight_decay": 0.0},
            {"params": [apart.embedding.weight], "lr": 0.01},
        ],
        lr=0.02,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=True,
    )
    muon = Muon(of_muon, lr=0.02, adjust_lr="match_rms_adamw")
    for optimizer_of_apart in (adamw, muon):
        take_steps(apart, optimizer_of_apart, range(1, 2))
    assert_same_weights(model, apart)


def through_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> torch.optim.Optimizer:
    fresh = build_optimizer(model, MUON)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return fresh


def through_distributed_state_dict(flat: bool) -> Any:
    def through(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> torch.optim.Optimizer:
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
        fresh = build_optimizer(model, MUON)
        set_optimizer_state_dict(model, fresh, state, options=options)
        return fresh

    return through


def through_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> torch.optim.Optimizer:
    CheckpointManager(folder, 1, 0).save(3, model, optimizer, {})
    fresh = build_optimizer(model, MUON)
    CheckpointManager(folder, 1, 0).load(3, model, fresh)
    return fresh


@pytest.mark.parametrize(
    "through",
    [
        pytest.param(through_state_dict, id="state_dict"),
        pytest.param(through_distributed_state_dict(flat=False), id="distributed state dict"),
        pytest.param(through_distributed_state_dict(flat=True), id="flat distributed state dict"),
        pytest.param(through_checkpoint, id="checkpoint"),
    ],
)
def test_restored_optimizer_goes_on_exactly(through: Any, tmp_path: Path) -> None:
    straight = make_model()
    take_steps(straight, build_optimizer(straight, MUON), range(1, 7))
    model = make_model()
    optimizer = build_optimizer(model, MUON)
    take_steps(model, optimizer, range(1, 4))
    restored = through(model, optimizer, tmp_path)
    assert restored is not optimizer
    take_steps(model, restored, range(4, 7))
    assert_same_weights(model, straight)
    # And groups are still the same objects everywhere, so that a schedule reaches the parts.
    for group in restored.param_groups:
        group["lr"] = 0.0
    assert {group["lr"] for part in restored.parts for group in part.param_groups} == {0.0}


@pytest.mark.parametrize(("saved", "loaded"), [("adamw", "muon"), ("muon", "adamw")])
def test_checkpoint_of_another_optimizer_is_refused_in_one_line(saved: str, loaded: str, tmp_path: Path) -> None:
    model = make_model()
    optimizer = build_optimizer(model, replace(MUON, name=saved))
    take_steps(model, optimizer, range(1, 2))
    checkpoints = CheckpointManager(tmp_path, 1, 0)
    checkpoints.save(1, model, optimizer, {})
    with pytest.raises(ValueError, match="the checkpoint was written with another optimizer: it has ") as error:
        checkpoints.load(1, model, build_optimizer(model, replace(MUON, name=loaded)))
    assert "\n" not in str(error.value)
    assert "--optimizer.name" in str(error.value)
