"""Recomputation on real gloo ranks: the same results, and how much is sent a second time."""

import itertools
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from spurline import MoE, MoEConfig, parallelize_moe
from spurline.comm.collectives import all_gather_sequence, all_reduce_sum, reduce_scatter_sequence
from spurline.moe.balance import routers
from spurline.parallel.compile import apply_compile
from spurline.parallel.remat import apply_remat
from spurline.testing import RankPool
from spurline.testing.params import slow_but

CONFIG = MoEConfig(dim=16, hidden_dim=8, num_experts=8, top_k=2, num_shared_experts=1, aux_loss="batch")
BOTH_WAYS = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


class ExpertBlock(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(CONFIG.dim)
        self.moe = MoE(CONFIG, init_std=0.4)
        if tied:
            nn.init.zeros_(self.moe.router.gate_ED)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        return x_BLD + self.moe(self.norm(x_BLD))


class SequenceBlock(nn.Module):
    """Each kind of collective that tensor parallelism with sequence parallelism has."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.up, self.down = nn.Linear(CONFIG.dim, 24), nn.Linear(24, CONFIG.dim)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(self.up(all_gather_sequence(x_BLD, self.group, 1)))
        hidden = hidden * all_reduce_sum(hidden.mean(), self.group)
        return x_BLD + reduce_scatter_sequence(self.down(hidden), self.group, 1)


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        for block in self.layers.values():
            x_BLD = block(x_BLD)
        return x_BLD


def make_model(kind: str, mode: str, compiled: bool, tied: bool) -> Model:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    if kind == "sequence parallel":
        model = Model(SequenceBlock(mesh.get_group()), SequenceBlock(mesh.get_group()))
    else:
        model = Model(ExpertBlock(tied), ExpertBlock(tied))
    for name in routers(model) if kind == "expert parallel" else ():
        parallelize_moe(model.get_submodule(name), mesh)
    apply_remat(model, mode)
    if compiled:
        apply_compile(model, "aot_eager")
    if kind == "fully sharded":
        for module in (*model.layers.values(), model):
            fully_shard(module, mesh=mesh)
    return model


def step(model: Model, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output, every gradient, and the statistics of the step."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    results = {"y": y.detach(), "x": x.grad}
    for name, parameter in model.named_parameters():
        results[name] = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
    for name, router in routers(model).items():
        results |= {f"{name} rows": router.row_count_E.clone(), f"{name} balance": router.balance_loss.clone()}
        router.init_buffers()
    return results


def count_messages(model: Model, x: torch.Tensor) -> Counter[str]:
    """How often a step calls each collective."""
    with torch.autograd.profiler.profile() as profile:
        step(model, x)
    return Counter({event.key: event.count for event in profile.key_averages() if event.key.startswith("gloo:")})


def compare(
    rank: int, kind: str, mode: str, compiled: bool, tied: bool
) -> tuple[dict[str, float], list[int], Counter[str], Counter[str]]:
    """Differences from mode none by name, graphs after each step, and messages of a step without and with mode."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, model = make_model(kind, "none", False, tied), make_model(kind, mode, compiled, tied)
    assert list(model.state_dict()) == list(plain.state_dict())
    worst: dict[str, float] = {}
    graphs = []
    for number in range(3):
        # Ranks bring different numbers of tokens where they can, and each step brings others.
        length = 6 + number + (0 if kind == "sequence parallel" else 2 * rank)
        x = torch.randn(2, length, CONFIG.dim, generator=torch.Generator().manual_seed(10 * number + rank))
        expected, actual = step(plain, x), step(model, x)
        assert actual.keys() == expected.keys()
        for name in expected:
            error = (actual[name] - expected[name]).abs().max().item()
            worst[name] = max(worst.get(name, 0.0), error)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return worst, graphs, count_messages(plain, x), count_messages(model, x)


def check(
    ranks: RankPool, kind: str, mode: str, compiled: bool, tied: bool = False
) -> list[tuple[Counter[str], Counter[str]]]:
    """Assert that mode changes no result; returns each rank's messages without and with it."""
    results = ranks.run(compare, 2, kind, mode, compiled, tied, timeout=240)
    for worst, graphs, _, _ in results:
        assert max(worst.values()) <= (1e-6 if compiled else 0.0), worst
        assert all(error == 0 for name, error in worst.items() if name.endswith("rows")), worst
        assert graphs == ([1, 2, 2] if compiled else [0, 0, 0])  # a second one when the length turns out to change
    return [(plain, messages) for _, _, plain, messages in results]


@pytest.mark.parametrize(
    ("tied", "compiled"), slow_but([(False, False), (True, False)], itertools.product([False, True], [False, True]))
)
def test_selective_sends_no_row_twice(ranks: RankPool, tied: bool, compiled: bool) -> None:
    for plain, messages in check(ranks, "expert parallel", "selective", compiled, tied):
        assert messages == plain
        assert plain["gloo:all_to_all"] == 8  # 2 blocks, there and back, forward and backward


@pytest.mark.parametrize("compiled", slow_but([False], [False, True]))
def test_selective_resend_sends_rows_again_on_their_way_to_the_experts_alone(ranks: RankPool, compiled: bool) -> None:
    for plain, messages in check(ranks, "expert parallel", "selective_resend", compiled, tied=True):
        assert messages["gloo:all_to_all"] == plain["gloo:all_to_all"] + 2  # one in each of 2 blocks
        assert messages - Counter({"gloo:all_to_all": 2}) == plain


@pytest.mark.parametrize("compiled", slow_but([False], [False, True]))
def test_full_sends_rows_again_and_computes_the_same(ranks: RankPool, compiled: bool) -> None:
    for plain, messages in check(ranks, "expert parallel", "full", compiled, tied=True):
        # What comes back from the experts is needed by nothing behind it: recomputation stops before that, unless it
        # replays a compiled block, which is one piece.
        again = 4 if compiled else 2
        assert messages["gloo:all_to_all"] == plain["gloo:all_to_all"] + again


@BOTH_WAYS
def test_selective_repeats_no_collective(ranks: RankPool, compiled: bool) -> None:
    for plain, messages in check(ranks, "sequence parallel", "selective", compiled):
        assert messages == plain
        assert sum(plain.values()) >= 2 * 5  # 2 blocks: three collectives forward, the mirrors of two backward


@pytest.mark.parametrize(
    ("mode", "compiled"),
    slow_but([("full", False), ("selective", False)], itertools.product(["full", "selective"], [False, True])),
)
def test_blocks_can_be_sharded_afterwards(ranks: RankPool, mode: str, compiled: bool) -> None:
    for plain, messages in check(ranks, "fully sharded", mode, compiled):
        assert messages == plain
