"""The sections of what a run writes, and of how it is examined."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from spurline.config.checks import at_least
from spurline.typed_json import ADDED_LATER


@dataclass(frozen=True)
class Job:
    dump_folder: str = ""
    """Folder for everything the run writes (empty: outputs/<config>)."""

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
    sign_key_file: str = field(default="", metadata=ADDED_LATER)
    """File with a secret key: checkpoints are signed with it (HMAC-SHA256), and only those are loaded (empty: off)."""

    def problems(self) -> list[str]:
        return at_least(self, interval=1, keep_latest_k=0)


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
        return at_least(
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
    """Folder to record which experts each token of each step visits (empty: off)."""
    record_routing_weights: bool = field(default=False, metadata=ADDED_LATER)
    """Record the routing weights too."""
    replay_routing: str = field(default="", metadata=ADDED_LATER)
    """Folder of a recording: tokens visit the experts they visited then, with weights of this run's scores."""
    stop_after: int = 0
    """Stop after this step but keep the learning rate schedule of all training.steps, to test resuming (0: off)."""

    def problems(self) -> list[str]:
        found = at_least(self, stop_after=0)
        if self.record_routing and self.record_routing == self.replay_routing:
            found.append("record_routing and replay_routing must be different folders")
        if self.record_routing_weights and not self.record_routing:
            found.append("record_routing_weights needs record_routing")
        return found
