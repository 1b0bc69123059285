"""The sections for the training step, the optimizer and the learning rate schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from spurline.config.checks import at_least, seed_problems
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
    Set it to train on the same batches with any number of ranks."""
    seed: int = 0
    """Random seed for initial weights, data order and sampling."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype of activations and matmuls; parameters and optimizer state stay float32."""
    mixed_precision_param: Literal["auto", "float32", "bfloat16"] = field(default="auto", metadata=ADDED_LATER)
    """dtype in which FSDP2 all-gathers weights (auto: training.dtype); always float32 for norms and router gates."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = field(default="float32", metadata=ADDED_LATER)
    """dtype in which FSDP2 reduces gradients over ranks; bfloat16 halves the traffic but rounds each sum."""
    device: Literal["auto", "cpu", "cuda", "xpu", "mps"] = field(default="auto", metadata=ADDED_LATER)
    """Device of each rank. auto: this machine's accelerator, or the CPU if it has none; cuda includes ROCm."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm to this value (0: no clipping)."""
    on_bad_step: Literal["stop", "skip"] = field(default="stop", metadata=ADDED_LATER)
    """What to do when a step's loss or gradient is not finite: stop the run, or skip the update and continue.
    Either way the step is recorded in bad_steps.jsonl in the run folder, for `spurline replay`."""
    max_bad_steps: int = field(default=5, metadata=ADDED_LATER)
    """With on_bad_step skip: stop after more than this many consecutive bad steps."""
    on_loss_spike: Literal["warn", "step_back"] = field(default="warn", metadata=ADDED_LATER)
    """What to do when the loss jumps and stays high: warn, or go back to the checkpoint before (checkpoint.enable)."""
    loss_spike_patience: int = field(default=3, metadata=ADDED_LATER)
    """With on_loss_spike step_back: go back after this many consecutive logged steps with a loss far above the usual
    (by 6 standard deviations and by 10%)."""
    loss_spike_skip_data: bool = field(default=True, metadata=ADDED_LATER)
    """With on_loss_spike step_back: skip the data read since the checkpoint, instead of training on it again."""
    max_step_backs: int = field(default=3, metadata=ADDED_LATER)
    """With on_loss_spike step_back: go back at most this many times; the next spike stops the run."""
    threads: int = 0
    """Intra-op CPU threads per rank (0: PyTorch's default). Changing it may change the last bits of reductions."""
    freeze: tuple[str, ...] = field(default=(), metadata=ADDED_LATER)
    """Name patterns of parameters to freeze: "embedding.*" "layers.[0-3].*" ...; !PATTERN excludes what it matches."""
    gc_freq: int = field(default=50, metadata=ADDED_LATER)
    """Steps between Python's garbage collections, which all ranks then make at once (0: whenever Python decides)."""
    keep_freed_memory: bool = True
    """Keep freed memory in the process (glibc only): fewer page faults per step, slightly higher memory use."""

    def problems(self) -> list[str]:
        found = at_least(self, steps=1, seq_len=1, local_batch_size=1, max_grad_norm=0, max_bad_steps=0, threads=0)
        found += at_least(self, loss_spike_patience=1, max_step_backs=0, gc_freq=0) + seed_problems(self)
        if self.global_batch_size == 0 or self.global_batch_size < -1:
            found.append(f"global_batch_size must be positive or -1, got {self.global_batch_size}")
        if self.mixed_precision_param == "bfloat16" and self.dtype == "float32":
            found.append("mixed_precision_param bfloat16 would round the weights of a float32 run: set dtype bfloat16")
        return found


@dataclass(frozen=True)
class Optimizer:
    """AdamW; or Muon for the weight matrices of blocks, including experts, and AdamW for the rest."""

    name: Literal["adamw", "muon"] = "adamw"
    """With muon, embedding, output head, router gates, norms and biases still use AdamW."""
    lr: float = 3e-3
    """Peak learning rate, of AdamW and Muon."""
    beta1: float = 0.9
    """AdamW: decay rate of the running mean of gradients."""
    beta2: float = 0.95
    """AdamW: decay rate of the running mean of squared gradients."""
    eps: float = 1e-8
    """AdamW: term added to the denominator for numerical stability."""
    weight_decay: float = 0.1
    """Decoupled weight decay, applied to matrices only."""
    momentum: float = 0.95
    """Muon: decay rate of the running mean of gradients."""
    nesterov: bool = True
    """Muon: Nesterov momentum."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Muon: how the learning rate depends on a matrix's shape, as in torch.optim.Muon; with match_rms_adamw, learning
    rates tuned for AdamW can be reused."""
    ns_steps: int = 5
    """Muon: Newton-Schulz iterations."""
    ns_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Muon: dtype of the Newton-Schulz iterations (auto: bfloat16 on accelerators, float32 on CPUs)."""
    groups: tuple[str, ...] = ()
    """Options by parameter name; the first matching pattern applies: "*.experts.* optimizer=muon lr_factor=0.5" ..."""

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
