"""Train a model: the loop, from the first batch to the last sample.

B sequences of L tokens in a micro-batch; G sequences in a step.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spurline import config_io
from spurline.config import RunConfig
from spurline.data import DataSets, open_data
from spurline.data.batch import IGNORE_INDEX, Batch
from spurline.device import peak_memory_bytes
from spurline.models.common.generate import generate, printable
from spurline.models.common.init import initialize
from spurline.models.common.sampling import Sampling
from spurline.moe.balance import set_token_weight, take_balance_loss, update_expert_bias
from spurline.parallel.compile import compile_function
from spurline.parallel.fsdp import has_separate_expert_units
from spurline.parallel.model import parallelize_model
from spurline.parallel.world import World, joined_world
from spurline.train.allocator import keep_freed_memory
from spurline.train.captions import write_captions
from spurline.train.checkpoint.manager import Checkpoints
from spurline.train.loss import count_real_tokens, make_loss_sum
from spurline.train.metrics.step_metrics import StepMetrics
from spurline.train.metrics.timing import StepTimer, watch_layers
from spurline.train.metrics.writers import AllWriters, Throughput, open_writers
from spurline.train.optimizer.build import build_optimizer
from spurline.train.optimizer.clip import clip_gradients
from spurline.train.optimizer.schedule import learning_rate, set_learning_rate
from spurline.train.profiling import StepProfiler
from spurline.train.progress import Progress
from spurline.train.stop_signal import StopSignal


@dataclass
class Trainer:
    """What a step needs, made once."""

    config: RunConfig[Any]
    world: World
    data: DataSets
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_sum: Callable[[Tensor, Tensor], Tensor]
    timer: StepTimer = field(default_factory=StepTimer)

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def global_batch_size(self) -> int:
        training = self.config.training
        if training.global_batch_size > 0:
            return training.global_batch_size
        return training.local_batch_size * self.world.data_size

    def step(self, step: int) -> dict[str, Any]:
        """Take optimizer step number `step`, counted from 1; returns what there is to know about it."""
        config = self.config
        lr = learning_rate(step, config.training.steps, config.optimizer.lr, config.lr_scheduler)
        set_learning_rate(self.optimizer, lr)

        with self.timer.phase("data"):
            micro_batches = self.micro_batches(step)
        num_tokens = self.count_tokens(batch.labels_BL for batch in micro_batches)
        # Every token of the step weighs the same, in the language loss as in the balance losses.
        set_token_weight(self.model, 1 / num_tokens)
        total_loss = torch.zeros((), device=self.device)
        for batch in micro_batches:
            with self.timer.phase("forward"):
                loss = self.loss_of(batch) / num_tokens
            with self.timer.phase("backward"):
                loss.backward()
            total_loss += loss.detach()

        total_loss = self.world.sum_over_data(total_loss)
        with self.timer.phase("optimizer"):
            grad_norm = clip_gradients(self.model.parameters(), config.training.max_grad_norm, self.world.group)
            if not torch.isfinite(total_loss + grad_norm):
                what = f"the loss is {total_loss.item()} and the gradient norm {grad_norm.item()}"
                raise diverged(config, step, what)
            self.optimizer.step()
            self.optimizer.zero_grad()
            count_by_layer = update_expert_bias(self.model, self.world.group)
        balance_loss = take_balance_loss(self.model)
        return {
            "step": step,
            "loss": total_loss.item(),
            "balance_loss": None if balance_loss is None else self.world.sum_over_all(balance_loss).item(),
            "grad_norm": grad_norm.item(),
            "lr": lr,
            "num_tokens": num_tokens,
            "expert_load": {name: count_E.tolist() for name, count_E in count_by_layer.items()},
        }

    def loss_of(self, batch: Batch) -> Tensor:
        """The loss of a micro-batch, summed over its real tokens."""
        return self.model(batch.tokens_BL, labels_BL=batch.labels_BL, loss_sum=self.loss_sum, **batch.extras)

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's sequences of the step."""
        size, world = self.config.training.local_batch_size, self.world
        first = (step - 1) * self.global_batch_size + world.data_rank * size
        every = size * world.data_size
        starts = [first + done for done in range(0, self.global_batch_size, every)]
        return [self.data.train.batch(start, size).to(self.device) for start in starts]

    def count_tokens(self, labels: Iterable[Tensor]) -> int:
        """The real tokens of all ranks."""
        own = sum(count_real_tokens(labels_BL) for labels_BL in labels)
        return int(self.world.sum_over_data(torch.tensor(own, device=self.device)))

    @torch.no_grad()
    def validation_loss(self) -> float | None:
        """The mean loss per held-out token, or None if nothing is held out."""
        metrics = self.config.metrics
        if self.data.validation is None or not metrics.validation_batches:
            return None
        self.model.eval()
        world = self.world
        total, num_tokens = torch.zeros((), device=self.device), 0
        size = self.config.training.local_batch_size * world.data_size
        for whole in self.data.validation.batches(size, metrics.validation_batches):
            batch = share(whole, world.data_rank, world.data_size).to(self.device)
            total += self.loss_of(batch)
            num_tokens += self.count_tokens([batch.labels_BL])
        self.model.train()
        return self.world.sum_over_data(total).item() / num_tokens

    def sample(self) -> str:
        """Text that the model writes after metrics.sample_prompt, and about held-out pictures if there are any."""
        config = self.config
        tokenizer = self.data.tokenizer
        prompt = [tokenizer.boundary_id, *tokenizer.encode(config.metrics.sample_prompt).tolist()]
        # Token by token the length grows: compiling for that takes longer than it saves.
        with torch.compiler.set_stance("force_eager"):
            # No token ends it: then all ranks take the same number of steps, should one of them round otherwise.
            (written,) = generate(
                self.model,
                [prompt],
                config.metrics.sample_tokens,
                sampling=Sampling(config.metrics.sample_temperature),
                seed=config.training.seed,
                max_context=config.training.seq_len,
            )
            captions = list(write_captions(self.model, self.data, self.device))
        told = [f"a picture of {caption.true!r}: {caption.written!r}" for caption in captions]
        return "\n".join([printable(tokenizer.decode(prompt + written)), *told])


