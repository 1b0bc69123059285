"""The configuration of a mixture-of-experts layer. Torch-free, so that the command line starts instantly."""

import math
from dataclasses import dataclass, field
from typing import Literal

from spurline.moe.dispatch.libraries import LIBRARIES, missing_library
from spurline.moe.layout import params_per_expert
from spurline.moe.registry import DISPATCHERS, EXPERTS, KERNELS, LAYOUTS, ROUTERS
from spurline.registry import unknown
from spurline.typed_json import ADDED_LATER

_CHOICES = {
    "score_func": ("softmax", "sigmoid"),
    "aux_loss": ("none", "batch", "sequence"),
    "equal_split": ("off", "adaptive", "forced"),
    "overflow": ("drop_last", "drop_lowest_weight", "grow"),
    "exchange_dtype": ("same", "float8"),
}
SAME_NUMBERS = ("experts_backend", "equal_split", "equal_split_threshold", "check_exchange", "row_multiple")
"""Options for how a layer is computed: with any value, it computes the same numbers up to rounding."""
SAME_WEIGHTS = (*SAME_NUMBERS, "dispatcher", "capacity_factor", "overflow", "exchange_dtype")
"""Options that leave the meaning of the weights alone: some of them drop or round rows."""


@dataclass(frozen=True)
class MoEConfig:
    dim: int = 0
    """Model width D. Inside a model config, 0 means the model's own width."""
    hidden_dim: int = 0
    """Hidden width F of one expert."""
    num_experts: int = 8
    """Routed experts E."""
    top_k: int = 2
    """Experts per token K."""
    num_shared_experts: int = 0
    """Shared experts, which every token visits; computed as one SwiGLU of this many times hidden_dim."""

    shared_gate: bool = False
    """Scale each token's shared-expert output by the sigmoid of a learned projection of the token."""

    gate_bias: bool = False
    """Add a learned bias to the gate logits, which affects both selection and weights."""
    score_func: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns gate logits into scores."""
    route_norm: bool = False
    """Divide a token's K weights by their sum."""
    route_scale: float = 1.0
    """Multiply the weights by this, after route_norm."""
    score_before_experts: bool = False
    """Apply the routing weights to the experts' inputs instead of their outputs."""
    num_groups: int = 1
    """Group-limited routing: experts are split into this many groups (1 = off)."""
    num_limited_groups: int | None = None
    """Group-limited routing: how many of the best groups stay eligible for a token."""
    force_load_balance: bool = False
    """Debug: send token-slot i to expert i % E, ignoring the gate."""

    bias_update_rate: float = 0.0
    """Auxiliary-loss-free balancing: update rate of the selection bias (0 = off; 1e-3 is typical)."""
    aux_loss: Literal["none", "batch", "sequence"] = "none"
    """Balance loss over the batch (all ranks' tokens of one forward pass), or over each sequence."""
    aux_loss_weight: float = 1e-2
    """Weight of the balance loss."""
    z_loss_weight: float = 0.0
    """Weight of the router z-loss, the squared log-sum-exp of the gate logits (0 = off)."""

    router: str = "top_k"
    """Router: top_k, or a registered name."""
    experts: str = "swiglu"
    """Expert network: swiglu, clamped_swiglu (with biases, as in gpt-oss), or a registered name."""
    experts_backend: str = "auto"
    """Kernel of the expert matmuls: auto, stream, loop, grouped_mm, bmm, triton, or a registered name.
    auto: stream on CPUs (SwiGLU); on accelerators bmm for equal counts, else grouped_mm if one kernel, else triton."""
    dispatcher: str = "local"
    """How rows reach their experts: local (all-to-all across ranks), capacity (a fixed number of places per expert,
    without device-to-host reads), deep_ep, deep_ep_low_latency, hybrid_ep (libraries for NVIDIA GPUs), or a
    registered name."""

    equal_split: Literal["off", "adaptive", "forced"] = "off"
    """Across ranks: pad the all-to-all to equal splits: never, where it costs little (adaptive), or always."""
    equal_split_threshold: float = 0.10
    """Adaptive equal split: the most padding, as a fraction of the rows."""
    check_exchange: bool = False
    """Across ranks: check that every row sent arrives unchanged and in order."""
    row_multiple: int = field(default=1, metadata=ADDED_LATER)
    """Pad the rows of each expert to a multiple of this (1 = off), for your own kernel; 8-bit recipes pad anyway."""
    capacity_factor: float = field(default=1.25, metadata=ADDED_LATER)
    """Dispatcher capacity: places per expert, as a multiple of an even share of a rank's rows."""
    overflow: Literal["drop_last", "drop_lowest_weight", "grow"] = field(default="drop_last", metadata=ADDED_LATER)
    """Dispatcher capacity: of the rows beyond an expert's capacity, drop those of the last tokens, or of the lowest
    weights; grow drops the last and raises the factor to what was needed whenever a step is logged."""
    exchange_dtype: Literal["same", "float8"] = field(default="same", metadata=ADDED_LATER)
    """Across ranks: send rows to their experts in the dtype of the activations, or as float8 with a scale per row: half
    the bytes of bfloat16, rounded by up to 6%. Expert outputs and gradients are never rounded."""

    def problems(self) -> list[str]:
        """All errors in this config, one sentence each; empty if it is valid."""
        found: list[str] = []

        def require(ok: bool, message: str) -> None:
            if not ok:
                found.append(message)

        for name in ("dim", "hidden_dim", "num_experts", "top_k", "num_groups", "row_multiple"):
            require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        require(self.num_shared_experts >= 0, f"num_shared_experts must not be negative, got {self.num_shared_experts}")
        for name in ("bias_update_rate", "aux_loss_weight", "z_loss_weight", "equal_split_threshold"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        is_factor = self.capacity_factor > 0 and math.isfinite(self.capacity_factor)
        require(is_factor, f"capacity_factor must be positive and finite, got {self.capacity_factor}")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            require(value in choices, f"{name} must be one of {', '.join(choices)}, got {value!r}")
        found += unknown("router", self.router, ROUTERS)
        found += unknown("experts", self.experts, EXPERTS)
        found += unknown("experts_backend", self.experts_backend, ["auto", *KERNELS])
        found += unknown("dispatcher", self.dispatcher, DISPATCHERS) or missing_library(self.dispatcher)
        if found:
            return found

        require(
            self.top_k <= self.num_experts,
            f"top_k {self.top_k} is larger than num_experts {self.num_experts}: a token visits an expert once at most",
        )
        if self.dispatcher in ("capacity", *LIBRARIES) and self.equal_split != "off":
            found.append(f"equal_split {self.equal_split!r} is for dispatcher local, not for {self.dispatcher}")
        if self.dispatcher in ("capacity", *LIBRARIES) and self.exchange_dtype != "same":
            found.append(f"exchange_dtype {self.exchange_dtype!r} is for dispatcher local, not for {self.dispatcher}")
        if self.shared_gate and not self.num_shared_experts:
            found.append("shared_gate needs num_shared_experts above 0")
        if self.num_groups > 1:
            found += self._group_problems()
        elif self.num_limited_groups is not None:
            found.append(f"num_limited_groups {self.num_limited_groups} needs num_groups above 1")
        return found

    def _group_problems(self) -> list[str]:
        E, groups, limited = self.num_experts, self.num_groups, self.num_limited_groups
        if E % groups:
            return [f"num_groups {groups} does not divide num_experts {E}"]
        size = E // groups
        if size < 2:
            return [
                f"num_groups {groups} leaves {size} expert a group: a group is scored by its two best, so it needs two"
            ]
        if limited is None:
            return [f"num_groups {groups} needs num_limited_groups (how many groups stay eligible, 1 to {groups})"]
        if not 1 <= limited <= groups:
            return [f"num_limited_groups {limited} must be between 1 and num_groups {groups}"]
        if self.top_k > limited * size:
            return [
                f"top_k {self.top_k} is larger than the {limited * size} experts that stay eligible"
                f" ({limited} groups of {size})"
            ]
        return []

    def check(self) -> "MoEConfig":
        """Return self, or raise a ValueError that lists every problem."""
        if found := self.problems():
            raise ValueError("MoEConfig: " + "; ".join(found))
        return self

    @property
    def host_reads(self) -> int:
        """Device-to-host reads in a forward pass of a layer that is sharded over ranks."""
        return 0 if self.force_load_balance or self.dispatcher == "capacity" else 1

    @property
    def can_compile(self) -> bool:
        """Whether a layer can be traced: the dispatch libraries can't be."""
        return self.dispatcher not in LIBRARIES

    @property
    def shared_hidden_dim(self) -> int:
        return self.num_shared_experts * self.hidden_dim

    def num_params(self) -> int:
        return self._shared_and_gate_params() + self.num_experts * self._params_per_expert()

    def num_active_params(self) -> int:
        """Parameters that one token uses."""
        return self._shared_and_gate_params() + self.top_k * self._params_per_expert()

    def _params_per_expert(self) -> int:
        return params_per_expert(LAYOUTS[self.experts], hidden=self.hidden_dim, width=self.dim)

    def _shared_and_gate_params(self) -> int:
        gate = self.num_experts * (self.dim + self.gate_bias)
        return gate + 3 * self.dim * self.shared_hidden_dim + self.shared_gate * self.dim
