"""Optimizer steps that the device may turn into nothing."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from spurline.config import Optimizer
from spurline.testing.tiny import tiny_model
from spurline.train.optimizer.build import build_optimizer
from spurline.train.optimizer.masked import step_unless

OPTIMIZERS = [Optimizer(name="adamw"), Optimizer(name="muon"), Optimizer(groups=("*.moe.* optimizer=adamw",))]


def made(config: Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = tiny_model(num_layers=2).build()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model, build_optimizer(model, config)


def set_gradients(model: nn.Module, seed: int, poison: float = 0.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) + poison


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [optimizer.state[p][key] for p in model.parameters() for key in sorted(optimizer.state[p])]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *state]]


class Reads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += op is torch.ops.aten._local_scalar_dense.default
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("config", OPTIMIZERS, ids=["adamw", "muon", "groups"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1.0])
def test_failed_step_changes_no_bit_and_others_are_as_without_a_mask(config: Optimizer, poison: float) -> None:
    (model, optimizer), (plain_model, plain) = made(config), made(config)
    for step, failed in enumerate([0.0, 1.0, 0.0, 1.0, 0.0]):
        before = everything(model, optimizer) if step else []
        set_gradients(model, step, poison if failed else 0.0)
        with Reads() as reads:
            step_unless(torch.tensor(failed), optimizer)
        assert reads.count == 0
        after = everything(model, optimizer)
        if failed:
            assert all(map(torch.equal, after, before))
            continue
        set_gradients(plain_model, step)
        plain.step()
        assert all(map(torch.equal, after, everything(plain_model, plain)))


def test_optimizer_that_can_not_decide_on_its_device_is_decided_on_the_host() -> None:
    model, _ = made(Optimizer())
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)
    set_gradients(model, 0, math.nan)
    before = [p.detach().clone() for p in model.parameters()]
    step_unless(torch.tensor(1.0), optimizer)
    assert all(map(torch.equal, model.parameters(), before))
    set_gradients(model, 0)
    step_unless(torch.tensor(0.0), optimizer)
    assert not any(map(torch.equal, model.parameters(), before))
