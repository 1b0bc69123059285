"""Replay a step of an earlier run on one process, and report where its values first become non-finite."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spurline.config import ActivationCheckpoint, Compile, Parallelism, RunConfig
from spurline.config_io import ConfigError
from spurline.data.batch import Batch
from spurline.device import pick_device
from spurline.moe.balance import set_token_weight
from spurline.moe.dispatch.capacity import restore_capacity_factors
from spurline.moe.dispatch.libraries import LIBRARIES
from spurline.train.base_model import base_problems, check_base, load_base
from spurline.train.checkpoint.folder import CheckpointFolder
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.fingerprint import check_fingerprint
from spurline.train.optimizer.clip import gradient_norms
from spurline.train.position import Position, stored_position
from spurline.train.recorded_step import RecordedStep, batch_size_of_step, read_recorded_step
from spurline.train.run import first_weights
from spurline.train.setup import check_backends
from spurline.train.trainer import Trainer, make_trainer

_SHOWN = 5


def replay(
    run_folder: Path,
    config: RunConfig[Any],
    step: int,
    say: Callable[[str], None],
    direct: bool = False,
    sign_key: bytes | None = None,
) -> bool:
    """Replay `step` of the run from the newest checkpoint before it; returns whether all of it is finite.

    The steps in between are taken first, or skipped with `direct`.
    """
    recorded = read_recorded_step(run_folder, step)
    size = recorded.global_batch_size if recorded else batch_size_of_step(run_folder, config, step, sign_key)
    checkpoints = CheckpointManager(run_folder, 1, 0, sign_key=sign_key)
    before = [number for number in CheckpointFolder(run_folder, sign_key).steps() if number < step]
    if problems := base_problems(config):
        raise ConfigError(problems)
    config = replace(on_one_process(config, size, recorded), model=on_this_machine(config, say))
    trainer = make_trainer(config, draw_weights=False)
    if config.lora.rank:
        trainer.base = load_base(trainer.model, config)
    if before:
        start = load(trainer, checkpoints, before[-1], say)
        from_what = f"the checkpoint of step {start.step}"
    else:
        first_weights(trainer, None)
        start, from_what = Position(), "the initial weights"
    trainer.resume_at(start)
    say(f"from {from_what}: {trainer.data.num_tokens:,} tokens of data, {config.training.dtype} on {trainer.device}")
    if step - 1 > start.step and not direct:
        say(f"taking steps {start.step + 1} to {step - 1}")
        for number in range(start.step + 1, step):
            metrics = trainer.step(number)
            loss = metrics.loss.item()
            if not math.isfinite(loss):
                say(f"step {number}: the loss is {loss}, and its update is left out")
            if number % config.metrics.log_interval == 0:
                metrics.read()  # which lets capacities grow, as in the run
    recorded = recorded or RecordedStep(
        step,
        trainer.first_sequence(step),
        trainer.global_batch_size,
        trainer.config.training.local_batch_size,
        1,
    )
    first, last = recorded.first_sequence, recorded.first_sequence + recorded.global_batch_size - 1
    say(f"step {step}: sequences {first} to {last}, in micro-batches of {recorded.local_batch_size}")
    return examine(trainer, recorded, say)


def on_one_process(
    config: RunConfig[Any], global_batch_size: int, recorded: RecordedStep | None = None
) -> RunConfig[Any]:
    """The same run without parallelism, compilation, recomputation and records, with the batches of the step."""
    training = replace(config.training, on_bad_step="skip", max_bad_steps=2**31, global_batch_size=global_batch_size)
    if recorded is not None:
        training = replace(
            training,
            steps=max(training.steps, recorded.step),
            local_batch_size=recorded.local_batch_size,
        )
    return replace(
        config,
        training=training,
        parallelism=Parallelism(),
        compile=Compile(),
        activation_checkpoint=ActivationCheckpoint(),
        metrics=replace(config.metrics, layer_times=False),
        debug=replace(config.debug, record_routing="", record_routing_weights=False),
    )


def on_this_machine(config: RunConfig[Any], say: Callable[[str], None]) -> Any:
    """The model of a run without a dispatch library, and with another kernel if its own does not run here.

    On one process, a library exchanges nothing. Dispatchers that decide on the numbers (`capacity`) are kept.
    """
    model = config.model
    if getattr(model, "moe", None) is None:
        return model
    if model.moe.dispatcher in LIBRARIES:
        model = replace(model, moe=replace(model.moe, dispatcher="local"))
    with torch.device("meta"):
        built = model.build()
    try:
        check_backends(built, pick_device(config.training.device), getattr(torch, config.training.dtype))
    except ValueError as error:
        say(f"experts_backend 'auto' computes the experts here: {str(error).rpartition(': choose')[0] or error}")
        model = replace(model, moe=replace(model.moe, experts_backend="auto"))
    return model


def load(trainer: Trainer, checkpoints: CheckpointManager, step: int, say: Callable[[str], None]) -> Position:
    """Load the checkpoint of `step`, and report which options and data have changed since it was written."""
    extra = checkpoints.load(step, trainer.model, trainer.optimizer)
    if trainer.base:
        check_base(extra, trainer.base, f"{checkpoints.folder}, step {step}")
    check_fingerprint(extra.get("run"), trainer.fingerprint(), step, allow_changes=True, say=say)
    checkpoints.restore_random(step, trainer.config.training.seed)
    restore_capacity_factors(trainer.model, extra.get("capacity_factors"))
    return stored_position(step, extra, trainer.global_batch_size, None)


def examine(trainer: Trainer, recorded: RecordedStep, say: Callable[[str], None]) -> bool:
    """Run forward and backward on the micro-batches of a step, watched; returns whether everything is finite."""
    size, model = recorded.local_batch_size, trainer.model
    batches = [
        (name, trainer.data.train.batch(start, size).to(trainer.device)) for name, start in recorded.micro_batches()
    ]
    num_tokens = trainer.count_tokens(batch.labels_BL for _, batch in batches)
    set_token_weight(model, 1 / num_tokens)
    trainer.optimizer.zero_grad()
    is_finite = True
    with trainer.routing.step(recorded.step) if trainer.routing else nullcontext():
        for number, (name, batch) in enumerate(batches, 1):
            if trainer.routing:
                trainer.routing.micro_batch(number)
            with Watch(model) as watch:
                loss = trainer.loss_of(batch) / num_tokens
                loss.backward()
            found = [*watch.findings(), *_not_finite_gradients(model)]
            value = loss.item() * num_tokens.item() / max(1, int(trainer.count_tokens([batch.labels_BL])))
            say(f"{name}: loss {value:.4g}{'' if found or not math.isfinite(value) else ', finite'}")
            for line in found:
                say(f"  {line}")
            if found or not math.isfinite(value):
                is_finite = False
                if operation := anomaly(trainer, batch, num_tokens):
                    say(f"  {operation}")
                break  # the others would add to gradients that are not finite
    if is_finite:
        norm = torch.linalg.vector_norm(gradient_norms(model.parameters())).item()
        say(f"all micro-batches: the gradient norm is {norm:.4g}")
        is_finite = math.isfinite(norm)
        if is_finite:
            say(
                "the step is finite here: what happened depends on the ranks (the order of sums, rows that travel), or"
                " was a fault of memory or of a device"
            )
    trainer.optimizer.zero_grad()
    return is_finite


class Watch:
    """Within this context, notes where values of a forward and a backward pass first become non-finite."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[Any] = []
        self._forward = ""
        self._backward = ""
        self._last_output = ""
        self._last_finite = ""

    def __enter__(self) -> Watch:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_hook(self._after_forward(name, module)))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def findings(self) -> list[str]:
        return [line for line in (self._forward, self._backward) if line]

    def _after_forward(self, name: str, module: nn.Module) -> Callable[..., None]:
        what = f"{name} ({type(module).__name__})" if name else type(module).__name__

        def look(module: nn.Module, args: Any, output: Any) -> None:
            values = list(tensors_in(output))
            if not self._forward and all(map(_is_finite, values)):
                self._last_output = f"{what}, of magnitude {max(map(_largest_finite, values), default=0.0):.3g} at most"
            elif not self._forward:
                inputs = list(tensors_in(args))
                before = f"the one before it was that of {self._last_output}; " if self._last_output else ""
                its_input = "finite" if all(map(_is_finite, inputs)) else "not finite either"
                self._forward = (
                    f"forward: the output of {what} is the first that is not finite; {before}its input is {its_input},"
                    f" its weights are {_weights(module)}"
                )
            for value in values:
                if value.requires_grad:
                    value.register_hook(lambda grad: self._look_at_gradient(what, grad))

        return look

    def _look_at_gradient(self, what: str, grad: Tensor) -> None:
        if self._backward:
            return
        if _is_finite(grad):
            self._last_finite = f"{what}, of magnitude {_largest_finite(grad):.3g} at most"
        else:
            after = f"; the one before it was that of {self._last_finite}" if self._last_finite else ""
            self._backward = f"backward: the gradient of the output of {what} is the first that is not finite{after}"


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in what a module takes or returns."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])


