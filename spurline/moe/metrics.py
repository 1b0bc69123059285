"""The metrics of a router: rows per expert, how even they are, balance loss and selection bias."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spurline.comm.metrics import Metric

if TYPE_CHECKING:
    from spurline.moe.router import Router


@torch.no_grad()
def router_metrics(router: Router) -> dict[str, Metric]:
    """The metrics of the step that ended with the last `update_expert_bias`."""
    metrics = {"balance_loss": Metric(router.balance_loss, "sum", per_layer=False)}
    if (count_E := router.step_count_E) is not None:  # summed over ranks already
        metrics["expert_load"] = Metric(count_E, "same")
        metrics |= {f"routing/{key}": Metric(value, "same") for key, value in routing_statistics(count_E).items()}
    if router.config.bias_update_rate:
        bias_min, bias_max = router.expert_bias_E.aminmax()
        metrics |= {"routing/bias_min": Metric(bias_min, "same"), "routing/bias_max": Metric(bias_max, "same")}
    return metrics


def routing_statistics(count_E: Tensor) -> dict[str, Tensor]:
    """How even the routing is: load (max over mean), entropy (1 = even, 0 = one expert), dead experts."""
    E = count_E.numel()
    count_E = count_E.double()
    total = count_E.sum().clamp_min(1)
    entropy = torch.special.entr(count_E / total).sum() / math.log(E) if E > 1 else count_E.sum().clamp(max=1)
    return {"load": count_E.max() * E / total, "entropy": entropy, "dead_experts": (count_E == 0).double().sum()}
