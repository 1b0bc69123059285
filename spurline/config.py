"""The configuration of a run, in small sections that validate themselves. Torch-free.

`spurline train --help` shows the docstring below each field.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Generic, Literal, Protocol, TypeVar

from spurline.parameter_rules import ParameterRule, rule_problem


@dataclass(frozen=True)
class ParallelFacts:
    """The sizes of a model that parallelism degrees must divide."""

    num_heads: int
    """Attention heads."""
    num_kv_heads: int | None = None
    """Key/value heads of grouped-query attention; None where every query head has its own."""
    num_experts: int = 0
    """Experts per MoE layer (0: a dense model)."""
    expert_hidden_dim: int = 0
    """Hidden width of one expert."""
    split_widths: tuple[tuple[str, int], ...] = ()
    """Other sizes that tensor parallelism splits, as (option name, size)."""


class ModelConfig(Protocol):
    """The interface of a model family's config, as the trainer and the tools use it."""

    @property
    def vocab_size(self) -> int: ...

    def problems(self) -> list[str]: ...

    def num_params(self) -> int: ...

    def num_active_params(self) -> int: ...

    def flops_per_token(self, seq_len: int) -> int: ...

    def parallel_facts(self) -> ParallelFacts: ...

    def with_forced_balance(self) -> ModelConfig: ...

    def build(self) -> Any: ...


def _at_least(section: Any, **least: float) -> list[str]:
    return [
        f"{name} must be at least {low}, got {getattr(section, name)}"
        for name, low in least.items()
        if getattr(section, name) < low
    ]


@dataclass(frozen=True)
class Job:
    dump_folder: str = ""
    """Folder for everything the run writes (empty: outputs/<config>)."""

    def problems(self) -> list[str]:
        return []


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
    max_grad_norm: float = 1.0
    """Clip the global gradient norm to this value (0: no clipping)."""
    threads: int = 0
    """Intra-op CPU threads per rank (0: PyTorch's default). Reductions may differ in the last bits between values."""
    keep_freed_memory: bool = True
    """Keep freed memory in the process (glibc only): fewer page faults per step, slightly higher memory use."""

    def problems(self) -> list[str]:
        found = _at_least(self, steps=1, seq_len=1, local_batch_size=1, max_grad_norm=0, threads=0)
        if self.global_batch_size == 0 or self.global_batch_size < -1:
            found.append(f"global_batch_size must be positive or -1, got {self.global_batch_size}")
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
        found = _at_least(self, lr=0, eps=0, weight_decay=0, ns_steps=1)
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
        found = _at_least(self, warmup_steps=0)
        found += [
            f"{name} must be between 0 and 1, got {getattr(self, name)}"
            for name in ("decay_ratio", "min_lr_factor")
            if not 0 <= getattr(self, name) <= 1
        ]
        return found


@dataclass(frozen=True)
class Parallelism:
    """replicate x shard x tensor = number of ranks; expert x expert_tensor must divide shard x tensor."""

    data_parallel_replicate_degree: int = 1
    """Replicas of the model (HSDP; 1: none, that is plain FSDP)."""
    data_parallel_shard_degree: int = -1
    """Ranks over which FSDP2 shards each replica's parameters (-1: all remaining ranks)."""
    tensor_parallel_degree: int = 1
    """Ranks that split every dense weight matrix, with sequence parallelism between blocks."""
    expert_parallel_degree: int = 1
    """Ranks over which the experts of each MoE layer are distributed."""
    expert_tensor_parallel_degree: int = 1
    """Ranks that split each expert's hidden width."""

    def problems(self) -> list[str]:
        found = [
            f"{f.name} must be positive, got {getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if f.name != "data_parallel_shard_degree" and getattr(self, f.name) < 1
        ]
        if self.data_parallel_shard_degree == 0 or self.data_parallel_shard_degree < -1:
            found.append(f"data_parallel_shard_degree must be positive or -1, got {self.data_parallel_shard_degree}")
        return found


