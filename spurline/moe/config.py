"""What a mixture-of-experts layer is made of. Free of torch, so that a command line can show it at once."""

from dataclasses import dataclass
from typing import Literal

from spurline.moe.layout import params_per_expert
from spurline.moe.registry import DISPATCHERS, EXPERTS, KERNELS, LAYOUTS, ROUTERS
from spurline.registry import unknown

_CHOICES = {
    "score_func": ("softmax", "sigmoid"),
    "aux_loss": ("none", "batch", "sequence"),
    "equal_split": ("off", "adaptive", "forced"),
}


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
    """Experts every token visits; they are one SwiGLU of this many times hidden_dim."""

    shared_gate: bool = False
    """Weigh the shared experts' output of each token by the sigmoid of a learned product with the token."""

    gate_bias: bool = False
    """A learned bias of the gate's logits, for selection and for weights."""
    score_func: Literal["softmax", "sigmoid"] = "softmax"
    """Turns gate logits into scores."""
    route_norm: bool = False
    """Divide a token's K weights by their sum."""
    route_scale: float = 1.0
    """Multiply the weights, after route_norm."""
    score_before_experts: bool = False
    """Weigh the rows before the experts instead of after them."""
    num_groups: int = 1
    """Group-limited routing: experts are split into this many groups (1 = off)."""
    num_limited_groups: int | None = None
    """Group-limited routing: how many of the best groups stay eligible for a token."""
    force_load_balance: bool = False
    """Debug: token-slot i goes to expert i % E, whatever the gate says."""

    bias_update_rate: float = 0.0
    """Aux-loss-free balance: step of the selection bias (0 = off; 1e-3 is usual)."""
    aux_loss: Literal["none", "batch", "sequence"] = "none"
    """Balance loss over a batch (what all ranks see in one forward pass), or over each sequence."""
    aux_loss_weight: float = 1e-2
    """Weight of the balance loss."""
    z_loss_weight: float = 0.0
    """Weight of the squared log-sum-exp of the gate logits (0 = off)."""

    router: str = "top_k"
    """What sends tokens to experts: top_k, or a registered name."""
    experts: str = "swiglu"
    """What an expert computes: swiglu, clamped_swiglu (with biases, as in gpt-oss), or a registered name."""
    experts_backend: str = "auto"
    """Kernel of the expert matmuls: auto, stream, loop, grouped_mm, bmm, triton, or a registered name.
    auto: stream on CPU; on accelerators bmm for equal counts, else grouped_mm if it is one launch, else triton."""
    dispatcher: str = "local"
    """How rows reach their experts: local, or a registered name."""

    equal_split: Literal["off", "adaptive", "forced"] = "off"
    """Across ranks: pad what each pair exchanges to the same size, never, where it costs little, or always."""
    equal_split_threshold: float = 0.10
    """Adaptive equal split: how many rows of padding a row may cost."""
    check_exchange: bool = False
    """Across ranks: check that each row that was sent arrives, unchanged and in its place."""

    def problems(self) -> list[str]:
        """Everything that is wrong with this config, one sentence each; empty when it is sound."""
        found: list[str] = []

        def require(ok: bool, message: str) -> None:
            if not ok:
                found.append(message)

        for name in ("dim", "hidden_dim", "num_experts", "top_k", "num_groups"):
            require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        require(self.num_shared_experts >= 0, f"num_shared_experts must not be negative, got {self.num_shared_experts}")
        for name in ("bias_update_rate", "aux_loss_weight", "z_loss_weight", "equal_split_threshold"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            require(value in choices, f"{name} must be one of {', '.join(choices)}, got {value!r}")
        found += unknown("router", self.router, ROUTERS)
        found += unknown("experts", self.experts, EXPERTS)
        found += unknown("experts_backend", self.experts_backend, ["auto", *KERNELS])
        found += unknown("dispatcher", self.dispatcher, DISPATCHERS)
        if found:
            return found

        require(
            self.top_k <= self.num_experts,
            f"top_k {self.top_k} is larger than num_experts {self.num_experts}: a token visits an expert once at most",
        )
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
    def shared_hidden_dim(self) -> int:
        return self.num_shared_experts * self.hidden_dim

    def num_params(self) -> int:
        return self._shared_and_gate_params() + self.num_experts * self._params_per_expert()

    def num_active_params(self) -> int:
        """Parameters that one token meets."""
        return self._shared_and_gate_params() + self.top_k * self._params_per_expert()

    def _params_per_expert(self) -> int:
        return params_per_expert(LAYOUTS[self.experts], hidden=self.hidden_dim, width=self.dim)

    def _shared_and_gate_params(self) -> int:
        gate = self.num_experts * (self.dim + self.gate_bias)
        return gate + 3 * self.dim * self.shared_hidden_dim + self.shared_gate * self.dim
