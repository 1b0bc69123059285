"""The selection bias under DistributedDataParallel: moved by the rows of all ranks and micro-batches, or an error."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from spurline import MoE, MoEConfig
from spurline.moe import update_expert_bias
from spurline.testing import RankPool

CONFIG = MoEConfig(dim=8, hidden_dim=8, num_experts=4, top_k=2, num_shared_experts=1, bias_update_rate=0.1)
STEPS, MICRO_BATCHES, RANKS = 3, 2, 2


def make_layer() -> MoE:
    torch.manual_seed(0)
    return MoE(CONFIG, init_std=0.5)


def make_input(step: int, micro_batch: int, rank: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank))


def steps_under_ddp(rank: int, how: str) -> tuple[list[list[int]], list[float]] | str:
    """The rows per expert of each step, and the bias at the end."""
    moe = make_layer()
    model = nn.Sequential(moe)
    if how == "ignored buffers":
        ignored = [name for name, _ in model.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    ddp = DistributedDataParallel(model, forward_sync_buffers=how in ("default", "ignored buffers"))
    counts = []
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            is_last = micro_batch == MICRO_BATCHES - 1
            with ddp.no_sync() if how == "no_sync" and not is_last else nullcontext():
                ddp(make_input(step, micro_batch, rank)).square().sum().backward()
        try:
            counts.append(update_expert_bias(ddp)["module.0"].tolist())
        except ValueError as error:
            return str(error)
    return counts, moe.router.expert_bias_E.tolist()


def steps_alone() -> tuple[list[list[int]], list[float]]:
    moe, counts = make_layer(), []
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            for rank in range(RANKS):
                moe(make_input(step, micro_batch, rank)).square().sum().backward()
        counts.append(update_expert_bias(moe)[""].tolist())
    return counts, moe.router.expert_bias_E.tolist()


@pytest.mark.parametrize("how", ["sync in every micro-batch", "no_sync", "ignored buffers"])
def test_the_bias_moves_by_the_rows_of_all_ranks_and_micro_batches(ranks: RankPool, how: str) -> None:
    expected = steps_alone()
    assert any(expected[1])
    assert ranks.run(steps_under_ddp, RANKS, how) == [expected] * RANKS


def test_ddp_that_would_overwrite_row_counts_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(steps_under_ddp, RANKS, "default"):
        assert message.endswith("create it with forward_sync_buffers=False")
        assert "\n" not in message