@dataclass(frozen=True)
class Compile:
    enable: bool = False
    """Use torch.compile."""
    components: str = "model,loss"
    """Comma-separated components to compile: model (each block separately), loss."""
    backend: str = "inductor"
    """torch.compile backend; aot_eager captures the same graphs without code generation, for debugging."""

    @property
    def parts(self) -> set[str]:
        return {part.strip() for part in self.components.split(",") if part.strip()}

    def problems(self) -> list[str]:
        unknown = self.parts - {"model", "loss"}
        if unknown or not self.parts:
            return [f"components must be model, loss or model,loss, got {self.components!r}"]
        return []


@dataclass(frozen=True)
class ActivationCheckpoint:
    mode: Literal["none", "full", "selective"] = "none"
    """What each block recomputes in backward to save memory: nothing, everything, or (selective) cheap ops.
    Selective keeps the outputs of attention, large matmuls, routing and row exchanges."""

    def problems(self) -> list[str]:
        return []


@dataclass(frozen=True)
class Checkpoint:
    enable: bool = False
    """Save checkpoints, and resume from the newest one in the run folder."""
    interval: int = 100
    """Steps between checkpoints; the last step is always saved."""
    keep_latest_k: int = 3
    """Number of newest checkpoints to keep (0: keep all)."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest validation loss; runs a validation before every checkpoint."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """async: training waits only for a copy of the state in memory; a background thread writes it to disk."""

    def problems(self) -> list[str]:
        return _at_least(self, interval=1, keep_latest_k=0)


@dataclass(frozen=True)
class Data:
    path: str = ""
    """Comma-separated sources: files or folders of text, JSONL or Parquet, prepared folders, hf://NAME.
    Empty: the source code of the Python standard library."""
    pattern: str = "*"
    """Glob that selects files within a folder, at any depth (e.g. *.md)."""
    validation_fraction: float = 0.02
    """Fraction of the tokens held out for validation (0: none)."""
    weights: str = ""
    """Comma-separated sampling weight of each source, e.g. 3,1 (empty: in proportion to size).
    The sources within a prepared folder keep the relative weights given to `spurline data prepare`."""
    text_field: str = "text"
    """Name of the text field in JSONL, Parquet and Hugging Face datasets."""
    tokenizer: str = ""
    """A tokenizer.json file or a folder that has one (empty: the tokenizer of the prepared data, else bytes)."""
    mask_documents: bool = False
    """Restrict attention to tokens of the same document within a packed sequence."""
    kind: Literal["text", "pictures"] = "text"
    """Text, or images with captions, from a JSONL file of {"image": path, "text": ...}.
    With an empty data.path: generated images of colored shapes."""
    max_pixels: int = 65_536
    """Downscale images with more pixels than this."""

    def problems(self) -> list[str]:
        found: list[str] = []
        if not 0 <= self.validation_fraction < 1:
            found.append(f"validation_fraction must be in [0, 1), got {self.validation_fraction}")
        found += _at_least(self, max_pixels=1024)
        if self.mask_documents and self.kind != "text":
            found.append("mask_documents is supported for data.kind text only")
        if self.weights and not self.shares:
            found.append(f"weights must be comma-separated positive numbers, such as 3,1, got {self.weights!r}")
        return found

    @property
    def shares(self) -> list[Fraction]:
        """The weights as exact fractions; empty if none are given or they are invalid."""
        try:
            shares = [Fraction(weight.strip()) for weight in self.weights.split(",")]
        except (ValueError, ZeroDivisionError):
            return []
        return shares if min(shares) > 0 else []


@dataclass(frozen=True)
class Metrics:
    log_interval: int = 1
    """Steps between records in metrics.jsonl and updates of the progress line."""
    validation_interval: int = 50
    """Steps between validations (0: only after the last step)."""
    validation_batches: int = 4
    """Micro-batches per rank in each validation (0: no validation)."""
    sample_tokens: int = 320
    """Tokens to generate after the last step, as a sample (0: no sample)."""
    sample_temperature: float = 0.8
    """Softmax temperature of the sample (0: greedy)."""
    sample_prompt: str = "def "
    """Prompt of the sample."""
    report: bool = True
    """Write report.html (curves, expert load, samples) to the run folder after the last step."""
    layer_times: bool = True
    """Report the time of each step spent in experts and in routing, dispatch and combine (eager models only)."""
    tensorboard: bool = True
    """Also write TensorBoard event files, if tensorboard is installed."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Send metrics to Weights & Biases; offline stores them in the run folder for `wandb sync`."""
    wandb_project: str = "spurline"
    """Weights & Biases project."""

    def problems(self) -> list[str]:
        return _at_least(
            self, log_interval=1, validation_interval=0, validation_batches=0, sample_tokens=0, sample_temperature=0
        )


