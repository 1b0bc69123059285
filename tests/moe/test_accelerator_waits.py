"""What an MoE layer makes the host wait for on an accelerator, with tensors of the meta device in its place.

The meta device computes nothing, but takes every path that an accelerator takes, in forward and backward: a mode counts
what would block, and answers for the device when it is read.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spurline import MoE, MoEConfig, accelerator
from spurline.comm import exchange
from spurline.moe.dispatch.plan import ExpertRanks

CONFIG = MoEConfig(dim=8, hidden_dim=16, num_experts=128, top_k=2, num_shared_experts=1, experts_backend="grouped_mm")
T = 130  # tokens a rank; 260 rows
RANKS = [2, 8, 64]
_aten = torch.ops.aten


@pytest.fixture
def group(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    """Rank 0 of ranks that aren't there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield dist.group.WORLD
    dist.destroy_process_group()


def make_layer(config: MoEConfig, group: dist.ProcessGroup) -> MoE:
    moe = MoE(config, device="meta")
    moe.dispatcher = moe.dispatcher.across(ExpertRanks(group))
    for name, parameter in list(moe.experts.named_parameters()):
        setattr(moe.experts, name, nn.Parameter(parameter[: config.num_experts // group.size()].detach()))
    return moe


def answer(P: int, E: int, S: int) -> Tensor:
    """What the device would have counted, with uneven splits: see `traffic_numbers`."""
    send_P = torch.full((P,), S // P)
    send_P[0] += S - int(send_P.sum())
    receive_P = torch.arange(P) + 3
    totals = [int(receive_P.sum()), int(send_P.max()), S * P, 1, 9, 2, 30]
    count_e = torch.full((E // P,), int(receive_P.sum()) // (E // P))
    count_e[0] += int(receive_P.sum()) - int(count_e.sum())
    return torch.cat([send_P, receive_P, torch.tensor(totals), count_e])


class Accelerator(TorchDispatchMode):
    """Notes in `events` what the host does; `waits` are those at which it would stand still."""

    def __init__(self, numbers: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.numbers, self.events = numbers, list[str]()
        for owner, name in ((torch, "tensor"), (torch, "as_tensor"), (Tensor, "new_tensor")):
            monkeypatch.setattr(owner, name, self._noting(getattr(owner, name)))
        honest = accelerator.HostCopy.wait
        monkeypatch.setattr(accelerator.HostCopy, "wait", lambda copy: self.events.append("host waits") or honest(copy))

    def _noting(self, make):  # type: ignore[no-untyped-def]
        def noting(*args, **kwargs):  # type: ignore[no-untyped-def]
            made = make(*args, **kwargs)
            if made.is_meta:
                self.events.append("copy to the device, blocking")
            return made

        return noting

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        on = {t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim()}
        if func is _aten._to_copy.default and kwargs.get("device") is not None:
            to = torch.device(kwargs["device"]).type
            if args[0].device.type == "meta" and to == "cpu":
                self.events.append("copy queued" if kwargs.get("non_blocking") else "host waits")
                assert args[0].shape == self.numbers.shape
                return self.numbers.clone()
            if args[0].device.type == "cpu" and to == "meta":
                self.events.append("copy to the device, blocking")
        elif func is _aten._local_scalar_dense.default and on == {"meta"}:
            self.events.append("host waits")
        elif func is _aten.copy_.default and args[0].device != args[1].device:
            self.events.append("copy to the device, blocking")
        elif func.namespace == "aten" and len(on) > 1:
            self.events.append(f"copy to the device, blocking ({func})")  # an index that lies on the host
        elif func is torch.ops.spurline.start_exchange.default:
            self.events.append("exchange")
        elif func is torch.ops.spurline.pack_rows.default:
            self.events.append("pack")
        return func(*args, **kwargs)

    @property
    def waits(self) -> list[str]:
        return [event for event in self.events if event.startswith(("host waits", "copy to"))]


def events_of_a_step(config: MoEConfig, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    moe = make_layer(config, group)
    device = Accelerator(answer(group.size(), config.num_experts, T * config.top_k), monkeypatch)
    moe.shared_experts.register_forward_hook(lambda *_: device.events.append("shared experts"))
    moe.shared_experts.register_full_backward_hook(lambda *_: device.events.append("gradient of shared experts"))
    x = torch.empty(T, config.dim, device="meta", requires_grad=True)
    with device:
        y = moe(x)
        assert y.shape == x.shape
        y.sum().backward()
    return device


@pytest.mark.parametrize("group", RANKS, indirect=True)
@pytest.mark.parametrize(
    "changes", [{}, {"score_before_experts": True}, {"experts_backend": "loop"}, {"row_multiple": 16}], ids=str
)
def test_the_host_waits_once_and_behind_the_shared_experts(
    group: dist.ProcessGroup, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = events_of_a_step(dataclasses.replace(CONFIG, **changes), group, monkeypatch)
    assert device.waits == ["host waits"]
    # Rows leave as soon as the host knows how many, and come back; gradients go the same ways.
    forward = ["copy queued", "shared experts", "host waits", "exchange", "exchange"]
    assert device.events == [*forward, "exchange", "exchange", "gradient of shared experts"]


@pytest.mark.parametrize("group", [8], indirect=True)
@pytest.mark.parametrize("equal_split", ["off", "forced"])
def test_rows_are_packed_once(group: dist.ProcessGroup, equal_split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(CONFIG, exchange_dtype="float8", equal_split=equal_split)
    device = events_of_a_step(config, group, monkeypatch)
    forward = ["copy queued", "pack", "shared experts", "host waits", "exchange", "exchange"]
    assert device.events == [*forward, "exchange", "exchange", "gradient of shared experts"]


@pytest.mark.parametrize("group", [8], indirect=True)
def test_what_arrives_on_the_side_stream_is_not_freed_before_the_current_one_has_used_it(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, recorded = [], []

    @contextmanager
    def beside(event: str, device: torch.device) -> Iterator[None]:
        begun.append(event)
        yield

    monkeypatch.setattr(exchange, "record_event", lambda device: "rows are ready")
    monkeypatch.setattr(exchange, "side_stream_behind", beside)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: "current stream")
    monkeypatch.setattr(Tensor, "record_stream", lambda rows, stream: recorded.append((rows.shape, stream)))
    device = events_of_a_step(CONFIG, group, monkeypatch)
    assert begun == ["rows are ready"]
    received = int(device.numbers[8:16].sum())
    assert [(shape[0], stream) for shape, stream in recorded] == [(received, "current stream")]


@pytest.mark.parametrize("group", RANKS, indirect=True)
@pytest.mark.parametrize("equal_split", ["off", "forced"])
def test_forced_balance_waits_for_nothing(
    group: dist.ProcessGroup, equal_split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(CONFIG, force_load_balance=True, equal_split=equal_split)
    device = events_of_a_step(config, group, monkeypatch)
    assert device.waits == []
    assert device.events[:3] == ["exchange", "shared experts", "exchange"]


@pytest.mark.parametrize("group", RANKS, indirect=True)
@pytest.mark.parametrize("overflow", ["drop_last", "drop_lowest_weight", "grow"])
def test_fixed_capacity_waits_for_nothing(
    group: dist.ProcessGroup, overflow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = events_of_a_step(dataclasses.replace(CONFIG, dispatcher="capacity", overflow=overflow), group, monkeypatch)
    assert device.waits == []
    assert device.events[:3] == ["exchange", "shared experts", "exchange"]


@pytest.mark.parametrize("changes", [{"dispatcher": "capacity"}, {"row_multiple": 16}], ids=str)
def test_one_accelerator_waits_for_nothing(changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    moe = MoE(dataclasses.replace(CONFIG, **changes), device="meta")
    device = Accelerator(torch.empty(0), monkeypatch)
    with device:
        moe(torch.empty(T, CONFIG.dim, device="meta", requires_grad=True)).sum().backward()
    assert device.events == []


class CapturedError(Exception):
    pass


def waits_of_a_graph(moe: MoE) -> list[str]:
    """What a compiled forward would wait for: device-to-host copies, scalars of the device, host-to-device copies."""
    waits: list[str] = []

    def device_of(node: object) -> str:
        value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        return value.device.type if isinstance(value, Tensor) else ""

    def capture(graph: torch.fx.GraphModule, inputs: object) -> None:
        for node in graph.graph.nodes:
            before, after = device_of(node.args[0]) if node.args else "", device_of(node)
            if node.target is _aten._to_copy.default and before != after:
                waits.append(f"{before} to {after}")
            elif node.target is _aten._local_scalar_dense.default and before != "cpu":
                waits.append("scalar")
            elif node.target is _aten.lift_fresh_copy.default and after == "meta":
                waits.append("constant to meta")
        raise CapturedError

    torch._dynamo.reset()
    run = torch.compile(moe, fullgraph=True, backend=aot_autograd(fw_compiler=capture, bw_compiler=capture))
    with pytest.raises(Exception, match="CapturedError"):
        run(torch.empty(T, CONFIG.dim, device="meta", requires_grad=True))
    torch._dynamo.reset()
    return waits


@pytest.mark.parametrize("group", RANKS, indirect=True)
def test_a_compiled_layer_copies_once_to_the_host(group: dist.ProcessGroup) -> None:
    torch._dynamo.config.capture_scalar_outputs = True
    assert waits_of_a_graph(make_layer(CONFIG, group)) == ["meta to cpu"]


@pytest.mark.parametrize("group", RANKS, indirect=True)
def test_a_compiled_layer_with_forced_balance_or_fixed_capacity_copies_nothing(group: dist.ProcessGroup) -> None:
    torch._dynamo.config.capture_scalar_outputs = True
    assert waits_of_a_graph(make_layer(dataclasses.replace(CONFIG, force_load_balance=True), group)) == []
    assert waits_of_a_graph(make_layer(dataclasses.replace(CONFIG, dispatcher="capacity"), group)) == []


@pytest.mark.parametrize("group", [4], indirect=True)
def test_a_planted_wait_is_noticed(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            index = torch.tensor([0] * len(x), device=x.device)
            return x[index] + x.index_select(0, torch.zeros(len(x), dtype=torch.int64).to(x.device))

    monkeypatch.setattr("spurline.moe.layer.SharedExperts", lambda *_: Careless())
    device = events_of_a_step(CONFIG, group, monkeypatch)
    assert device.waits == ["copy to the device, blocking"] * 2 + ["host waits"]


def test_a_cpu_takes_an_accelerators_paths_where_it_stands_in_for_one() -> None:
    cpu = torch.device("cpu")
    assert not accelerator.acts_as_accelerator(cpu)
    with accelerator.cpu_stands_in_for("xpu"):
        assert accelerator.acts_as_accelerator(cpu)
        moe, x = MoE(MoEConfig(dim=8, hidden_dim=16)), torch.randn(5, 8)
        rows = moe.dispatcher.plan(moe.router(x)).dispatch(x)
        assert rows.counts.host_e is None
        assert moe.experts.work(rows).device == "xpu"
    assert not accelerator.acts_as_accelerator(cpu)