def share(batch: Batch, rank: int, size: int) -> Batch:
    """One of `size` equal parts of a batch; where it can't be cut evenly, sequences without labels fill up the last."""
    B = batch.tokens_BL.shape[0]
    per_rank = -(-B // size)
    rows = torch.arange(rank * per_rank, (rank + 1) * per_rank)
    part = batch.take(rows.clamp(max=B - 1).tolist())
    return replace(part, labels_BL=torch.where((rows < B).unsqueeze(1), part.labels_BL, IGNORE_INDEX))


def make_trainer(config: RunConfig[Any], world: World | None = None, data: DataSets | None = None) -> Trainer:
    """Build the model with its seeded weights, and everything else a step needs: by default alone, on config.data."""
    world = world or World.alone()
    training, compile_ = config.training, config.compile
    if training.threads:
        torch.set_num_threads(training.threads)
    torch.use_deterministic_algorithms(config.debug.deterministic)
    torch.manual_seed(training.seed)

    data = data or open_data_for_model(config)
    with torch.device("meta"):
        model = config.model.build()
    per_param_mesh = False if config.debug.separate_expert_units else None
    parallelize_model(model, world.meshes, config.activation_checkpoint.mode, compile_, per_param_mesh)
    model.to_empty(device=world.device)
    initialize(model, training.seed)
    model.compute_dtype = getattr(torch, training.dtype)
    loss_sum = make_loss_sum(model.tp)
    if compile_.enable and "loss" in compile_.parts:
        loss_sum = compile_function(loss_sum, compile_.backend)
    timer = StepTimer(world.device)
    if config.metrics.layer_times and not (compile_.enable and "model" in compile_.parts):
        watch_layers(model, timer)
    return Trainer(config, world, data, model, build_optimizer(model, config.optimizer), loss_sum, timer)


def open_data_for_model(config: RunConfig[Any]) -> DataSets:
    data = open_data(config.data, config.training.seq_len, config.training.seed)
    if data.tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"the tokenizer has {data.tokenizer.vocab_size} tokens, more than --model.vocab_size"
            f" {config.model.vocab_size}: raise that to at least {data.tokenizer.vocab_size}"
        )
    return data


