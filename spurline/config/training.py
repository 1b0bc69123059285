"""The sections of a training step: what it computes, with which optimizer and learning rate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from spurline.config.checks import at_least
from spurline.parameter_rules import ParameterRule, rule_problem
from spurline.typed_json import ADDED_LATER


@dataclass(frozen=True)
class Training:
    steps: int = 100
    """Number of optimizer steps."""
    seq_len: int = 256
    """Sequence length in tokens."""
    local_batch_size: int = 8
    """Micro-batch size: sequences per forward pass per data-parallel rank."""
    global_batch_size: int = -1
    """Sequences per optimizer step over all ranks, by gradient accumulation (-1: one micro-batch per rank).
    Set it to see the same data with any number of ranks."""
    seed: int = 0
    """Random seed for initial weights, data order and sampling."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype of activations and matmuls; parameters and optimizer state stay float32."""
    mixed_precision_param: Literal["auto", "float32", "bfloat16"] = field(default="auto", metadata=ADDED_LATER)
    """dtype in which FSDP2 gathers weights (auto: training.dtype). Norms and router gates are gathered in float32."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = field(default="float32", metadata=ADDED_LATER)
    """dtype in which FSDP2 sums gradients over ranks; bfloat16 halves the traffic and rounds each sum."""
    device: Literal["auto", "cpu", "cuda", "xpu", "mps"] = field(default="auto", metadata=ADDED_LATER)
    """Device of each rank: cuda is for ROCm too; auto takes the accelerator of this machine, else the CPU."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm to this value (0: no clipping)."""
    on_bad_step: Literal["stop", "skip"] = field(default="stop", metadata=ADDED_LATER)
    """What to do about a step whose loss or gradient is not finite: stop the run, or go on without its update.
    Either way it is recorded in bad_steps.jsonl of the run folder, for `spurline replay`."""
    max_bad_steps: int = field(default=5, metadata=ADDED_LATER)
    """With on_bad_step skip: stop after more bad steps in a row than this."""
    on_loss_spike: Literal["warn", "step_back"] = field(default="warn", metadata=ADDED_LATER)
    """What to do when the loss jumps and stays up: warn, or go back to the checkpoint before it (checkpoint.enable)."""
    loss_spike_patience: int = field(default=3, metadata=ADDED_LATER)
    """With on_loss_spike step_back: logged steps in a row whose loss is far above the usual (6 standard deviations)."""
    loss_spike_skip_data: bool = field(default=True, metadata=ADDED_LATER)
    """With on_loss_spike step_back: leave out the data that was read since the checkpoint."""
    max_step_backs: int = field(default=3, metadata=ADDED_LATER)
    """With on_loss_spike step_back: stop at the next spike after this many."""
    threads: int = 0
    """Intra-op CPU threads per rank (0: PyTorch's default). Reductions may differ in the last bits between values."""
    keep_freed_memory: bool = True
    """Keep freed memory in the process (glibc only): fewer page faults per step, slightly higher memory use."""

    def problems(self) -> list[str]:
        found = at_least(self, steps=1, seq_len=1, local_batch_size=1, max_grad_norm=0, max_bad_steps=0, threads=0)
        found += at_least(self, loss_spike_patience=1, max_step_backs=0)
        if self.global_batch_size == 0 or self.global_batch_size < -1:
            found.append(f"global_batch_size must be positive or -1, got {self.global_batch_size}")
        if self.mixed_precision_param == "bfloat16" and self.dtype == "float32":
            found.append("mixed_precision_param bfloat16 would round the weights of a float32 run: set dtype bfloat16")
        return found


@dataclass(frozen=True)
class Optimizer:
    """AdamW, or Muon for the matrices inside blocks (experts too) and AdamW for the rest."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: embedding, output head, router gates, norms and biases stay with AdamW."""
    lr: float = 3e-3
    """Peak learning rate, of both."""
    beta1: float = 0.9
    """AdamW: decay rate of the running mean of gradients."""
    beta2: float = 0.95
    """AdamW: decay rate of the running mean of squared gradients."""
    eps: float = 1e-8
    """AdamW: added to the root of the mean square, which divides the mean."""
    weight_decay: float = 0.1
    """Decoupled weight decay, applied to matrices only."""
    momentum: float = 0.95
    """Muon: decay rate of the running mean of gradients."""
    nesterov: bool = True
    """Muon: Nesterov momentum."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Muon: how a matrix's shape scales its rate, as in torch.optim.Muon; match_rms_adamw suits AdamW's rates."""
    ns_steps: int = 5
    """Muon: Newton-Schulz iterations."""
    ns_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Muon: dtype of these iterations; auto is bfloat16 on accelerators and float32 on CPUs."""
    groups: tuple[str, ...] = ()
    """Options for parameters by name, the first match counts: "*.experts.* optimizer=muon lr_factor=0.5" ..."""

    @property
    def rules(self) -> tuple[ParameterRule, ...]:
        return tuple(map(ParameterRule.parse, self.groups))

    def problems(self) -> list[str]:
        found = at_least(self, lr=0, eps=0, weight_decay=0, ns_steps=1)
        found += [
            f"{name} must be in [0, 1), got {getattr(self, name)}"
            for name in ("beta1", "beta2", "momentum")
            if not 0 <= getattr(self, name) < 1
        ]
        return found + [f"groups {text!r}: {problem}" for text in self.groups if (problem := rule_problem(text))]


@dataclass(frozen=True)
class LRScheduler:
    """Warmup-stable-decay schedule: linear warmup, constant peak, decay."""

    warmup_steps: int = 10
    """Steps of linear warmup (0: start at the peak)."""
    decay_ratio: float = 0.5
    """Fraction of all steps, at the end of the run, over which the learning rate decays (0: no decay)."""
    decay_type: Literal["linear", "cosine", "sqrt"] = "linear"
    """Shape of the decay."""
    min_lr_factor: float = 0.0
    """Final learning rate, as a fraction of the peak."""

    def problems(self) -> list[str]:
        found = at_least(self, warmup_steps=0)
        found += [
            f"{name} must be between 0 and 1, got {getattr(self, name)}"
            for name in ("decay_ratio", "min_lr_factor")
            if not 0 <= getattr(self, name) <= 1
        ]
        return found
