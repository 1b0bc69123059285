"""The parts of a step's time, with a clock that the test moves and with the trainer's own step."""

import copy
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from spurline.moe import MoE, MoEConfig
from spurline.parallel.remat import apply_remat
from spurline.train.metrics.timing import StepTimer, watch_layers


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_parts_are_exclusive_and_add_up_to_the_step():
    clock = Clock()
    timer = StepTimer(clock=clock)
    with timer.step():
        clock.now += 1
        with timer.phase("data"):
            clock.now += 2
        with timer.phase("forward"):
            clock.now += 4
            timer.enter("exchange")
            clock.now += 8
            timer.enter("experts")
            clock.now += 16
            timer.leave("experts")
            clock.now += 32
            timer.leave("exchange")
            clock.now += 64
        clock.now += 128
    assert timer.read() == {
        "step_time": 255,
        "data_wait": 2,
        "step_time_parts": {
            "other": 129,
            "data": 2,
            "forward": 68,
            "forward.exchange": 40,
            "forward.experts": 16,
        },
    }


def test_a_reading_is_the_mean_of_the_steps_since_the_last():
    clock = Clock()
    timer = StepTimer(clock=clock)
    for seconds in (1, 3):
        with timer.step(), timer.phase("forward"):
            clock.now += seconds
    assert timer.read()["step_time"] == 2
    assert timer.read() == {}
    with timer.step(), timer.phase("forward"):
        clock.now += 5
    assert timer.read()["step_time_parts"]["forward"] == 5


def test_what_happens_outside_a_step_or_in_one_that_failed_is_not_counted():
    clock = Clock()
    timer = StepTimer(clock=clock)
    with timer.phase("forward"):
        timer.enter("experts")
        clock.now += 1
        timer.leave("experts")
    with suppress(RuntimeError), timer.step(), timer.phase("forward"):
        clock.now += 1
        raise RuntimeError
    assert timer.read() == {}
    with timer.step(), timer.phase("backward"):
        clock.now += 2
    assert timer.read() == {"step_time": 2, "data_wait": 0.0, "step_time_parts": {"other": 0, "backward": 2}}


def test_leaving_a_part_ends_those_inside_that_never_did():
    clock = Clock()
    timer = StepTimer(clock=clock)
    with timer.step(), timer.phase("backward"):
        timer.leave("experts")  # never entered
        timer.enter("exchange")
        timer.enter("experts")
        clock.now += 1
        timer.leave("exchange")
        clock.now += 2
    assert timer.read()["step_time_parts"]["backward"] == 2


def test_an_accelerator_is_timed_by_events_in_its_queue(monkeypatch):
    clock = Clock()

    class Event:
        def __init__(self, device, enable_timing):
            assert (device.type, enable_timing) == ("xpu", True)

        def record(self):
            self.milliseconds = clock.now * 1000

        def query(self):
            return device_time >= self.milliseconds

        def synchronize(self):
            waited.append(self.milliseconds)

        def elapsed_time(self, end):
            return end.milliseconds - self.milliseconds

    waited, device_time = [], (clock.now + 4) * 1000
    monkeypatch.setattr(torch, "Event", Event)
    timer = StepTimer(torch.device("xpu"))
    for _ in range(3):
        with timer.step(), timer.phase("forward"):
            clock.now += 3
    assert max(waited) <= device_time, "the device has not come to the second step yet"
    assert timer.read()["step_time"] == pytest.approx(3)
    assert max(waited) == clock.now * 1000


class Block(nn.Module):
    def __init__(self, clock, config, takes_tokens):
        super().__init__()
        self.attention = Slow(clock, forward=100, backward=200)
        self.moe = MoE(config)
        self.moe.experts = SlowExperts(clock, forward=1, backward=2)
        self.moe.experts.takes_tokens = takes_tokens
        self.moe.shared_experts = Slow(clock, forward=10, backward=20)

    def forward(self, x):
        return x + self.moe(self.attention(x))


class Slow(nn.Module):
    """The identity, which takes the clock some time in each direction."""

    def __init__(self, clock, forward, backward):
        super().__init__()
        self.clock, self.seconds = clock, (forward, backward)

    def forward(self, x, *_):
        return _Slow.apply(x, self.clock, *self.seconds) * 1


class SlowExperts(Slow):
    """They work on rows, or on tokens, as real ones do."""

    takes_tokens = False

    def forward(self, rows):
        if not self.takes_tokens:
            return rows.output(super().forward(rows.tensor()))
        # Keeps something for backward, so it is computed again.
        return replace(rows, x=super().forward(rows.x).square() + rows.onto_TD, is_combined=True)


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, forward, backward):
        clock.now += forward
        ctx.clock, ctx.backward = clock, backward
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.clock.now += ctx.backward
        return grad, None, None, None


@pytest.mark.parametrize("takes_tokens", [False, True])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_layers_tell_apart_experts_and_the_rest_of_the_phase_in_both_directions(remat, takes_tokens):
    clock = Clock()
    config = MoEConfig(dim=8, hidden_dim=4, num_experts=4, top_k=2, num_shared_experts=1)
    model = SimpleNamespace(layers=nn.ModuleList([Block(clock, config, takes_tokens) for _ in range(3)]))
    apply_remat(model, remat)
    timer = StepTimer(clock=clock)
    watch_layers(model, timer)
    x = torch.randn(1, 6, 8, requires_grad=True)
    with timer.step():
        with timer.phase("forward"):
            for block in model.layers:
                x = block(x)
        with timer.phase("backward"):
            x.sum().backward()
    parts = timer.read()["step_time_parts"]
    assert (parts["forward.experts"], parts["forward.exchange"], parts["forward"]) == (3, 0, 330)
    # Recomputed, a block's forward is part of the backward pass.
    again = 1 if remat == "full" else 0
    assert parts["backward.experts"] == 3 * (2 + again)
    assert parts["backward.exchange"] == 0
    assert parts["backward"] == 3 * (220 + again * 110)


@pytest.mark.parametrize("backend", ["stream", "loop"])
@pytest.mark.parametrize("remat", ["none", "selective"])
def test_watched_layers_compute_the_same_bits(remat, backend):
    config = MoEConfig(dim=16, hidden_dim=8, num_experts=4, top_k=2, num_shared_experts=1)
    config = replace(config, aux_loss="batch", experts_backend=backend)

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), MoE(config)) for _ in range(2)])

        def forward(self, x):
            for block in self.layers:
                x = x + block(x)
            return x

    torch.manual_seed(0)
    plain = Stack()
    watched = copy.deepcopy(plain)
    for model in (plain, watched):
        apply_remat(model, remat)
    timer = StepTimer()
    watch_layers(watched, timer)
    x = torch.randn(2, 8, 16)
    outputs = []
    with timer.step():
        for model in (plain, watched):
            with timer.phase("forward"):
                outputs.append(model(x))
            with timer.phase("backward"):
                outputs[-1].square().sum().backward()
    assert torch.equal(*outputs)
    for ours, theirs in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    parts = timer.read()["step_time_parts"]
    assert parts["forward.experts"] > 0
    assert parts["backward.experts"] > 0
