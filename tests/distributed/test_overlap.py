"""The exchange is in flight while the shared experts run: forward and backward, eager and compiled.

No clock decides: rank 1 joins the exchange only when rank 0 has run its shared experts (it learns of that through the
store). If rank 0 waited for the exchange before them, both would wait for ever.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from spurline import MoE, MoEConfig, parallelize_moe
from spurline.comm import exchange
from spurline.testing import RankPool

CONFIG = MoEConfig(dim=8, hidden_dim=8, num_experts=4, top_k=2, num_shared_experts=1)
PATIENCE = timedelta(seconds=120)


@torch.library.custom_op("spurline_tests::told", mutates_args=())
def told(x: Tensor, key: str) -> Tensor:
    """A copy of x; rank 0 says that it got here."""
    _events.append(key)
    if dist.get_rank() == 0:
        _store().set(f"{_run}/{key}", "here")
    return x.clone()


@told.register_fake
def _(x: Tensor, key: str) -> Tensor:
    return torch.empty_like(x)


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.key = inputs[1]


told.register_autograd(lambda ctx, grad: (told(grad, f"gradient of {ctx.key}"), None), setup_context=_save)
_run = ""
_events: list[str] = []


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


class Told(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return told(x, "shared experts")


def run_layer(rank: int, compiled: bool, backward: bool) -> tuple[list[float], list[str]]:
    global _run
    _run = f"{compiled} {backward}"
    torch.manual_seed(0)
    moe = MoE(CONFIG)
    moe.shared_experts = Told()
    parallelize_moe(moe, init_device_mesh("cpu", (2,)))
    run = torch.compile(moe, fullgraph=True) if compiled else moe
    x = torch.randn(6, 8, requires_grad=True)
    run(x).sum().backward()  # compile, before anybody waits
    _store().delete_key(f"{_run}/shared experts")
    _store().delete_key(f"{_run}/gradient of shared experts")
    dist.barrier()
    honest = exchange._all_to_all
    _events.clear()

    def late(*args: object) -> Tensor:
        """Rows travel there and back, gradients back and there: the first and the fourth exchange can overlap."""
        _events.append("exchange")
        if rank == 1 and _events.count("exchange") == (4 if backward else 1):
            _store().wait([f"{_run}/" + ("gradient of " if backward else "") + "shared experts"], PATIENCE)
        return honest(*args)

    exchange._all_to_all = late
    try:
        x.grad = None
        y = run(x)
        if backward:
            y.sum().backward()
    finally:
        exchange._all_to_all = honest
    return y.detach().flatten().tolist(), _events.copy()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_shared_experts_run_while_rows_travel(ranks: RankPool, compiled: bool, backward: bool) -> None:
    found = ranks.run(run_layer, 2, compiled, backward, timeout=240)
    torch.manual_seed(0)
    moe = MoE(CONFIG)
    moe.shared_experts = nn.Identity()
    x = torch.randn(6, 8)
    for y, events in found:
        # Started before, waited for after: or rank 1 would never have come.
        assert events[:3] == ["exchange", "shared experts", "exchange"]
        if backward:
            assert events[3:] == ["exchange", "exchange", "gradient of shared experts"]
        torch.testing.assert_close(torch.tensor(y).view(6, 8), moe(x).detach(), rtol=1e-5, atol=1e-6)
