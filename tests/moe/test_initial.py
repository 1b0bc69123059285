"""Initial values of a layer that is used alone, with routers of users: when it is made, and after `to_empty`."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from spurline import MoE, MoEConfig
from spurline.lora.adapters import is_adapter
from spurline.moe import Router, Routing, register_router, registry

CONFIG = MoEConfig(dim=8, hidden_dim=8, num_experts=4, top_k=2, num_shared_experts=1, dispatcher="capacity")


class Nested(nn.Module):
    """A router within a router, behind a norm that PyTorch initializes."""

    def __init__(self, config: MoEConfig, init_std: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.dim)
        self.inner = Router(config, init_std)

    def forward(self, x_TD: Tensor, num_sequences: int = 1) -> Routing:
        return self.inner(self.norm(x_TD), num_sequences)


class Plain(nn.Module):
    """All that a router needs to be."""

    def __init__(self, config: MoEConfig, init_std: float) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.dim, config.num_experts)
        self.bias_E = nn.Parameter(torch.full((config.num_experts,), 0.25))

    def forward(self, x_TD: Tensor, num_sequences: int = 1) -> Routing:
        weight_TK, expert_TK = (self.gate(x_TD).softmax(-1) + self.bias_E).topk(self.config.top_k)
        return Routing(expert_TK, weight_TK, torch.bincount(expert_TK.flatten(), minlength=self.config.num_experts))


class Resettable(Plain):
    def reset_parameters(self) -> None:
        self.bias_E.fill_(0.25)


@pytest.fixture(autouse=True)
def routers_of_users() -> Iterator[None]:
    made = {"nested": Nested, "plain": Plain, "resettable": Resettable}
    for name, router in made.items():
        register_router(name, router)
    yield
    for name in made:
        del registry.ROUTERS[name]


def make(router: str, device: str = "cpu") -> MoE:
    torch.manual_seed(0)
    moe = MoE(MoEConfig(**(vars(CONFIG) | {"router": router})), device=device)
    moe.shared_experts.add_adapter("w1_FD", rank=2, scale=1.0)
    return moe


def state_after_reset(moe: MoE) -> dict[str, Tensor]:
    torch.manual_seed(1)
    moe.reset_parameters()
    return dict(moe.named_parameters()) | dict(moe.named_buffers())


@pytest.mark.parametrize("router", ["top_k", "nested", "resettable"])
def test_a_reset_after_to_empty_leaves_nothing_uninitialized(router: str) -> None:
    moe = make(router, "meta").to_empty(device="cpu")
    for tensor in [*moe.parameters(), *moe.buffers()]:  # to_empty may hand out zeros by luck
        tensor.data.fill_(torch.nan if tensor.is_floating_point() else 99)
    found, expected = state_after_reset(moe), state_after_reset(make(router))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        is_zero = name.endswith(("_lora_b", "norm.bias")) or not isinstance(value, nn.Parameter)
        assert value.isfinite().all()
        assert (value == 0).all() == is_zero, name
    assert any(map(is_adapter, found))
    moe(torch.randn(3, 8)).sum().backward()


def test_a_new_layer_draws_what_its_router_contains() -> None:
    gate_ED = make("nested").router.inner.gate_ED
    assert 0.01 < gate_ED.std() < 0.03
    assert gate_ED.abs().max() <= 0.06  # three standard deviations


def test_a_plain_router_keeps_what_its_constructor_set() -> None:
    moe = make("plain")
    assert (moe.router.bias_E == 0.25).all()
    moe(torch.randn(2, 5, 8)).sum().backward()


def test_a_reset_refuses_what_it_has_no_value_for() -> None:
    with pytest.raises(
        ValueError, match=r"^Plain owns bias_E but has no initial value for it: give it a method init_p"
    ):
        make("plain").reset_parameters()
    moe = make("top_k")
    moe.dispatcher = nn.BatchNorm1d(3)  # PyTorch's own initialize their buffers too
    moe.reset_parameters()
    moe.dispatcher = nn.Module()
    moe.dispatcher.register_buffer("seen", torch.zeros(1))
    with pytest.raises(ValueError, match=r"^Module owns seen .* give it a method init_buffers\(\)"):
        moe.reset_parameters()
