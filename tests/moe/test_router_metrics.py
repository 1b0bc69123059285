"""The metrics that routers report."""

import math

import pytest
import torch
from torch import nn

from spurline.comm.metrics import collect_metrics, reduce_metrics, reset_metrics
from spurline.moe import MoE, MoEConfig, update_expert_bias
from spurline.moe.metrics import routing_statistics


def statistics_of(counts: list[int]) -> dict[str, float]:
    return {key: value.item() for key, value in routing_statistics(torch.tensor(counts)).items()}


def test_routing_statistics() -> None:
    assert statistics_of([2, 2, 2, 2]) == {"load": 1.0, "entropy": pytest.approx(1.0), "dead_experts": 0.0}
    assert statistics_of([8, 0, 0, 0]) == {"load": 4.0, "entropy": 0.0, "dead_experts": 3.0}
    assert statistics_of([0, 0]) == {"load": 0.0, "entropy": 0.0, "dead_experts": 2.0}
    assert statistics_of([5]) == {"load": 1.0, "entropy": 1.0, "dead_experts": 0.0}
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(2)
    assert statistics_of([3, 1]) == {"load": 1.5, "entropy": pytest.approx(entropy), "dead_experts": 0.0}


def test_layers_offer_their_rows_their_balance_and_the_bounds_of_a_bias_that_moves() -> None:
    config = {"dim": 4, "hidden_dim": 4, "num_experts": 4, "top_k": 1, "aux_loss": "batch", "aux_loss_weight": 1.0}
    moving, still = (MoEConfig(**config, bias_update_rate=rate) for rate in (0.5, 0.0))
    model = nn.ModuleDict({"moving": MoE(moving), "still": MoE(still)})
    x_BLD = torch.randn(2, 3, 4)
    for moe in model.values():
        torch.nn.init.normal_(moe.router.gate_ED)
        moe(x_BLD)
    counts = update_expert_bias(model)
    losses = [moe.router.balance_loss.item() for moe in model.values()]

    record = reduce_metrics(collect_metrics(model)).read()
    assert record["expert_load"] == {name: count_E.tolist() for name, count_E in counts.items()}
    assert [sum(rows) for rows in record["expert_load"].values()] == [6, 6]
    assert record["balance_loss"] == pytest.approx(sum(losses))
    assert all(loss > 0.9 for loss in losses)
    assert record["routing"].keys() == {"moving", "still"}
    assert record["routing"]["still"] == statistics_of(record["expert_load"]["still"])
    bias_E = model["moving"].router.expert_bias_E
    assert bias_E.any()
    assert record["routing"]["moving"] == {
        **statistics_of(record["expert_load"]["moving"]),
        "bias_min": bias_E.min().item(),
        "bias_max": bias_E.max().item(),
    }
    reset_metrics(model)
    assert reduce_metrics(collect_metrics(model)).read()["balance_loss"] == 0.0
