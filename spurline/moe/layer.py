"""The mixture-of-experts layer: route, plan, dispatch, experts, combine.

T tokens, D width, F hidden width of the shared experts.
"""

import math
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from spurline.comm.gradients import call_replicated, local
from spurline.comm.sequence import HeadTailShard, SequenceShard
from spurline.comm.sequence_parallel import SequenceParallel
from spurline.lora.adapters import Adaptable, product
from spurline.moe.config import MoEConfig
from spurline.moe.initial import draw_parameters, reset
from spurline.moe.registry import make_dispatcher, make_experts, make_router
from spurline.ops.draw import drawn_in_blocks, fill_truncated_normal
from spurline.ops.functional import swiglu
from spurline.ops.low_precision import LowPrecision
from spurline.ops.skinny_matmul import skinny_linear


class SharedExperts(Adaptable):
    """The experts every token visits: one SwiGLU as wide as all of them together, optionally scaled by a gate."""

    precision: LowPrecision | None = None
    """Precision of the matmuls, if not the dtype of the tokens, which the gate always uses."""

    def __init__(self, config: MoEConfig, init_std: float = 0.02, output_std: float | None = None) -> None:
        super().__init__()
        F_, D = config.shared_hidden_dim, config.dim
        self.std = {"w1_FD": init_std, "w3_FD": init_std, "w2_DF": output_std or init_std, "gate_1D": init_std}
        self.w1_FD = nn.Parameter(torch.empty(F_, D))
        self.w3_FD = nn.Parameter(torch.empty(F_, D))
        self.w2_DF = nn.Parameter(torch.empty(D, F_))
        self.gate_1D = nn.Parameter(torch.empty(1, D)) if config.shared_gate else None

    @drawn_in_blocks
    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator | None) -> None:
        fill_truncated_normal(tensor, self.std[name], generator)

    def adaptable_weights(self) -> tuple[str, ...]:
        return ("w1_FD", "w3_FD", "w2_DF")

    def forward(self, x_TD: Tensor) -> Tensor:
        """(T, D) -> (T, D)."""
        dtype = x_TD.dtype
        if self.scale_of or self.precision is not None:
            w1, w3, w2 = map(self.weight_of, self.adaptable_weights())
            hidden_TF = swiglu(product(x_TD, w1, self.precision), product(x_TD, w3, self.precision))
            y_TD = product(hidden_TF, w2, self.precision)
        else:  # the same without a dozen calls on the host
            linear = nn.functional.linear if torch.is_grad_enabled() else skinny_linear
            w1_FD, w3_FD, w2_DF = local(self.w1_FD), local(self.w3_FD), local(self.w2_DF)
            hidden_TF = swiglu(linear(x_TD, w1_FD.to(dtype)), linear(x_TD, w3_FD.to(dtype)))
            y_TD = linear(hidden_TF, w2_DF.to(dtype))
        if self.gate_1D is None:
            return y_TD
        return y_TD * nn.functional.linear(x_TD, local(self.gate_1D).to(dtype)).sigmoid()