def train(module: str, config_name: str, config: RunConfig[Any]) -> Path:
    """Run the whole job and return its folder: config.json, metrics.jsonl and, if asked for, checkpoints."""
    folder = Path(config.job.dump_folder)
    keeps_memory = config.training.keep_freed_memory and keep_freed_memory()
    with (
        joined_world(config.parallelism) as world,
        Progress(config.training.steps, enabled=world.is_first) as progress,
    ):
        trainer = make_trainer(config, world)
        if world.is_first:
            make_folder(folder)
        world.wait_for_all()
        checkpoints = open_checkpoints(folder, config, progress.log)
        done_steps, tokens_seen = resume(trainer, checkpoints) if config.checkpoint.enable else (0, 0)
        describe(progress, config_name, trainer, done_steps, keeps_memory)
        if world.is_first:
            config_io.save(folder / "config.json", module, config_name, config)
        with (
            open_writers(folder, config.metrics, asdict(config), done_steps or None, world.is_first) as metrics,
            closing(checkpoints),
            StopSignal() as stop,
        ):
            finished = run_steps(trainer, checkpoints, metrics, progress, done_steps, tokens_seen, stop)
        if config.metrics.sample_tokens and finished:
            started = time.perf_counter()
            text = trainer.sample()
            progress.log(f"\nsample ({time.perf_counter() - started:.1f} s):\n{text}\n")
            if world.is_first:
                keep_sample(folder, config.training.steps, text)
        progress.log(f"run folder: {folder}")
    return folder


def run_steps(
    trainer: Trainer,
    checkpoints: Checkpoints,
    metrics: AllWriters,
    progress: Progress,
    done_steps: int,
    tokens_seen: int,
    stop: StopSignal,
) -> bool:
    """Take the steps that are left; returns whether that was all of them, and no signal came first."""
    config = trainer.config
    last_step = min(config.debug.stop_after or config.training.steps, config.training.steps)
    profiler = make_profiler(trainer, Path(config.job.dump_folder))
    throughput, step_metrics = (
        Throughput(),
        StepMetrics(trainer.model, config, trainer.device, trainer.world.degrees.world),
    )
    for step in range(done_steps + 1, last_step + 1):
        with trainer.timer.step(), profiler.step(step) if profiler else nullcontext():
            record = trainer.step(step)
        tokens_seen += record["num_tokens"]
        throughput.add(record.pop("num_tokens"))

        validation_loss = None
        every = config.metrics.validation_interval
        due = config.checkpoint.enable and checkpoints.is_due(step, last_step)
        if step == last_step or (every and step % every == 0) or (due and config.checkpoint.keep_best):
            with throughput.paused():
                validation_loss = trainer.validation_loss()
        if step == last_step or step % config.metrics.log_interval == 0 or validation_loss is not None:
            record |= {
                "tokens_per_second": throughput.read(),
                "tokens_seen": tokens_seen,
                "peak_memory_bytes": peak_memory_bytes(trainer.device),
                **trainer.timer.read(),
            }
            if validation_loss is not None:
                record["validation_loss"] = validation_loss
            for warning in step_metrics.add_to(record):
                progress.log(f"warning: {warning}")
            metrics.write(record)
            loads = [layer["load"] for layer in record["routing"].values()]
            progress.update(
                step,
                loss=record["loss"],
                tokens_per_second=record["tokens_per_second"],
                memory_bytes=record["peak_memory_bytes"],
                expert_load=max(loads, default=None),
                validation_loss=validation_loss,
                grad_norm=record["grad_norm"],
                lr=record["lr"],
            )
        if validation_loss is not None and not math.isfinite(validation_loss):
            raise diverged(config, step, f"the validation loss is {validation_loss}")
        # After its line of metrics: a run that is killed in between writes the step again, and none is missing.
        stopping, failed = on_any_rank(trainer.world, stop.requested, checkpoints.failed)
        if failed:
            checkpoints.wait()  # raises what has failed in the background
        if due or (stopping and config.checkpoint.enable):
            extra = {"tokens_seen": tokens_seen, "validation_loss": validation_loss}
            with throughput.paused():
                checkpoints.save(step, trainer.model, trainer.optimizer, extra)
        if stopping and step < last_step:
            checkpoints.wait()
            hint = "the same command goes on from there" if config.checkpoint.enable else "there is no checkpoint"
            progress.log(f"stopped after step {step}, as a signal asked for it: {hint}")
            return False
    if profiler:
        profiler.finish()
    checkpoints.wait()
    return True


