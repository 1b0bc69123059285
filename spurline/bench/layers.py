"""The layers to compare: ours and those of installed peers, all with the same weights."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spurline.bench.cases import Case
from spurline.bench.floor import Floor
from spurline.moe import MoE, MoEConfig
from spurline.moe.kernels.choose import kernel_named
from spurline.moe.kernels.kernel import Work

_MOST_COPIES = 512
"""Maximum number of rows for peers that copy the expert's weights for each row."""


@dataclass
class Candidate:
    """A layer, (1, T, D) -> (1, T, D), with its input and output gradient."""

    layer: nn.Module
    x: Tensor
    grad: Tensor

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.layer(self.x)

    def forward_and_backward(self) -> None:
        """Forward and backward; sets gradients to None first, like zero_grad."""
        for tensor in (self.x, *self.layer.parameters()):
            tensor.grad = None
        self.layer(self.x).backward(self.grad)


@dataclass
class Contest:
    """All layers of one case, with the same weights and input, and the floor."""

    floor: Floor
    candidates: dict[str, Candidate]


def make_contest(
    case: Case, dtype: torch.dtype = torch.float32, peers: bool = True, device: str | torch.device = "cpu"
) -> Contest:
    """Build all layers of a case; weights and input are drawn on the CPU, to be the same on every device."""
    torch.manual_seed(0)
    config = MoEConfig(
        dim=case.dim,
        hidden_dim=case.hidden_dim,
        num_experts=case.num_experts,
        top_k=case.top_k,
        force_load_balance=case.routing == "uniform",
    )
    ours = MoE(config)
    x = torch.randn(1, case.num_tokens, case.dim)
    _set_routing(ours.router.gate_ED, x, case)
    x, grad = x.to(device, dtype).requires_grad_(), torch.randn(x.shape).to(device, dtype)
    layers: dict[str, nn.Module] = {"spurline": ours} | _other_kernels(ours, x)
    for layer in layers.values():
        layer.to(device, dtype)
    if peers and case.routing != "uniform":  # peers force load balance for debugging only, if at all
        for name, make in _PEERS.items():
            if name == "transformers batched_mm" and case.num_rows > _MOST_COPIES:
                continue
            with contextlib.suppress(ImportError):
                layers |= {name: make(case, ours).to(device, dtype)}
    with torch.no_grad():
        routing = ours.router(x.flatten(0, 1))
    token_R = torch.argsort(routing.expert_TK.flatten(), stable=True) // case.top_k
    weights = [w.detach() for w in (ours.experts.w1_EFD, ours.experts.w3_EFD, ours.experts.w2_EDF)]
    counts = routing.count_E.tolist()
    floor = Floor(x.detach()[0, token_R], *weights, counts, grad[0, token_R])  # type: ignore[call-arg]
    return Contest(floor, {name: Candidate(layer, x, grad) for name, layer in layers.items()})


def _other_kernels(ours: MoE, x: Tensor) -> dict[str, nn.Module]:
    """On an accelerator, our layer with each of its kernels, whether `auto` chooses it or not."""
    found: dict[str, nn.Module] = {}
    if x.device.type == "cpu":
        return found
    for name in ("grouped_mm", "triton"):
        work = Work("swiglu", x.device.type, x.dtype, ours.config.dim, ours.config.hidden_dim)
        if kernel_named(name).suits(work).score:
            layer = MoE(dataclasses.replace(ours.config, experts_backend=name))
            layer.load_state_dict(ours.state_dict())
            found[f"spurline {name}"] = layer
    return found


@torch.no_grad()
def _set_routing(gate_ED: Tensor, x: Tensor, case: Case) -> None:
    """Set the gate, and channel 0 of x to 1 as a bias input, to produce the routing of the case."""
    gate_ED.normal_(std=0.1)
    x[..., 0] = 1.0
    rank_E = torch.arange(1, case.num_experts + 1, dtype=torch.float32)
    if case.routing == "zipf":
        # Bias -log(n) plus noise selects expert n with probability roughly proportional to 1 / n (Gumbel trick).
        gate_ED.normal_(std=case.dim**-0.5)
        gate_ED[:, 0] = -rank_E.log()
    elif case.routing == "one_hot":
        gate_ED.zero_()
        gate_ED[:, 0] = -rank_E / case.num_experts


def _torchtitan(case: Case, ours: MoE) -> nn.Module:
    """torchtitan's layer, without its cast to bfloat16: matmuls are in the dtype of the rows."""
    from torchtitan.models.common import moe
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    class Experts(moe.GroupedExperts):
        def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
            ends_E = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)

            def product(rows: Tensor, w: Tensor) -> Tensor:
                return torch._grouped_mm(rows, w.transpose(-2, -1), offs=ends_E)

            hidden = torch.nn.functional.silu(product(x_RD, self.w1_EFD)) * product(x_RD, self.w3_EFD)
            return product(hidden, self.w2_EDF)

    sizes = {"num_experts": case.num_experts}
    config = moe.MoE.Config(
        **sizes,
        load_balance_coeff=None,
        routed_experts=moe.RoutedExperts.Config(
            inner_experts=moe.GroupedExperts.Config(**sizes, dim=case.dim, hidden_dim=case.hidden_dim),
            token_dispatcher=LocalTokenDispatcher.Config(**sizes, top_k=case.top_k),
        ),
        router=moe.TokenChoiceTopKRouter.Config(
            **sizes,
            top_k=case.top_k,
            score_func="softmax",
            gate=moe.Linear.Config(in_features=case.dim, out_features=case.num_experts),
        ),
    )
    layer = config.build()
    experts = layer.routed_experts.inner_experts
    experts.__class__ = Experts
    for name in ("w1_EFD", "w3_EFD", "w2_EDF"):
        setattr(experts, name, _copy(getattr(ours.experts, name)))
    layer.router.gate.weight = _copy(ours.router.gate_ED)
    layer._init_self_buffers(buffer_device=torch.device("cpu"))  # moved with the layer
    return layer


def _transformers(implementation: str) -> Callable[[Case, MoE], nn.Module]:
    def make(case: Case, ours: MoE) -> nn.Module:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        config = Qwen3MoeConfig(
            hidden_size=case.dim,
            moe_intermediate_size=case.hidden_dim,
            num_experts=case.num_experts,
            num_experts_per_tok=case.top_k,
            norm_topk_prob=False,
        )
        config._experts_implementation = implementation
        layer = Qwen3MoeSparseMoeBlock(config)
        experts = ours.experts
        layer.experts.gate_up_proj = _copy(torch.cat([experts.w1_EFD, experts.w3_EFD], dim=1))
        layer.experts.down_proj = _copy(experts.w2_EDF)
        layer.gate.weight = _copy(ours.router.gate_ED)
        return layer

    return make


def _copy(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().clone())


_PEERS: dict[str, Callable[[Case, MoE], Any]] = {
    "torchtitan": _torchtitan,
    "transformers grouped_mm": _transformers("grouped_mm"),
    "transformers batched_mm": _transformers("batched_mm"),
    "transformers eager": _transformers("eager"),
}


def check_agreement(contest: Contest, tolerance: float) -> Iterator[str]:
    """One line per layer whose output differs from ours: only equivalent layers are comparable.

    Compares norms over all tokens, since a bfloat16 gate routes a few tokens to other experts.
    """
    expected = contest.candidates["spurline"].forward().double()
    for name, candidate in contest.candidates.items():
        error = (candidate.forward() - expected).norm() / expected.norm()
        if not error <= tolerance:
            yield f"{name} differs from spurline by {error:.2g}"
