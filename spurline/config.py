"""The configuration of a run: small sections, each of which checks itself. Free of torch.

The comments below each field are what `spurline train --help` shows.
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
    """What a model has that ranks can share."""

    num_heads: int
    """Attention heads."""
    num_kv_heads: int | None = None
    """Heads of keys and values, where the query heads share them in groups."""
    num_experts: int = 0
    """Experts of an MoE layer (0: the model has none)."""
    expert_hidden_dim: int = 0
    """Hidden width of one expert."""
    split_widths: tuple[tuple[str, int], ...] = ()
    """What else tensor parallelism splits, with the name of its option."""


class ModelConfig(Protocol):
    """What a model family's config offers to the trainer and the tools."""

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
    """Folder the run is written to; empty means outputs/<config>."""

    def problems(self) -> list[str]:
        return []


@dataclass(frozen=True)
class Training:
    steps: int = 100
    """Optimizer steps."""
    seq_len: int = 256
    """Tokens a sequence."""
    local_batch_size: int = 8
    """Sequences in one forward pass on one rank."""
    global_batch_size: int = -1
    """Sequences a step over all ranks; it fixes the data whatever their number (-1: local_batch_size on each rank)."""
    seed: int = 0
    """Seed of the initial weights, the data order and the sampling."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and matrix products; the parameters and the optimizer stay in float32."""
    max_grad_norm: float = 1.0
    """Clip the gradient to this norm (0 = off)."""
    threads: int = 0
    """CPU threads a rank (0: torch's choice). Recorded, as it changes the last bits of a sum."""
    keep_freed_memory: bool = True
    """Have the C library keep what a step frees for the next one (Linux): faster, with a little more memory."""

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
    """AdamW: how long the mean of the gradient remembers."""
    beta2: float = 0.95
    """AdamW: how long the mean of its square remembers."""
    eps: float = 1e-8
    """AdamW: added to the root of the mean square, which divides the mean."""
    weight_decay: float = 0.1
    """Decoupled weight decay, applied to matrices only."""
    momentum: float = 0.95
    """Muon: how long the mean of the gradient remembers."""
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
    """The learning rate warms up, stays, and decays."""

    warmup_steps: int = 10
    """Steps of the linear warm-up."""
    decay_ratio: float = 0.5
    """Share of the steps, at the end, over which the rate decays."""
    decay_type: Literal["linear", "cosine", "sqrt"] = "linear"
    """Shape of the decay."""
    min_lr_factor: float = 0.0
    """The last rate, as a share of the peak."""

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
    """replicate x shard x tensor = the number of ranks; expert x expert_tensor divides shard x tensor."""

    data_parallel_replicate_degree: int = 1
    """Copies of the model (HSDP)."""
    data_parallel_shard_degree: int = -1
    """Ranks that share one copy's parameters (FSDP2); -1 takes the ranks that are left."""
    tensor_parallel_degree: int = 1
    """Ranks that split each matrix, with the sequence split between them."""
    expert_parallel_degree: int = 1
    """Ranks that split the experts."""
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
    """Compile with torch.compile."""
    components: str = "model,loss"
    """What is compiled: model (each block by itself), loss, or model,loss."""
    backend: str = "inductor"
    """Backend of torch.compile; aot_eager traces the same graphs without generating code."""

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
    """What a block computes again in the backward pass to save memory: nothing, all of it, or all that is cheap."""

    def problems(self) -> list[str]:
        return []


