"""A complete training job: from its config to its run folder."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from spurline import config_io
from spurline.config import RunConfig
from spurline.models.common.init import initialize_parameters
from spurline.moe.dispatch.capacity import restore_capacity_factors
from spurline.parallel.compile_cache import remove_broken_libraries
from spurline.parallel.fsdp import has_separate_expert_units
from spurline.parallel.precision import converted_layers
from spurline.parallel.world import joined_world
from spurline.remote import ends_with_process
from spurline.train.allocator import keep_freed_memory
from spurline.train.base_model import check_base, load_base
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.checkpoint.ranks import Ranks
from spurline.train.checkpoint.signature import read_key
from spurline.train.crash_loop import CrashLoop, StepBack
from spurline.train.environment import environment
from spurline.train.exit_codes import ExitCode, exit_code_of_signal
from spurline.train.fingerprint import check_fingerprint
from spurline.train.freezing import num_parameters
from spurline.train.guards import Guard
from spurline.train.initial_weights import load_initial_weights
from spurline.train.loop import TrainingLoop, last_step
from spurline.train.metrics.logger import MetricsLogger
from spurline.train.metrics.writers import open_writers
from spurline.train.position import Position, stored_position
from spurline.train.progress import Progress
from spurline.train.rank_options import options_of_rank
from spurline.train.run_folder import claimed_folder, how_to_resume, own, start_anew, with_folder
from spurline.train.run_state import RunState, note_finished
from spurline.train.sample import append_sample, drop_samples_after, sample_text
from spurline.train.setup import weights_changed
from spurline.train.step_back import SpikeWatch, step_back
from spurline.train.stop_signal import StopSignal
from spurline.train.trainer import Trainer, make_trainer


class Ended(NamedTuple):
    """How a run that did not fail has ended."""

    folder: Path
    exit_code: int = ExitCode.FINISHED


def train(module: str, config_name: str, config: RunConfig[Any]) -> Ended:
    """Run the complete job, which fills its folder: config.json, metrics.jsonl and, if enabled, checkpoints."""
    keeps_memory = config.training.keep_freed_memory and keep_freed_memory()
    guard = Guard(config.comm.watchdog_seconds)
    with (
        joined_world(
            config.parallelism,
            config.training.device,
            config.comm.timeout_seconds,
            lambda: options_of_rank(module, config_name, config),
            guard.watching,
        ) as world,
        Progress(
            config.training.steps, enabled=world.is_first, show_expert_load=config.metrics.live_expert_load
        ) as progress,
        claimed_folder(config, progress.log, lambda: guard.watchdog.mark(0, "start")) as claim,
        guard.protecting(claim, progress),
        ExitStack() as signals,
    ):
        folder, config = claim.folder, with_folder(config, claim.folder)
        if config.compile.enable and config.compile.backend == "inductor":
            for path in remove_broken_libraries():
                progress.log(f"removed {path} from the compile cache: a killed process had left it incomplete")
        trainer = make_trainer(config, world, draw_weights=False)
        saving = "saving a checkpoint" if config.checkpoint.enable else "ending, without a checkpoint,"
        answer = f"{saving} after this step; again ends at once" if world.is_first else ""
        stop_signal = signals.enter_context(StopSignal(answer))
        elsewhere = config.checkpoint.folder if config.checkpoint.enable else ""
        guard.own_folder(trainer, lambda: own(folder, config, claim.is_restart), elsewhere)
        checkpoints = open_checkpoints(folder, config, progress.log)
        if config.checkpoint.enable:
            checkpoints.refuse_unless_writable()
            if ends_with_process(elsewhere):
                progress.log(f"warning: checkpoints in {elsewhere} are lost when this process ends")
        if config.lora.rank:
            trainer.base = load_base(trainer.model, config)
        start, crashes = None, None
        if config.checkpoint.enable:
            run = {**trainer.fingerprint(), "training.on_bad_step": config.training.on_bad_step}
            crashes = CrashLoop(folder, run, config.job.max_same_failures)
            start = resume(trainer, checkpoints, progress.log, Ranks().first(crashes.step_back))
        lines = first_weights(trainer, start)
        if start is None:
            start = Position()
            Ranks().first(lambda: start_anew(folder))
        weights_changed(trainer.model)
        for line in [*describe(config_name, trainer, start, keeps_memory), *lines]:
            progress.log(line)
        if start.step >= last_step(config):
            progress.log(f"all {start.step} steps have been taken: a larger --training.steps takes more")
            note_finished(folder, world.is_first)
            return Ended(folder)
        if world.is_first:
            config_io.save(folder / "config.json", module, config_name, config, environment(world))
        state = signals.enter_context(RunState(folder, world.is_first))
        spikes = SpikeWatch(trainer, progress.log)
        loop = take_steps(trainer, checkpoints, progress, start, crashes, spikes, stop_signal, guard)
        while loop.spike_began:
            checkpoints = open_checkpoints(folder, config, progress.log)
            start = step_back(trainer, checkpoints, loop.spike_began, loop.position, progress.log)
            spikes.forget()
            loop = take_steps(trainer, checkpoints, progress, start, crashes, spikes, stop_signal, guard)
        if loop.is_finished and config.metrics.sample_tokens:
            guard.watchdog.mark(config.training.steps, "sample")
            write_sample(trainer, folder, loop.position.step, progress)
        guard.watchdog.mark(loop.position.step, "end")
        world.wait_for_all()  # a rank that is lost before its end is not that of a finished run
        state.state = "finished" if loop.is_finished else "stopped"
        progress.log(f"run folder: {folder}")
    if loop.is_finished:
        return Ended(folder)
    return Ended(folder, exit_code_of_signal(loop.stopped_by, config.checkpoint.enable))


def take_steps(
    trainer: Trainer,
    checkpoints: CheckpointManager,
    progress: Progress,
    start: Position,
    crashes: CrashLoop | None,
    spikes: SpikeWatch,
    stop_signal: StopSignal,
    guard: Guard,
) -> TrainingLoop:
    """Take the remaining steps and write their metrics, until the last one, a signal, or a loss spike."""
    config, is_first, folder = trainer.config, trainer.world.is_first, Path(trainer.config.job.dump_folder)
    trainer.resume_at(start)
    if is_first:
        drop_samples_after(folder, start.step)
    trainer.bad_steps.folder, trainer.bad_steps.say = folder, progress.log
    with (
        open_writers(
            config.job.dump_folder, config.metrics, asdict(config), start.step or None, is_first, progress.log
        ) as writers,
        closing(checkpoints),
    ):
        logger = MetricsLogger(trainer, writers, progress)
        sample = partial(write_sample, trainer, folder, progress=progress)
        loop = TrainingLoop(trainer, logger, checkpoints, stop_signal, start, spikes, guard.watchdog.mark, sample)
        if crashes and is_first:
            crashes.start(start.step)
        recorded = crashes.recorded(Ranks().rank, lambda: loop.position.step + 1) if crashes else nullcontext()
        with guard.reporting(), recorded:  # before waiting for a checkpoint in the background
            loop.run()
        if not loop.is_finished and not loop.spike_began:
            can_resume = config.checkpoint.enable
            hint = how_to_resume(config) if can_resume else "checkpoints are off, so it can't be resumed"
            name = signal.Signals(loop.stopped_by).name
            progress.log(f"stopped after step {loop.position.step} ({name} received); {hint}")
    return loop


def write_sample(trainer: Trainer, folder: Path, step: int, progress: Progress) -> None:
    """Show a sample of the model's text after `step`, and keep it for the report. All ranks compute it."""
    started = time.perf_counter()
    text = sample_text(trainer)
    progress.log(f"\nsample of step {step} ({time.perf_counter() - started:.1f} s):\n{text}\n")
    if trainer.world.is_first:
        try:
            append_sample(folder, step, text)
        except OSError as error:
            progress.log(f"warning: the sample was not written: {error.strerror or error}")


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
        elsewhere=section.folder,
    )