def make_profiler(trainer: Trainer, folder: Path) -> StepProfiler | None:
    options, compile_ = trainer.config.profile, trainer.config.compile
    if not options.enable or not trainer.world.is_first:
        return None
    is_compiled = compile_.enable and "model" in compile_.parts  # then layers can't be told apart
    model, last = None if is_compiled else trainer.model, options.first_step + options.steps
    return StepProfiler(model, folder / "profile", options.first_step, last)


def on_any_rank(world: World, *facts: bool) -> list[bool]:
    """Which of the facts are true on at least one rank."""
    return (world.sum_over_all(torch.tensor(facts, dtype=torch.int32, device=world.device)) > 0).tolist()


def diverged(config: RunConfig[Any], step: int, what: str) -> ValueError:
    return ValueError(
        f"step {step}: {what}. Try a lower --optimizer.lr (now {config.optimizer.lr})"
        " or a longer --lr_scheduler.warmup_steps"
    )


def keep_sample(folder: Path, step: int, text: str) -> None:
    with (folder / "samples.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "text": text}) + "\n")


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"job.dump_folder {folder}: can't make this folder: {error.strerror}") from None


def open_checkpoints(folder: Path, config: RunConfig[Any], say: Callable[[str], None]) -> Checkpoints:
    section = config.checkpoint
    return Checkpoints(
        folder,
        section.interval,
        section.keep_latest_k,
        section.keep_best,
        in_background=section.async_mode == "async",
        model_config=asdict(config.model),
        say=say,
    )


def resume(trainer: Trainer, checkpoints: Checkpoints) -> tuple[int, int]:
    """Go on from the newest checkpoint that is whole, if there is one; returns the steps done and the tokens seen."""
    loaded = checkpoints.load_newest(trainer.model, trainer.optimizer)
    if loaded is None:
        return 0, 0
    step, extra = loaded
    checkpoints.restore_random(step, trainer.config.training.seed)
    return step, extra["tokens_seen"]


def describe(progress: Progress, config_name: str, trainer: Trainer, done_steps: int, keeps_memory: bool) -> None:
    """Say in a few lines what is about to run."""
    model, training, data = trainer.config.model, trainer.config.training, trainer.data
    total, active = model.num_params() / 1e6, model.num_active_params() / 1e6
    progress.log(f"{config_name}: {total:.2f}M parameters, {active:.2f}M active, {training.dtype} on {trainer.device}")
    progress.log(f"data: {data.num_tokens:,} tokens in {data.num_documents:,} documents")
    tokens, threads = trainer.global_batch_size * training.seq_len, torch.get_num_threads()
    memory = ", freed memory is kept" if keeps_memory else ""
    progress.log(f"{training.steps} steps of {tokens} tokens on {trainer.world}, threads a rank: {threads}{memory}")
    if trainer.config.compile.enable and has_separate_expert_units(trainer.model):
        progress.log("experts are FSDP units of their own, so their blocks compile in several graphs instead of one")
    if done_steps:
        progress.log(f"going on from the checkpoint of step {done_steps}")
