"""Components of a user, one file each: gpt-oss's experts and an asynchronous dispatcher, on 1 to 4 ranks."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from spurline import MoE, MoEConfig, parallelize_moe
from spurline.moe.reference import reference_choice, reference_scores
from spurline.parallel.fsdp import apply_fsdp
from spurline.testing import RankPool
from spurline.testing.equivalence import errors_between, layer_results, reference_results, relative_error

sys.path.insert(0, str(Path(__file__).parent))
import gpt_oss_experts  # noqa: F401
import slow_dispatcher  # noqa: F401

GPT_OSS = MoEConfig(
    dim=8, hidden_dim=12, num_experts=4, top_k=2, num_shared_experts=1, experts="gpt_oss", route_norm=True
)


def make_layer(config: MoEConfig) -> MoE:
    torch.manual_seed(0)
    moe = MoE(config, init_std=0.4)
    for parameter in moe.experts.parameters():  # biases too
        nn.init.normal_(parameter, std=0.4)
    return moe


def make_input(rank: int) -> Tensor:
    return torch.randn(5 + rank, 8, generator=torch.Generator().manual_seed(rank))


def plain_gpt_oss(x_TD: Tensor, weights: dict[str, Tensor], config: MoEConfig) -> Tensor:
    """Token by token, as the published code of gpt-oss computes an expert."""
    score_TE = reference_scores(x_TD, weights, config)[1]
    outputs = []
    for t, x_D in enumerate(x_TD):
        chosen = reference_choice(score_TE[t], t, weights["router.expert_bias_E"], config)
        norm = sum(score_TE[t, e] for e in chosen)
        y_D = torch.zeros_like(x_D)
        for e in chosen:
            both = x_D @ weights["experts.w1_EDX"][e] + weights["experts.b1_EX"][e]
            gate, up = both[0::2].clamp(max=7.0), both[1::2].clamp(min=-7.0, max=7.0)
            hidden_F = (up + 1) * (gate * torch.sigmoid(1.702 * gate))
            out_D = hidden_F @ weights["experts.w2_EFD"][e] + weights["experts.b2_ED"][e]
            y_D = y_D + out_D * score_TE[t, e] / norm
        w1, w3, w2 = (weights[f"shared_experts.{name}"] for name in ("w1_FD", "w3_FD", "w2_DF"))
        outputs.append(y_D + w2 @ (F.silu(w1 @ x_D) * (w3 @ x_D)))
    return torch.stack(outputs)


def plain_results(config: MoEConfig, num_ranks: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Every rank's output, and the gradients of the sum of their losses."""
    moe = make_layer(config)
    weights = {name: p.detach().requires_grad_() for name, p in moe.named_parameters()}
    outputs = [plain_gpt_oss(make_input(r), weights | dict(moe.named_buffers()), config) for r in range(num_ranks)]
    sum(y.square().sum() for y in outputs).backward()
    return [y.detach() for y in outputs], {name: w.grad for name, w in weights.items()}


@pytest.mark.parametrize("backend", ["auto", "loop", "grouped_mm"])
def test_gpt_oss_on_one_rank(backend: str) -> None:
    config = MoEConfig(**(vars(GPT_OSS) | {"experts_backend": backend}))
    moe = make_layer(config)
    y = moe(make_input(0))
    y.square().sum().backward()
    (expected,), gradients = plain_results(config, 1)
    assert relative_error(y.detach(), expected) < 1e-5
    for name, parameter in moe.named_parameters():
        assert relative_error(parameter.grad, gradients[name]) < 1e-5, name


def test_gpt_oss_is_counted_by_its_layout() -> None:
    moe = make_layer(GPT_OSS)
    assert GPT_OSS.num_params() == sum(p.numel() for p in moe.parameters())
    assert GPT_OSS.num_params() - GPT_OSS.num_active_params() == 2 * (8 * 24 + 24 + 12 * 8 + 8)


class Block(nn.Module):
    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)


class Model(nn.Module):
    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": Block(moe)})

    def forward(self, x: Tensor) -> Tensor:
        return self.layers["0"](x)


def run_gpt_oss(rank: int, layout: str) -> tuple[Tensor, dict[str, Tensor]]:
    world = dist.get_world_size()
    moe = make_layer(GPT_OSS)
    model = Model(moe)
    if layout == "ep":
        parallelize_moe(moe, init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)))
    elif layout == "etp":
        parallelize_moe(moe, init_device_mesh("cpu", (1, world), mesh_dim_names=("ep", "etp")))
    elif layout == "ep+etp":
        parallelize_moe(moe, init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ep", "etp")))
    elif layout == "fsdp":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        apply_fsdp(model, mesh, mesh)
    elif layout == "fsdp+ep":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("efsdp", "ep"))
        parallelize_moe(moe, mesh["ep"], reduce_gradients=False)
        apply_fsdp(model, mesh._flatten("dp"), mesh["efsdp"])
    y = model(make_input(rank))
    y.square().sum().backward()
    return y.detach(), _full_gradients(moe)


def _full_gradients(moe: MoE) -> dict[str, Tensor]:
    gradients = {name: p.grad for name, p in moe.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}


@pytest.mark.parametrize(
    ("layout", "world"), [("ep", 2), ("etp", 2), ("fsdp", 2), ("ep+etp", 4), ("fsdp+ep", 4)], ids=str
)
def test_gpt_oss_across_ranks(ranks: RankPool, layout: str, world: int) -> None:
    outputs, gradients = plain_results(GPT_OSS, world)
    for rank, (y, found) in enumerate(ranks.run(run_gpt_oss, world, layout)):
        assert relative_error(y, outputs[rank]) < 1e-5
        for name, gradient in found.items():
            assert relative_error(gradient, gradients[name]) < 2e-5, name


SLOW = MoEConfig(dim=8, hidden_dim=8, num_experts=4, top_k=2, num_shared_experts=1, dispatcher="slow")


def run_slow(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    moe = parallelize_moe(make_layer(SLOW), init_device_mesh("cpu", (dist.get_world_size(),)))
    y = moe(make_input(rank))
    y.square().sum().backward()
    return y.detach(), _full_gradients(moe)


def test_an_asynchronous_dispatcher_with_a_handle(ranks: RankPool) -> None:
    moe = make_layer(SLOW)
    errors = errors_between(layer_results(moe, make_input(0)), reference_results(moe, make_input(0)))
    assert max(errors.values()) < 1e-5
    outputs = [moe(make_input(rank)) for rank in range(2)]
    sum(y.square().sum() for y in outputs).backward()
    for rank, (y, found) in enumerate(ranks.run(run_slow, 2)):
        assert relative_error(y, outputs[rank].detach()) < 1e-5
        for name, parameter in moe.named_parameters():
            assert relative_error(found[name], parameter.grad) < 1e-5, name
