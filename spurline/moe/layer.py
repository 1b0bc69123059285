"""The mixture-of-experts layer: route, plan, dispatch, experts, combine."""

from collections.abc import Iterator
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spurline.comm.local import local
from spurline.comm.sequence_parallel import SequenceParallel
from spurline.moe.config import MoEConfig
from spurline.moe.experts import Experts
from spurline.moe.registry import make_dispatcher, make_router
from spurline.ops.skinny_matmul import linear


class SharedExperts(nn.Module):
    """The experts every token visits: one SwiGLU as wide as all of them together."""

    def __init__(self, config: MoEConfig, init_std: float = 0.02, output_std: float | None = None) -> None:
        super().__init__()
        F_, D = config.shared_hidden_dim, config.dim
        self.std = {"w1_FD": init_std, "w3_FD": init_std, "w2_DF": output_std or init_std}
        self.w1_FD = nn.Parameter(torch.empty(F_, D))
        self.w3_FD = nn.Parameter(torch.empty(F_, D))
        self.w2_DF = nn.Parameter(torch.empty(D, F_))

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator | None) -> None:
        std = self.std[name]
        nn.init.trunc_normal_(tensor, std=std, a=-3 * std, b=3 * std, generator=generator)

    def forward(self, x_TD: Tensor) -> Tensor:
        w1_FD, w3_FD, w2_DF = (local(w).to(x_TD.dtype) for w in (self.w1_FD, self.w3_FD, self.w2_DF))
        return linear(F.silu(linear(x_TD, w1_FD)) * linear(x_TD, w3_FD), w2_DF)


class MoE(nn.Module):
    """A mixture-of-experts feed-forward layer, (..., D) -> (..., D).

    >>> moe = MoE(MoEConfig(dim=512, hidden_dim=256, num_experts=16, top_k=2))
    >>> y = moe(x)

    A 3-D input is read as (B, L, D): the sequence-level balance loss is taken over each of the B rows. Balance losses
    reach the gradients by themselves; `spurline.moe.update_expert_bias(model)` after each optimizer step moves the
    selection bias and returns the rows each expert got.
    """

    def __init__(self, config: MoEConfig, init_std: float = 0.02, output_std: float | None = None) -> None:
        super().__init__()
        self.config = config.check()
        self.router = make_router(config, init_std)
        self.experts = Experts(config, init_std, output_std)
        self.shared_experts = SharedExperts(config, init_std, output_std) if config.num_shared_experts else None
        self.dispatcher = make_dispatcher(config)
        self.sequence: SequenceParallel | None = None  # ranks that share the positions of every sequence
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the weights anew from torch's default generator."""
        for module in self.children():
            for name, parameter in module.named_parameters(recurse=False):
                if not parameter.is_meta:
                    module.init_parameter(name, parameter, None)  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        if self.sequence is None:
            return self._forward(x)
        x_BLD = x.view(x.shape[:-2].numel(), *x.shape[-2:])
        y_BlD = self._forward(self.sequence.split(x_BLD), self.sequence.tokens_per_rank(x_BLD))
        return self.sequence.join(y_BlD, x_BLD.shape[1]).view(x.shape)

    def _forward(self, x: Tensor, num_tokens_P: list[int] | None = None) -> Tensor:
        num_sequences = x.shape[:-2].numel()
        x_TD = x.reshape(-1, x.shape[-1])
        routing = self.router(x_TD, num_sequences)
        plan = self.dispatcher.plan(routing, num_tokens_P)
        shared_TD = None if self.shared_experts is None else self.shared_experts(x_TD)
        if self.experts.takes_tokens(x_TD, plan):
            return self.experts(x_TD, plan.rows_per_expert, plan, shared_TD).view(x.shape)
        rows_RD = plan.dispatch(x_TD)
        rows_RD = self.experts(rows_RD, plan.rows_per_expert)
        return plan.combine(rows_RD, onto_TD=shared_TD, keep=self._must_survive(x_TD)).view(x.shape)

    def _must_survive(self, x_TD: Tensor) -> Iterator[Tensor]:
        """What the shared experts' output must not be in another guise, to be built on in place."""
        yield x_TD
        if self.shared_experts is not None:
            for weight in chain(self.shared_experts.parameters(), self.shared_experts.buffers()):
                yield local(weight)
