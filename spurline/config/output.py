"""The sections for what a run writes, and for profiling and debugging."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from spurline.config.checks import at_least
from spurline.typed_json import ADDED_LATER


@dataclass(frozen=True)
class Job:
    dump_folder: str = ""
    """Folder for everything this run writes, not shared with other runs; the same command resumes it (empty: a new
    numbered folder in job.runs_folder)."""
    runs_folder: str = field(default="", metadata=ADDED_LATER)
    """Folder of numbered runs: each new run gets the next number, and `latest` links to the last one (empty:
    outputs/<config>)."""
    resume: str = field(default="", metadata=ADDED_LATER)
    """Resume a run from its newest checkpoint: its folder, or `latest`. Without --config, options come from its
    config.json."""
    allow_changes: bool = field(default=False, metadata=ADDED_LATER)
    """Resume even if options or data that affect training differ from the checkpoint's; each difference is listed."""
    overwrite: bool = field(default=False, metadata=ADDED_LATER)
    """Start at step 1 and replace the run in job.dump_folder, including its checkpoints."""
    max_same_failures: int = field(default=4, metadata=ADDED_LATER)
    """Refuse to restart a run with checkpoints after this many consecutive failures at the same step with the same
    error (0: no limit). From the second failure on, it resumes from an older checkpoint."""

    def problems(self) -> list[str]:
        found = at_least(self, max_same_failures=0)
        if self.overwrite and self.resume:
            found.append("overwrite and resume exclude each other")
        return found


@dataclass(frozen=True)
class Checkpoint:
    enable: bool = True
    """Save checkpoints, and resume from the newest one in the run folder."""
    interval: int = 100
    """Steps between checkpoints; the last step is always saved."""
    interval_minutes: float = field(default=30.0, metadata=ADDED_LATER)
    """Also save a checkpoint when this many minutes have passed since the last one (0: only every interval steps)."""
    keep_latest_k: int = 3
    """Number of newest checkpoints to keep (0: keep all)."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest validation loss; runs a validation before every checkpoint."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """async: training waits only for a copy of the state in memory; a background thread writes it to disk."""
    sign_key_file: str = field(default="", metadata=ADDED_LATER)
    """File with a secret key to sign checkpoints (HMAC-SHA256); unsigned checkpoints are not loaded (empty: off)."""

    folder: str = field(default="", metadata=ADDED_LATER)
    """Folder for this run's checkpoints, not shared with other runs; may be remote, such as s3://bucket/run (needs
    fsspec and s3fs or similar). The same command resumes from there (empty: <run folder>/checkpoints)."""

    initial_load_path: str = field(default="", metadata=ADDED_LATER)
    """Start from the weights of a Hugging Face folder, a run or a checkpoint, with a fresh optimizer at step 0.
    Without --module and --config, the model config comes from there too. Ignored when the run resumes."""

    def problems(self) -> list[str]:
        return at_least(self, interval=1, interval_minutes=0, keep_latest_k=0)


@dataclass(frozen=True)
class Metrics:
    log_interval: int = 1
    """Steps between records in metrics.jsonl and updates of the progress line; a step that is saved has one too."""
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
    sample_interval: int = field(default=0, metadata=ADDED_LATER)
    """Steps between samples during training; the report shows all of them (0: only after the last step)."""
    live_expert_load: bool = field(default=True, metadata=ADDED_LATER)
    """In a terminal of at least 100 columns, show the expert load below the progress line."""
    report: bool = True
    """Write report.html (curves, expert load, samples) to the run folder after the last step."""
    layer_times: bool = True
    """Report the time that each step spends in experts and in routing, dispatch and combine (eager models only)."""
    tensorboard: bool = True
    """Also write TensorBoard event files, if tensorboard is installed."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Send metrics to Weights & Biases; offline stores them in the run folder for `wandb sync`."""
    wandb_project: str = "spurline"
    """Weights & Biases project."""

    def problems(self) -> list[str]:
        return at_least(
            self,
            log_interval=1,
            validation_interval=0,
            validation_batches=0,
            sample_tokens=0,
            sample_temperature=0,
            sample_interval=0,
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
        return at_least(self, first_step=1, steps=1)


@dataclass(frozen=True)
class Debug:
    moe_force_load_balance: bool = False
    """Ignore the router's choice and assign experts round-robin: slot i goes to expert i % num_experts."""
    deterministic: bool = False
    """Call torch.use_deterministic_algorithms: ops without a deterministic implementation raise an error."""
    separate_expert_units: bool = False
    """Wrap each layer's experts in their own FSDP2 unit, as on PyTorch builds without per-parameter meshes."""
    record_routing: str = field(default="", metadata=ADDED_LATER)
    """Folder in which to record the experts of each token in each step (empty: off)."""
    record_routing_weights: bool = field(default=False, metadata=ADDED_LATER)
    """With record_routing, record the routing weights too."""
    replay_routing: str = field(default="", metadata=ADDED_LATER)
    """Folder of a recording: route tokens to the recorded experts, with this run's routing weights (empty: off)."""
    stop_after: int = 0
    """Stop after this step but keep the learning rate schedule of training.steps, to test resuming (0: off)."""
    check_replicas_interval: int = field(default=100, metadata=ADDED_LATER)
    """Steps between checks that replicated tensors are equal on all ranks; also before each checkpoint (0: never)."""

    def problems(self) -> list[str]:
        found = at_least(self, stop_after=0, check_replicas_interval=0)
        if self.record_routing and self.record_routing == self.replay_routing:
            found.append("record_routing and replay_routing must be different folders")
        if self.record_routing_weights and not self.record_routing:
            found.append("record_routing_weights needs record_routing")
        return found
