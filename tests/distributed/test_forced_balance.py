"""Forced balance across ranks: no counts are exchanged, and unequal numbers of tokens are an error."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from spurline import MoE, MoEConfig, parallelize_moe
from spurline.comm.conservation import ConservationError
from spurline.moe import Routing, telemetry
from spurline.moe.dispatch import all_to_all
from spurline.moe.dispatch.all_to_all import AllToAllDispatcher
from spurline.testing import RankPool

CONFIG = MoEConfig(dim=8, hidden_dim=8, num_experts=4, top_k=2, force_load_balance=True)


def unequal(rank: int, compiled: bool) -> str:
    moe = parallelize_moe(MoE(CONFIG), init_device_mesh("cpu", (2,)), layer="layers.2.moe")
    run = torch.compile(moe, fullgraph=True, backend="aot_eager") if compiled else moe
    try:
        run(torch.randn(5 + rank, 8))
    except ConservationError as error:
        return str(error)
    return "nothing noticed"


@pytest.mark.parametrize("compiled", [False, True])
def test_unequal_token_counts_are_named_on_every_rank(ranks: RankPool, compiled: bool) -> None:
    for message in ranks.run(unequal, 2, compiled):
        assert message.startswith("layers.2.moe: force_load_balance")
        assert "same number of tokens" in message
        assert "same_num_tokens=False" in message
        assert "rank 0 sends 4 rows to rank 1, which expects 6" in message


def told_otherwise(rank: int) -> dict[str, int]:
    moe = parallelize_moe(MoE(CONFIG), init_device_mesh("cpu", (2,)), same_num_tokens=False)
    telemetry.reset()
    telemetry.enable()
    moe(torch.randn(5 + rank, 8)).sum().backward()
    telemetry.enable(False)
    return telemetry.counters()


def test_with_unequal_token_counts_ranks_ask_each_other(ranks: RankPool) -> None:
    for counted in ranks.run(told_otherwise, 2):
        assert counted["plan.host_reads"] == 1
        assert "plan.forced_balance" not in counted


def shared_sequences(rank: int, length: int) -> dict[str, int]:
    """Each rank has its share of the positions of two sequences, as under tensor parallelism."""
    moe = parallelize_moe(MoE(CONFIG), init_device_mesh("cpu", (2,)), same_num_tokens=False)
    moe.set_sequence_ranks(2, [0, 1])
    share = (length + 1) // 2 if rank == 0 else length // 2
    telemetry.reset()
    telemetry.enable()
    moe(torch.randn(2, share, 8), length).sum().backward()
    telemetry.enable(False)
    return telemetry.counters()


@pytest.mark.parametrize("length", [6, 7])
def test_ranks_that_share_positions_know_each_others_counts(ranks: RankPool, length: int) -> None:
    for counted in ranks.run(shared_sequences, 2, length):
        assert counted["plan.forced_balance"] == 1
        assert "plan.host_reads" not in counted


def test_a_route_is_made_once_for_a_batch_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """At ep 64 with 256 experts, as rank 0 of ranks that are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    try:
        config = MoEConfig(dim=8, hidden_dim=8, num_experts=256, top_k=8, force_load_balance=True)
        dispatcher, made = AllToAllDispatcher(config, dist.group.WORLD), []
        make = AllToAllDispatcher._make_forced_route
        monkeypatch.setattr(
            AllToAllDispatcher, "_make_forced_route", lambda *args: made.append(1) or make(*args), raising=True
        )
        expert_TK = (torch.arange(512 * 8) % 256).view(512, 8)
        routing = Routing(expert_TK, torch.rand(512, 8), torch.bincount(expert_TK.flatten(), minlength=256))
        first = dispatcher.plan(routing)
        for _ in range(3):
            again = dispatcher.plan(routing)
        assert len(made) == 1
        assert again.route is first.route
        assert torch.equal(first.token_S, torch.argsort(expert_TK.flatten(), stable=True) // 8)
    finally:
        dist.destroy_process_group()


def gradient_after(rank: int, evaluates: bool) -> torch.Tensor:
    torch.manual_seed(0)
    moe, x = parallelize_moe(MoE(CONFIG, init_std=0.5), init_device_mesh("cpu", (2,))), torch.randn(6, 8)
    if evaluates:
        with torch.inference_mode():
            moe.eval()(x)
    moe.train()(x).square().sum().backward()
    return moe.router.gate_ED.grad


def test_a_route_that_was_made_in_inference_mode_serves_training(ranks: RankPool) -> None:
    assert torch.equal(*(ranks.run(gradient_after, 2, evaluates)[0] for evaluates in (False, True)))


def adaptive(rank: int) -> list[str]:
    config = MoEConfig(dim=8, hidden_dim=8, num_experts=4, top_k=2, equal_split="adaptive")
    moe = parallelize_moe(MoE(config), init_device_mesh("cpu", (2,)))
    all_to_all._said.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            torch._dynamo.reset()
            torch.compile(moe, fullgraph=True, backend="aot_eager")(torch.randn(6, 8))
    return [str(warning.message) for warning in caught if "equal_split" in str(warning.message)]


def test_that_adaptive_equal_split_is_off_in_a_compiled_block_is_said_once(ranks: RankPool) -> None:
    for said in ranks.run(adaptive, 2):
        assert len(said) == 1
        assert "compiled blocks exchange rows unpadded" in said[0]
