import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from spurline.config import LRScheduler, Optimizer
from spurline.train.optimizer.build import build_optimizer
from spurline.train.optimizer.clip import clip_gradients
from spurline.train.optimizer.schedule import learning_rate, set_learning_rate


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(4)
        self.embedding = nn.Embedding(3, 4)
        self.experts = nn.Parameter(torch.ones(2, 4, 4))
        self.frozen = nn.Parameter(torch.ones(4, 4), requires_grad=False)
        self.head = nn.Linear(4, 3)


def test_matrices_decay_norms_and_biases_do_not():
    model = Model()
    decayed, plain = build_optimizer(model, Optimizer(weight_decay=0.3)).param_groups
    assert decayed["weight_decay"] == 0.3
    assert plain["weight_decay"] == 0.0
    assert [id(p) for p in decayed["params"]] == [
        id(p) for p in (model.experts, model.embedding.weight, model.head.weight)
    ]
    assert [id(p) for p in plain["params"]] == [id(p) for p in (model.norm.weight, model.head.bias)]


def test_settings_reach_adamw():
    optimizer = build_optimizer(Model(), Optimizer(lr=0.5, beta1=0.8, beta2=0.7, eps=1e-3))
    for group in optimizer.param_groups:
        assert group["lr"] == 0.5
        assert group["betas"] == (0.8, 0.7)
        assert group["eps"] == 1e-3


def test_fused_on_a_device_that_has_it_and_not_elsewhere():
    assert all(group["fused"] for group in build_optimizer(Model(), Optimizer()).param_groups)
    assert not any(group["fused"] for group in build_optimizer(Model().to("meta"), Optimizer()).param_groups)


def test_step_is_adamw_by_hand():
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.bias.fill_(2.0)
    optimizer = build_optimizer(model, Optimizer(lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    optimizer.step()
    # The first bias-corrected update is lr * sign(gradient); decay takes lr * weight_decay of the weight.
    assert model.weight.item() == pytest.approx(2.0 * (1 - 0.1 * 0.5) - 0.1, abs=1e-6)
    assert model.bias.item() == pytest.approx(2.0 - 0.1, abs=1e-6)


def rates(total_steps: int, peak: float, schedule: LRScheduler) -> list[float]:
    return [learning_rate(step, total_steps, peak, schedule) for step in range(1, total_steps + 1)]


def test_schedule_values():
    schedule = LRScheduler(warmup_steps=2, decay_ratio=0.4, min_lr_factor=0.2)
    assert rates(10, 1.0, schedule) == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize(
    ("decay_type", "quarter"), [("linear", 0.75), ("cosine", (1 + math.cos(math.pi / 4)) / 2), ("sqrt", 0.5)]
)
def test_decay_shapes_at_a_quarter_of_the_way(decay_type, quarter):
    schedule = LRScheduler(warmup_steps=0, decay_ratio=1.0, decay_type=decay_type, min_lr_factor=0.2)
    assert learning_rate(1, 4, 10.0, schedule) == pytest.approx(10 * (0.2 + 0.8 * quarter))


def test_decay_waits_for_a_long_warmup():
    assert rates(6, 1.0, LRScheduler(warmup_steps=4, decay_ratio=1.0)) == pytest.approx([0.25, 0.5, 0.75, 1, 0.5, 0])


def test_run_shorter_than_its_warmup_only_climbs():
    assert rates(3, 1.0, LRScheduler(warmup_steps=10, decay_ratio=0.5)) == pytest.approx([0.1, 0.2, 0.3])


def test_step_outside_the_run_is_a_mistake():
    for step in (0, 11):
        with pytest.raises(AssertionError, match="not one of"):
            learning_rate(step, 10, 1.0, LRScheduler())


@given(
    total_steps=st.integers(1, 200),
    peak=st.floats(1e-6, 10),
    schedule=st.builds(
        LRScheduler,
        warmup_steps=st.integers(0, 250),
        decay_ratio=st.floats(0, 1),
        decay_type=st.sampled_from(["linear", "cosine", "sqrt"]),
        min_lr_factor=st.floats(0, 1),
    ),
)
def test_schedule_climbs_stays_and_falls_without_a_jump(total_steps, peak, schedule):
    lrs = rates(total_steps, peak, schedule)
    lowest, tiny = schedule.min_lr_factor * peak, 1e-9 * peak
    top = max(lrs)
    climb_end = lrs.index(top)
    fall_start = total_steps - 1 - lrs[::-1].index(top)

    assert min(lrs) >= 0
    assert top <= peak + tiny
    assert lrs[: climb_end + 1] == sorted(lrs[: climb_end + 1])
    assert set(lrs[climb_end : fall_start + 1]) == {top}
    assert all(later <= earlier + tiny for earlier, later in pairwise(lrs[fall_start:]))
    assert min(lrs[climb_end:]) >= min(lowest, top) - tiny

    decay_steps = min(round(total_steps * schedule.decay_ratio), max(0, total_steps - schedule.warmup_steps))
    if total_steps >= schedule.warmup_steps:
        assert lrs[-1] == pytest.approx(lowest if decay_steps else peak, abs=tiny)
    largest_step = peak * max(1 / max(1, schedule.warmup_steps), 1 / math.sqrt(max(1, decay_steps)))
    assert all(abs(b - a) <= largest_step + tiny for a, b in pairwise(lrs))


def test_set_learning_rate_reaches_every_group():
    optimizer = build_optimizer(Model(), Optimizer(lr=1.0))
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def parameters_with_gradients(*values: float) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(())) for _ in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor(value)
    return parameters


@pytest.mark.parametrize(("max_norm", "scale"), [(2.5, 0.5), (10.0, 1.0), (0.0, 1.0)])
def test_clipping_scales_to_the_norm_and_returns_the_norm_before(max_norm, scale):
    without_gradient = nn.Parameter(torch.zeros(2))
    clipped = [*parameters_with_gradients(3.0, 4.0), without_gradient]
    norm = clip_gradients(iter(clipped), max_norm)
    assert norm.item() == pytest.approx(5.0)
    assert [clipped[0].grad.item(), clipped[1].grad.item()] == pytest.approx([3 * scale, 4 * scale], abs=1e-5)
    assert without_gradient.grad is None


def test_norm_that_is_not_finite_is_returned():
    assert clip_gradients(parameters_with_gradients(1.0, math.inf), 1.0).item() == math.inf
    assert math.isnan(clip_gradients(parameters_with_gradients(1.0, math.nan), 0.0).item())


def test_no_gradient_at_all_has_norm_zero():
    assert clip_gradients([nn.Parameter(torch.zeros(2))], 1.0).item() == 0.0
