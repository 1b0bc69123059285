"""The conservation check notices what gloo lets pass."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from spurline import MoE, MoEConfig, parallelize_moe
from spurline.comm import exchange
from spurline.comm.conservation import ConservationError, as_label, check_rows
from spurline.moe.dispatch.exchange import UnevenExchange
from spurline.testing import RankPool

CONFIG = MoEConfig(dim=8, hidden_dim=8, num_experts=4, top_k=2, check_exchange=True)


def exchange_with_wrong_split(rank: int, label: str) -> str:
    """Each sends two rows to each, but rank 1 expects three from rank 0."""
    receive = [3, 2] if rank == 1 else [2, 2]
    splits_2P = torch.tensor([[2, 2], receive])
    step = UnevenExchange(splits_2P, 4, sum(receive), dist.group.WORLD, as_label(label), "rows" if label else "")
    try:
        departure = exchange.depart(torch.full((4, 5), float(rank)), dist.group.WORLD)
        return str(step.start(departure).wait().shape)
    except ConservationError as error:
        return str(error)


def test_a_wrong_split_count_is_named_on_every_rank(ranks: RankPool) -> None:
    for message in ranks.run(exchange_with_wrong_split, 2, "layers.3.moe"):
        assert message == "layers.3.moe: rank 0 sends 2 rows to rank 1, which expects 3"


def test_gloo_alone_lets_a_wrong_split_count_pass(ranks: RankPool) -> None:
    assert ranks.run(exchange_with_wrong_split, 2, "") == ["torch.Size([4, 5])", "torch.Size([5, 5])"]


def layer_with_swapped_rows(rank: int, in_backward: bool) -> str:
    """Two of the rows that rank 1 sends change places on the way."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    moe = parallelize_moe(MoE(CONFIG), mesh, layer="layers.7.moe")
    honest, calls = exchange._all_to_all, []

    def dishonest(input: torch.Tensor, *args: object) -> torch.Tensor:
        calls.append(1)
        # Forward exchanges twice (there and back); the third is the first of the backward.
        if rank == 1 and len(calls) == (3 if in_backward else 1):
            input = input[[1, 0, *range(2, len(input))]]
        return honest(input, *args)

    exchange._all_to_all = dishonest
    try:
        moe(torch.randn(4, 8)).square().sum().backward()
    except ConservationError as error:
        return str(error)
    finally:
        exchange._all_to_all = honest
    return "nothing noticed"


@pytest.mark.parametrize("in_backward", [False, True])
def test_swapped_rows_are_noticed(ranks: RankPool, in_backward: bool) -> None:
    for message in ranks.run(layer_with_swapped_rows, 2, in_backward):
        assert message.startswith("gradient of layers.7.moe" if in_backward else "layers.7.moe")
        assert "rows changed on their way from rank 1 to rank" in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("damage", ["none", "bit", "swap", "sign", "copy"])
def test_every_kind_of_damage_changes_the_checksum(ranks: RankPool, dtype: torch.dtype, damage: str) -> None:
    assert ranks.run(damaged_checksum, 2, dtype, damage) == [damage != "none"] * 2


def damaged_checksum(rank: int, dtype: torch.dtype, damage: str) -> bool:
    sent = torch.arange(1, 13).view(3, 4).repeat(2, 1).to(dtype)  # the same three rows to both, from both
    received = sent.clone()
    if rank == 1:
        if damage == "bit":
            received.view(torch.uint8)[4, 1] ^= 1
        elif damage == "swap":
            received[[3, 4]] = received[[4, 3]]
        elif damage == "sign":
            received[5, 2] *= -1
        elif damage == "copy":
            received[1] = received[0]
    try:
        check_rows(sent, received, [3, 3], [3, 3], dist.group.WORLD, "here")
    except ConservationError:
        return True
    return False


def test_the_check_is_off_unless_asked_for() -> None:
    assert not dataclasses.replace(CONFIG, check_exchange=False).check_exchange
    assert not MoEConfig().check_exchange