def resume(
    trainer: Trainer,
    checkpoints: CheckpointManager,
    say: Callable[[str], None] = lambda line: None,
    step_back: StepBack = StepBack(),  # noqa: B008 (immutable)
) -> Position | None:
    """Load the newest intact checkpoint, if there is one; returns how far the run had come.

    A checkpoint of a run with other options or data is refused, unless they may differ.
    """
    config, run = trainer.config, trainer.fingerprint()

    def check(step: int, extra: dict[str, Any]) -> None:
        check_fingerprint(extra.get("run"), run, step, config.job.allow_changes, say)

    loaded = checkpoints.load_newest(trainer.model, trainer.optimizer, check, step_back.num_checkpoints)
    if loaded is None:
        return None
    step, extra = loaded
    if trainer.base:
        check_base(extra, trainer.base, f"{checkpoints.folder}, step {step}")
    if step_back.reason:
        say(f"{step_back.reason}: stepping back to the checkpoint of step {step}")
    checkpoints.restore_random(step, config.training.seed)
    restore_capacity_factors(trainer.model, extra.get("capacity_factors"))
    tokens_per_sequence = config.training.seq_len if config.data.kind == "text" else None
    return stored_position(step, extra, trainer.global_batch_size, tokens_per_sequence)


def first_weights(trainer: Trainer, resumed: Position | None) -> list[str]:
    """Load or initialize the weights of a run that does not resume; returns lines about them."""
    path = trainer.config.checkpoint.initial_load_path
    if resumed is not None:
        return [f"checkpoint.initial_load_path {path} is ignored: the run has weights of its own"] if path else []
    if path:
        return load_initial_weights(trainer)
    initialize_parameters(trainer.model, trainer.config.training.seed, only_adapters=bool(trainer.config.lora.rank))
    return []


def describe(config_name: str, trainer: Trainer, start: Position, keeps_memory: bool) -> list[str]:
    """A few lines about what is about to run."""
    model, training, data = trainer.config.model, trainer.config.training, trainer.data
    total, active = model.num_params() / 1e6, model.num_active_params() / 1e6
    tokens, threads = trainer.global_batch_size * training.seq_len, torch.get_num_threads()
    memory = ", freed memory is kept" if keeps_memory else ""
    lines = [
        f"{config_name}: {total:.2f}M parameters, {active:.2f}M active, {training.dtype} on {trainer.device}",
        f"data: {data.num_tokens:,} tokens in {data.num_documents:,} documents",
        *data.notes,
        f"{training.steps} steps of {tokens} tokens on {trainer.world}, threads per rank: {threads}{memory}",
    ]
    if trainer.config.compile.enable and has_separate_expert_units(trainer.model):
        lines.append("experts are separate FSDP units, so blocks with experts compile into several graphs")
    trained, total = num_parameters(trainer.model)
    if trained < total:
        lines.append(f"trained: {trained / 1e6:.2f}M parameters ({trained / total:.1%}); the rest is frozen")
    if converted := converted_layers(trainer.model):
        how = "by torchao" if trainer.device.type != "cpu" and not trainer.config.precision.emulate else "emulated"
        names = ", ".join(f"{name} ({number})" if "*" in name else name for name, number in converted.items())
        lines.append(f"{trainer.config.precision.recipe} matmuls, {how}, in {sum(converted.values())} layers: {names}")
    if start.step:
        lines.append(f"resuming from the checkpoint of step {start.step}")
    return lines