@dataclass(frozen=True)
class Profile:
    """Profile a few steps with torch.profiler: writes a Chrome trace and a table of ops to <run folder>/profile."""

    enable: bool = False
    """Run the profiler, on rank 0."""
    first_step: int = 5
    """First step to profile; skip the first few, which include one-time costs."""
    steps: int = 3
    """Number of steps to profile."""

    def problems(self) -> list[str]:
        return _at_least(self, first_step=1, steps=1)


@dataclass(frozen=True)
class Debug:
    moe_force_load_balance: bool = False
    """Ignore the router's choice and assign experts round-robin: slot i goes to expert i % num_experts."""
    deterministic: bool = False
    """Call torch.use_deterministic_algorithms: ops without a deterministic implementation raise an error."""
    separate_expert_units: bool = False
    """Wrap each layer's experts in their own FSDP2 unit, as on PyTorch builds without per-parameter meshes."""
    stop_after: int = 0
    """Stop after this step but keep the learning rate schedule of all training.steps, to test resuming (0: off)."""

    def problems(self) -> list[str]:
        return _at_least(self, stop_after=0)


M = TypeVar("M", bound=ModelConfig)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Generic[M]):
    """Everything a run depends on. Stored as `config.json`, which reproduces the run.

    Sections are in the order of `--help`; the model comes last because it has the most options.
    """

    job: Job = field(default_factory=Job)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    parallelism: Parallelism = field(default_factory=Parallelism)
    compile: Compile = field(default_factory=Compile)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    data: Data = field(default_factory=Data)
    metrics: Metrics = field(default_factory=Metrics)
    profile: Profile = field(default_factory=Profile)
    debug: Debug = field(default_factory=Debug)
    model: M

    def problems(self) -> list[str]:
        """All validation errors, each prefixed with its option."""
        found: list[str] = []
        for section in dataclasses.fields(self):
            value = getattr(self, section.name)
            names = {f.name for f in dataclasses.fields(value)}
            for problem in _not_finite(value) or value.problems():
                about_an_option = problem.split(" ", 1)[0].split(".")[0] in names
                found.append(f"{section.name}.{problem}" if about_an_option else f"{section.name}: {problem}")
        if self.data.kind == "pictures" and not hasattr(self.model, "vision"):
            found.append("data.kind pictures needs a model with a vision encoder, such as --module qwen3_vl")
        if self.checkpoint.keep_best and not (self.metrics.validation_batches and self.data.validation_fraction):
            found.append(
                "checkpoint.keep_best needs a validation loss: set metrics.validation_batches and"
                " data.validation_fraction above 0"
            )
        local, total = self.training.local_batch_size, self.training.global_batch_size
        if local > 0 and total > 0 and total % local:
            found.append(f"training.global_batch_size {total} is not a multiple of training.local_batch_size {local}")
        return found


def _not_finite(section: Any) -> list[str]:
    """Errors for floats, at any depth, that are NaN or infinite: NaN passes every range check below."""
    found: list[str] = []
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        if dataclasses.is_dataclass(value):
            found += [f"{f.name}.{problem}" for problem in _not_finite(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            found.append(f"{f.name} must be a finite number, got {value}")
    return found
