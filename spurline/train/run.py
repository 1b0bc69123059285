"""A whole training job: from its config to its run folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from spurline import config_io
from spurline.config import RunConfig
from spurline.models.common.init import initialize_parameters
from spurline.parallel.compile_cache import remove_broken_libraries
from spurline.parallel.fsdp import has_separate_expert_units
from spurline.parallel.world import joined_world
from spurline.train.allocator import keep_freed_memory
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.checkpoint.signature import read_key
from spurline.train.loop import Position, TrainingLoop
from spurline.train.metrics.logger import MetricsLogger
from spurline.train.metrics.writers import open_writers
from spurline.train.progress import Progress
from spurline.train.sample import append_sample, sample_text
from spurline.train.setup import weights_changed
from spurline.train.stop_signal import StopSignal
from spurline.train.trainer import Trainer, make_trainer


def train(module: str, config_name: str, config: RunConfig[Any]) -> Path:
    """Run the whole job and return its folder: config.json, metrics.jsonl and, if asked for, checkpoints."""
    folder = Path(config.job.dump_folder)
    keeps_memory = config.training.keep_freed_memory and keep_freed_memory()
    with (
        joined_world(config.parallelism, config.training.device, config.comm.timeout_seconds) as world,
        Progress(config.training.steps, enabled=world.is_first) as progress,
    ):
        if config.compile.enable and config.compile.backend == "inductor":
            for path in remove_broken_libraries():
                progress.log(f"removed {path} from the compile cache: a killed process had left it incomplete")
        trainer = make_trainer(config, world, draw_weights=False)
        if world.is_first:
            make_folder(folder)
        world.wait_for_all()
        checkpoints = open_checkpoints(folder, config, progress.log)
        start = resume(trainer, checkpoints) if config.checkpoint.enable else None
        if start is None:
            initialize_parameters(trainer.model, config.training.seed)
            start = Position()
        weights_changed(trainer.model)
        for line in describe(config_name, trainer, start, keeps_memory):
            progress.log(line)
        if world.is_first:
            config_io.save(folder / "config.json", module, config_name, config)
        if take_steps(trainer, checkpoints, progress, start) and config.metrics.sample_tokens:
            write_sample(trainer, folder, progress)
        progress.log(f"run folder: {folder}")
    return folder


def take_steps(trainer: Trainer, checkpoints: CheckpointManager, progress: Progress, start: Position) -> bool:
    """Take the steps that are left and write their metrics; returns False if SIGTERM came before the last one."""
    config, is_first = trainer.config, trainer.world.is_first
    trainer.tally.tokens_seen = start.tokens_seen
    with (
        open_writers(
            config.job.dump_folder, config.metrics, asdict(config), start.step or None, is_first, progress.log
        ) as writers,
        closing(checkpoints),
        StopSignal() as stop_signal,
    ):
        loop = TrainingLoop(trainer, MetricsLogger(trainer, writers, progress), checkpoints, stop_signal, start)
        finished = loop.run()
        if not finished:
            can_resume = config.checkpoint.enable
            hint = "run the same command to resume" if can_resume else "checkpoints are off, so it can't be resumed"
            progress.log(f"stopped after step {loop.position.step} (SIGTERM received); {hint}")
    return finished


def write_sample(trainer: Trainer, folder: Path, progress: Progress) -> None:
    """Show a sample of the model's text, and keep it for the report. All ranks compute it."""
    started = time.perf_counter()
    text = sample_text(trainer)
    progress.log(f"\nsample ({time.perf_counter() - started:.1f} s):\n{text}\n")
    if trainer.world.is_first:
        try:
            append_sample(folder, trainer.config.training.steps, text)
        except OSError as error:
            progress.log(f"warning: the sample was not written: {error.strerror or error}")


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"job.dump_folder {folder}: can't make this folder: {error.strerror}") from None


def open_checkpoints(folder: Path, config: RunConfig[Any], say: Callable[[str], None]) -> CheckpointManager:
    section = config.checkpoint
    return CheckpointManager(
        folder,
        section.interval,
        section.keep_latest_k,
        section.keep_best,
        in_background=section.async_mode == "async",
        model_config=asdict(config.model),
        say=say,
        sign_key=read_key(section.sign_key_file),
    )


def resume(trainer: Trainer, checkpoints: CheckpointManager) -> Position | None:
    """Load the newest checkpoint that is complete, if there is one; returns how far the run had come."""
    loaded = checkpoints.load_newest(trainer.model, trainer.optimizer)
    if loaded is None:
        return None
    step, extra = loaded
    checkpoints.restore_random(step, trainer.config.training.seed)
    tokens_seen = extra.get("tokens_seen")
    if type(tokens_seen) is not int:
        raise ValueError(f"the checkpoint of step {step} does not say how many tokens the run has seen")
    return Position(step, tokens_seen)


def describe(config_name: str, trainer: Trainer, start: Position, keeps_memory: bool) -> list[str]:
    """A few lines about what is about to run."""
    model, training, data = trainer.config.model, trainer.config.training, trainer.data
    total, active = model.num_params() / 1e6, model.num_active_params() / 1e6
    tokens, threads = trainer.global_batch_size * training.seq_len, torch.get_num_threads()
    memory = ", freed memory is kept" if keeps_memory else ""
    lines = [
        f"{config_name}: {total:.2f}M parameters, {active:.2f}M active, {training.dtype} on {trainer.device}",
        f"data: {data.num_tokens:,} tokens in {data.num_documents:,} documents",
        f"{training.steps} steps of {tokens} tokens on {trainer.world}, threads per rank: {threads}{memory}",
    ]
    if trainer.config.compile.enable and has_separate_expert_units(trainer.model):
        lines.append("experts are separate FSDP units, so blocks with experts compile into several graphs")
    if start.step:
        lines.append(f"resuming from the checkpoint of step {start.step}")
    return lines
