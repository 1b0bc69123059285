"""How often a forward waits for a device, counted on fake tensors: without values, any other wait is an error."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from spurline import MoE, MoEConfig
from spurline.moe.dispatch.plan import ExpertRanks
from spurline.moe.dispatch.traffic import Traffic

CONFIG = MoEConfig(dim=8, hidden_dim=16, num_experts=8, top_k=2, num_shared_experts=1, experts_backend="grouped_mm")
P = 4


@pytest.fixture
def group():  # type: ignore[no-untyped-def]
    """Rank 0 of four ranks that aren't there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=P)
    yield dist.group.WORLD
    dist.destroy_process_group()


def reads_of_one_forward(
    config: MoEConfig, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, tokens: int = 12
) -> int:
    reads = []

    def read(numbers: torch.Tensor) -> list[int]:
        """Stands in for the device: what it would answer if every rank routed evenly."""
        reads.append(numbers.shape)
        of_pair, of_expert = tokens * config.top_k // P, tokens * config.top_k // config.num_experts
        totals = [of_pair * P, of_pair, of_pair * P * P, of_expert, of_expert, of_expert * P, of_expert * P]
        answer = [of_pair] * (2 * P) + totals + [of_expert * P] * (config.num_experts // P)
        assert numbers.shape == (len(answer),)
        return answer

    monkeypatch.setattr(Traffic, "read_on_host", staticmethod(read))
    moe = MoE(config)
    moe.dispatcher = moe.dispatcher.across(ExpertRanks(group))
    for name, parameter in list(moe.experts.named_parameters()):
        setattr(moe.experts, name, torch.nn.Parameter(parameter[: config.num_experts // P].detach()))
    with FakeTensorMode(allow_non_fake_inputs=True):  # the layer's name, for errors, is a real tensor
        make_fake(moe)
        x = torch.empty(tokens, config.dim)
        y = moe(x)
        assert y.shape == x.shape
    return len(reads)


def make_fake(moe: MoE) -> None:
    for module in moe.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(torch.empty(p.shape)))
        for name, b in list(module.named_buffers(recurse=False)):
            module._buffers[name] = torch.empty(b.shape, dtype=b.dtype)


@pytest.mark.parametrize(
    ("changes", "reads"),
    [
        ({}, 1),
        ({"equal_split": "forced"}, 1),
        ({"equal_split": "adaptive"}, 1),
        ({"score_before_experts": True, "aux_loss": "batch"}, 1),
        ({"row_multiple": 4}, 1),
        ({"dispatcher": "capacity"}, 0),
        ({"dispatcher": "capacity", "overflow": "drop_lowest_weight", "row_multiple": 4}, 0),
        ({"force_load_balance": True}, 0),
        ({"force_load_balance": True, "equal_split": "forced"}, 0),
    ],
    ids=str,
)
def test_host_reads_of_a_forward(
    changes: dict[str, object], reads: int, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reads_of_one_forward(dataclasses.replace(CONFIG, **changes), group, monkeypatch) == reads


def test_an_uneven_forced_balance_needs_none_either(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(CONFIG, force_load_balance=True)
    assert reads_of_one_forward(config, group, monkeypatch, tokens=7) == 0


def test_a_wait_elsewhere_would_be_noticed() -> None:
    with (
        FakeTensorMode(),
        pytest.raises(Exception, match=r"DataDependent|data-dependent|DynamicOutput|repeat_interleave"),
    ):
        torch.repeat_interleave(torch.ones(3, dtype=torch.int64))