@dataclass(frozen=True)
class Checkpoint:
    enable: bool = False
    """Write checkpoints, and go on from the newest one in the run folder."""
    interval: int = 100
    """Steps between checkpoints; the last step always writes one."""
    keep_latest_k: int = 3
    """How many checkpoints stay (0 = all)."""
    keep_best: bool = False
    """Let the one with the lowest validation loss stay too; each is then validated."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """async: only copy the state, and write it while training goes on."""

    def problems(self) -> list[str]:
        return _at_least(self, interval=1, keep_latest_k=0)


@dataclass(frozen=True)
class Data:
    path: str = ""
    """Prepared data, or text, JSONL or Parquet, in a file or folder; or hf://NAME; several with commas between.
    Empty means the Python standard library's own source."""
    pattern: str = "*"
    """Which files of a folder are read, at any depth (e.g. *.md)."""
    validation_fraction: float = 0.02
    """Share of the tokens that is held out for the validation loss."""
    weights: str = ""
    """How often each path is read, such as 3,1 (empty: as its size is, or as it was prepared)."""
    text_field: str = "text"
    """Where JSONL, Parquet and Hugging Face data sets have their text."""
    tokenizer: str = ""
    """A tokenizer's JSON file or Hugging Face folder; empty means that of prepared data, or else bytes."""
    mask_documents: bool = False
    """Let a token see those of its own document alone, not of others in the same training window."""
    kind: Literal["text", "pictures"] = "text"
    """Text, or pictures: then the path is a JSONL file of {"image": path, "text": ...}, and empty for drawn ones."""
    max_pixels: int = 65_536
    """Pictures with more pixels are scaled down to this many."""

    def problems(self) -> list[str]:
        found: list[str] = []
        if not 0 <= self.validation_fraction < 1:
            found.append(f"validation_fraction must be in [0, 1), got {self.validation_fraction}")
        found += _at_least(self, max_pixels=1024)
        if self.mask_documents and self.kind != "text":
            found.append("mask_documents is for text: each picture has a window of its own")
        if self.weights and not self.shares:
            found.append(f"weights must be positive numbers with commas between, such as 3,1, got {self.weights!r}")
        return found

    @property
    def shares(self) -> list[Fraction]:
        """The weights as exact numbers; none if they aren't given, or wrong."""
        try:
            shares = [Fraction(weight.strip()) for weight in self.weights.split(",")]
        except (ValueError, ZeroDivisionError):
            return []
        return shares if min(shares) > 0 else []


@dataclass(frozen=True)
class Metrics:
    log_interval: int = 1
    """Steps between lines of metrics.jsonl and updates of the progress line."""
    validation_interval: int = 50
    """Steps between validation losses (0 = only at the end)."""
    validation_batches: int = 4
    """Micro-batches in a validation loss (0 = no validation)."""
    sample_tokens: int = 320
    """Tokens of text generated at the end (0 = none)."""
    sample_temperature: float = 0.8
    """How freely the sample is drawn (0: always the likeliest token)."""
    sample_prompt: str = "def "
    """What the sample starts from."""
    report: bool = True
    """Write report.html to the run folder at the end: curves, expert loads, samples, in one page."""
    layer_times: bool = True
    """Tell apart in each step's time what experts and the exchange of rows take (not of compiled models)."""
    tensorboard: bool = True
    """Write event files for TensorBoard too, where it is installed."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Send metrics to Weights & Biases; offline keeps them in the run folder for `wandb sync`."""
    wandb_project: str = "spurline"
    """Project that Weights & Biases shows the run in."""

    def problems(self) -> list[str]:
        return _at_least(
            self, log_interval=1, validation_interval=0, validation_batches=0, sample_tokens=0, sample_temperature=0
        )


@dataclass(frozen=True)
class Profile:
    """What a few steps spend their time on: a Chrome trace and a table of operations in <run folder>/profile."""

    enable: bool = False
    """Profile some steps, on the first rank."""
    first_step: int = 5
    """The first of them."""
    steps: int = 3
    """How many."""

    def problems(self) -> list[str]:
        return _at_least(self, first_step=1, steps=1)


@dataclass(frozen=True)
class Debug:
    moe_force_load_balance: bool = False
    """Send token-slot i to expert i % E, whatever the gate says."""
    deterministic: bool = False
    """Refuse operations that may differ from run to run."""
    separate_expert_units: bool = False
    """Shard experts by an FSDP2 call of their own, as PyTorch builds without per-parameter meshes need it."""
    stop_after: int = 0
    """End cleanly after this step, as if interrupted, with the schedule of the full run (0 = off)."""

    def problems(self) -> list[str]:
        return _at_least(self, stop_after=0)


M = TypeVar("M", bound=ModelConfig)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Generic[M]):
    """Everything a run depends on: `config.json` holds just this, and reproduces the run.

    The order is that of the help: the model is the longest, so it comes last.
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
        """Everything that is wrong, each with the option it is about."""
        found: list[str] = []
        for section in dataclasses.fields(self):
            value = getattr(self, section.name)
            names = {f.name for f in dataclasses.fields(value)}
            for problem in _not_finite(value) or value.problems():
                about_an_option = problem.split(" ", 1)[0].split(".")[0] in names
                found.append(f"{section.name}.{problem}" if about_an_option else f"{section.name}: {problem}")
        if self.data.kind == "pictures" and not hasattr(self.model, "vision"):
            found.append("data.kind pictures: this model reads text alone; one that sees is --module qwen3_vl")
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
    """The floats, at any depth, that no comparison below would catch."""
    found: list[str] = []
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        if dataclasses.is_dataclass(value):
            found += [f"{f.name}.{problem}" for problem in _not_finite(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            found.append(f"{f.name} must be a finite number, got {value}")
    return found