def anomaly(trainer: Trainer, batch: Batch, num_tokens: Tensor) -> str:
    """The first operation of the backward pass that returns a NaN, and the line of its forward call; or ""."""
    trainer.optimizer.zero_grad()
    with warnings.catch_warnings(record=True) as caught, torch.autograd.detect_anomaly(check_nan=True):
        warnings.simplefilter("always")
        try:
            (trainer.loss_of(batch) / num_tokens).backward()
        except RuntimeError as error:
            traces = [str(warning.message) for warning in caught if "Traceback of forward call" in str(warning.message)]
            places = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', traces[-1]) if traces else []
            ours = [place for place in places if "/torch/" not in place[0] and "replay.py" not in place[0]]
            called = f", called in {ours[-1][2]} ({ours[-1][0]}:{ours[-1][1]})" if ours else ""
            return f"anomaly detection: {str(error).partition(chr(10))[0]}{called}"
    return ""


def _not_finite_gradients(model: nn.Module) -> list[str]:
    names = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not _is_finite(parameter.grad)
    ]
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"gradients that are not finite, the last layers first: {', '.join(names[::-1][:_SHOWN])}{more}"]


def _is_finite(value: Tensor) -> bool:
    return bool(value.detach().isfinite().all())


def _largest_finite(value: Tensor) -> float:
    finite = value.detach()[value.detach().isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _weights(module: nn.Module) -> str:
    largest = max((_largest_finite(parameter) for parameter in module.parameters()), default=0.0)
    is_finite = all(map(_is_finite, module.parameters()))
    return f"{'finite' if is_finite else 'not finite'}, of magnitude {largest:.3g} at most"