class MoE(nn.Module):
    """A mixture-of-experts feed-forward layer, (..., D) -> (..., D).

    Examples:
        >>> moe = MoE(MoEConfig(dim=512, hidden_dim=256, num_experts=16, top_k=2), device="cpu", dtype=torch.float32)
        >>> y = moe(x)

    A 3-D input is read as (B, L, D), and the sequence-level balance loss is taken over each of the B sequences. Balance
    losses contribute to the gradients automatically, beside a loss that is a mean over the tokens of one call. With
    gradient accumulation or a GradScaler, call `spurline.moe.set_token_weight(model, loss_scale / tokens_of_the_step)`
    before each step. `spurline.moe.update_expert_bias(model)` after each optimizer step updates the selection bias and
    returns the rows per expert. Under `torch.autocast`, the experts and the output have its dtype, as with nn.Linear;
    the router computes in float32.
    """

    def __init__(
        self,
        config: MoEConfig,
        init_std: float = 0.02,
        output_std: float | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """init_std: standard deviation of the initial weights; output_std: that of output projections."""
        super().__init__()
        self.config = config.check()
        with torch.device(device or torch.get_default_device()):
            self.router = make_router(config, init_std)
            self.experts = make_experts(config, init_std, output_std)
            self.shared_experts = SharedExperts(config, init_std, output_std) if config.num_shared_experts else None
            self.dispatcher = make_dispatcher(config)
        self.expert_group: ProcessGroup | None = None  # the ranks that experts are sharded over
        self.sums_gradients = False  # of router and shared experts over these ranks
        self.sequence: SequenceParallel | None = None  # ranks that have the same sequences and split their positions
        self.sequence_ranks: tuple[int, list[int], list[int] | None] | None = None  # see `set_sequence_ranks`
        if dtype is not None:
            self.to(dtype)
        for component in self.children():
            component.apply(draw_parameters)

    def reset_parameters(self) -> None:
        """Initialize all weights and buffers, from torch's default generator: after `to_empty`, or to start again.

        Experts that are sharded over ranks differ, and everything else is the same, if all ranks set the same seed.
        """
        for component in self.children():
            component.apply(reset)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy on the same ranks: it shares the process groups, which can't be copied."""
        sequence_group = None if self.sequence is None else self.sequence.group
        for group in (self.expert_group, sequence_group, getattr(self.router, "balance_group", None)):
            memo[id(group)] = group
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(deepcopy(self.__dict__, memo))
        return copied

    def set_sequence_ranks(self, size: int, rank_P: list[int], context_rank_P: list[int] | None = None) -> None:
        """Set which of `size` shares of a sequence's positions each rank of the expert group works on.

        With the full length passed to `forward`, every rank then knows how many tokens each other rank has. Under
        context parallelism, `context_rank_P` is the context parallel rank whose part of the sequence is shared.
        """
        self.sequence_ranks = size, rank_P, context_rank_P

    def forward(self, x: Tensor, length: int | None = None, shard: HeadTailShard | None = None) -> Tensor:
        """(..., D) -> (..., D). `length` is the full sequence length if x is this rank's share of the positions.

        Under context parallelism, `shard` is this rank's part of the full sequence, and `length` the part's length.
        """
        dim = self.config.dim
        if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[-1] != dim or not x.is_floating_point():
            raise self._error(x)
        if self.sequence is None:
            has_share = length is not None and self.sequence_ranks is not None
            return self._forward(x, self._tokens_per_rank(x, length, shard) if has_share else None)  # type: ignore[arg-type]
        x_BLD = x.view(math.prod(x.shape[:-2]), *x.shape[-2:])
        y_BlD = self._forward(self.sequence.split(x_BLD), self.sequence.tokens_per_rank(x_BLD))
        return self.sequence.join(y_BlD, x_BLD.shape[1]).view(x.shape)

    def _forward(self, x: Tensor, num_tokens_P: list[int] | None) -> Tensor:
        x_TD, router, shared_experts = x.reshape(-1, x.shape[-1]), self.router, self.shared_experts
        if self.sums_gradients:
            router, shared_experts = self._replicated()
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):
            return self._forward_under_autocast(x_TD, x.shape, num_tokens_P, router, shared_experts)
        routing = router(x_TD, math.prod(x.shape[:-2]))
        plan = self.dispatcher.plan(routing, num_tokens_P)
        rows = plan.dispatch(x_TD)
        if shared_experts is not None:  # computed while rows are in flight
            rows = replace(rows, onto_TD=shared_experts(x_TD), may_overwrite=self._owns_shared_output())
        return plan.combine(self.experts(rows)).view(x.shape)

    def _forward_under_autocast(
        self, x_TD: Tensor, shape: torch.Size, num_tokens_P: list[int] | None, router: Any, shared_experts: Any
    ) -> Tensor:
        """The same with casts at the edges. Only the shared experts run under autocast: they may be any module."""
        device = x_TD.device.type
        low_TD = x_TD if x_TD.dtype == torch.float64 else x_TD.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            routing = router(x_TD, math.prod(shape[:-2]))
            plan = self.dispatcher.plan(routing, num_tokens_P)
            rows = plan.dispatch(low_TD)
        if shared_experts is not None:
            rows = replace(rows, onto_TD=shared_experts(low_TD), may_overwrite=self._owns_shared_output())
        with torch.autocast(device, enabled=False):
            return plan.combine(self.experts(rows)).view(shape)

    def _replicated(self) -> tuple[Any, Any]:
        """The router and the shared experts, called so that their gradients are summed over `expert_group`."""
        assert self.expert_group is not None
        router = partial(call_replicated, self.expert_group, self.router)
        if self.shared_experts is None:
            return router, None
        return router, partial(call_replicated, self.expert_group, self.shared_experts)

    def _owns_shared_output(self) -> bool:
        """Whether nothing else can hold the shared experts' output: our own module returns a new tensor."""
        shared = self.shared_experts
        return type(shared) is SharedExperts and not shared._forward_hooks

    def _tokens_per_rank(self, x: Tensor, length: int, shard: HeadTailShard | None) -> list[int]:
        assert self.sequence_ranks is not None
        size, rank_P, context_rank_P = self.sequence_ranks
        length_P = [length] * len(rank_P)
        if shard is not None and context_rank_P is not None:
            length_P = [shard.of_rank(rank).num_real for rank in context_rank_P]
        shares = zip(length_P, rank_P, strict=True)
        return [math.prod(x.shape[:-2]) * SequenceShard(length, size, rank).num_real for length, rank in shares]

    def _error(self, x: Tensor) -> Exception:
        if not isinstance(x, Tensor):
            return TypeError(f"MoE takes a tensor of shape (..., {self.config.dim}), got {type(x).__name__}")
        if not x.is_floating_point():
            return ValueError(f"MoE takes floating-point activations, got {x.dtype}")
        return ValueError(f"MoE takes activations of width {self.config.dim} (config.dim), got shape {tuple(x.shape)}")

    def extra_repr(self) -> str:
        config = self.config
        parts = [f"dim={config.dim}", f"hidden_dim={config.hidden_dim}", f"num_experts={config.num_experts}"]
        parts += [f"top_k={config.top_k}", f"num_shared_experts={config.num_shared_experts}"]
        return ", ".join([*parts, f"dispatcher={type(self.dispatcher).__name__}"])
