"""Run a cell on each rank: the trainer's own steps, compared with the reference steps.

N sequences of L tokens over all steps.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from spurline.config import RunConfig
from spurline.data import DataSets
from spurline.data.batch import IGNORE_INDEX, Batch
from spurline.data.tokenizer import ByteTokenizer
from spurline.moe.dispatch.libraries import LIBRARIES
from spurline.parallel.degrees import resolve_degrees
from spurline.parallel.mesh import build_meshes
from spurline.parallel.world import World
from spurline.plugins import load_plugins
from spurline.testing import stand_ins
from spurline.testing.verification.reference import use_reference
from spurline.train.trainer import Trainer, make_trainer

# The results of a step, by kind and name.
Results = dict[str, dict[str, Tensor]]
# Relative errors by kind and name.
Errors = dict[str, dict[str, float]]


def save_reference(config: RunConfig[Any], path: str) -> str:
    """Run the reference steps in this process and save their results to `path`; returns its description."""
    trainer = make_trainer(config, World(torch.device("cpu"), resolve_degrees(config.parallelism, 1)), _data(config))
    what = use_reference(trainer.model, config.training.global_batch_size * config.training.seq_len)
    torch.save(list(take_steps(trainer)), path)
    return what


def measure_cell(config: RunConfig[Any], path: str) -> list[Errors]:
    """Run the same steps as one of the ranks; returns the errors of each step."""
    if getattr(getattr(config.model, "moe", None), "dispatcher", "") in LIBRARIES:
        stand_ins.install()
    ranks = dist.get_world_size()
    degrees = resolve_degrees(config.parallelism, ranks)
    meshes = build_meshes(degrees, "cpu") if ranks > 1 else None
    trainer = make_trainer(config, World(torch.device("cpu"), degrees, meshes), _data(config))
    expected = torch.load(path, mmap=True)
    return [errors_of_step(*results) for results in zip(take_steps(trainer), expected, strict=True)]


def prepare_rank(package: str) -> None:
    """Load plugins and the user's package, and silence torch's warnings: each cell is compared with the reference."""
    torch._logging.set_logs(all=logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    if problems := load_plugins(package):
        raise ValueError("; ".join(problems))


def take_steps(trainer: Trainer) -> Iterator[Results]:
    """Run all steps and yield the results of each, as unsharded tensors."""
    gradients: dict[str, Tensor] = {}

    def note_gradients(*_: Any) -> None:
        gradients.clear()
        gradients.update(_in_full({name: p.grad for name, p in trainer.model.named_parameters()}, trainer.world))

    trainer.optimizer.register_step_pre_hook(note_gradients)
    for step in range(1, trainer.config.training.steps + 1):
        record = trainer.step(step).read()
        losses = {key: record[key] for key in ("loss", "balance_loss") if record[key] is not None}
        yield {
            "loss": _as_tensors(losses),
            "norm": _as_tensors({"gradient": record["grad_norm"]}),
            "gradient": dict(gradients),
            "weight": _in_full(dict(trainer.model.named_parameters()), trainer.world),
            "rows": _as_tensors(record["expert_load"]),
        }


def errors_of_step(actual: Results, expected: Results) -> Errors:
    """The relative error of each result; for tiny gradients, relative to 1e-6 of the norm of all gradients."""
    least = {"gradient": 1e-6 * torch.stack([g.norm() for g in expected["gradient"].values()]).norm().item()}
    return {
        kind: {
            name: _relative_error(actual[kind].get(name), result, least.get(kind, 0.0))
            for name, result in results.items()
        }
        for kind, results in expected.items()
    }


def _relative_error(actual: Tensor | None, expected: Tensor, least: float) -> float:
    """Norm of the difference relative to the norm of `expected`; infinite if a result is missing or not finite."""
    if actual is None or not torch.isfinite(actual).all() or not torch.isfinite(expected).all():
        return math.inf
    difference = (actual.double() - expected.double()).norm()
    return (difference / expected.double().norm().clamp_min(max(least, 1e-30))).item() if difference else 0.0


def _as_tensors(numbers: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}


def _in_full(tensors: dict[str, Tensor | None], world: World) -> dict[str, Tensor]:
    """A full copy of each tensor of all pipeline stages, all-gathered if sharded; a collective call."""
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    own = {name: t.detach().clone() for name, t in whole.items() if t is not None}
    if world.meshes is None or world.meshes.pp is None:
        return own
    of_stages: list[Any] = [None] * world.degrees.pp
    dist.all_gather_object(of_stages, own, group=world.meshes.pp.get_group())
    joined: dict[str, Tensor] = {}
    for name, tensor in ((name, tensor) for of_stage in of_stages for name, tensor in of_stage.items()):
        # Copies of a parameter on two stages must be equal, bit for bit; if they differ, the result is NaN.
        are_equal = name not in joined or torch.equal(joined[name], tensor)
        joined[name] = tensor if are_equal else torch.full_like(tensor, math.nan)
    return joined


class _Sequences:
    """Random sequences as a dataset; the second has no labels, the first none in its first third."""

    def __init__(self, config: RunConfig[Any]) -> None:
        training = config.training
        shape = (training.global_batch_size * training.steps, training.seq_len + 1)
        tokens_NL = torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(1))
        self.tokens_NL, self.labels_NL = tokens_NL[:, :-1], tokens_NL[:, 1:].clone()
        self.labels_NL[0, : training.seq_len // 3] = IGNORE_INDEX
        self.labels_NL[1] = IGNORE_INDEX

    def batch(self, start: int, count: int) -> Batch:
        """The sequences start, start + 1, ..."""
        return Batch(self.tokens_NL[start : start + count], self.labels_NL[start : start + count])


def _data(config: RunConfig[Any]) -> DataSets:
    sequences: Any = _Sequences(config)
    return DataSets(ByteTokenizer(), sequences, validation=None, num_documents=0, num_tokens=0)
