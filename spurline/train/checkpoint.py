"""Checkpoints of a run: `<run folder>/checkpoints/step-00000100`, there in full or not at all."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# `torch.distributed.checkpoint` takes most of a second to import, so only the runs that save or load import it.


class Checkpoints:
    """The checkpoints of one run, written and read by all of its ranks together.

    A checkpoint is one flat dict: `model.<name>` is a parameter or a persistent buffer, `optimizer.<state>.<name>` what
    the optimizer keeps for a parameter, and `extra` is the caller's. The optimizer's settings (rate, betas, decay) are
    not part of it: they are the config's, also when a run goes on.
    """

    def __init__(self, run_folder: str | os.PathLike[str], interval: int, keep_latest_k: int) -> None:
        self.folder = Path(run_folder) / "checkpoints"
        self.interval = interval
        self.keep_latest_k = keep_latest_k

    def is_due(self, step: int, last_step: int) -> bool:
        return step % self.interval == 0 or step == last_step

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return max(self._steps(), default=None)

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, extra: dict[str, Any]) -> None:
        """Write the checkpoint of `step`, then remove older ones until keep_latest_k stay (0: all stay)."""
        import torch.distributed.checkpoint as dcp

        with _first_rank_alone() as first:
            if first:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._remove_temporaries()
        # In a tuple, `extra` is stored as one object; a bare dict would become entries with names of their own.
        state = {**_model_tensors(model), **_optimizer_tensors(model, optimizer), "extra": (extra,)}
        with _quiet_about_one_process():
            dcp.save(state, checkpoint_id=self._temporary(step))

        with _first_rank_alone() as first:
            if first:
                self._publish(step)

    def _publish(self, step: int) -> None:
        # What has to go gets a temporary name first: a kill during the removal leaves nothing that passes for complete.
        if self._path(step).exists():
            self._path(step).rename(self._temporary(step, "replaced"))
        self._temporary(step).rename(self._path(step))
        if self.keep_latest_k:
            up_to_this = [other for other in self._steps() if other <= step]
            for other in up_to_this[: -self.keep_latest_k]:
                self._path(other).rename(self._temporary(other))
        self._remove_temporaries()

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Restore the model, and the optimizer if there is one, in place from `step`; return the checkpoint's `extra`.

        A checkpoint of another model is refused with a ValueError before anything is changed.
        """
        import torch.distributed.checkpoint as dcp

        path = self._complete_path(step)
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        model_tensors = _model_tensors(model)
        if misfits := _misfits(saved, model_tensors):
            more = f"; and {len(misfits) - 5} more" if len(misfits) > 5 else ""
            raise ValueError(
                f"checkpoint {path} is of another model: {'; '.join(misfits[:5])}{more}."
                " Use the model options it was written with, or another --job.dump_folder"
            )

        optimizer_tensors = _empty_optimizer_tensors(saved, model) if optimizer else {}
        state: dict[str, Any] = {**model_tensors, **optimizer_tensors, "extra": None}
        with _quiet_about_one_process():
            dcp.load(state, checkpoint_id=path)
        model.load_state_dict({name.removeprefix("model."): state[name] for name in model_tensors})
        if optimizer:
            _load_optimizer_tensors(model, optimizer, optimizer_tensors)
        return state["extra"][0]

    def write_tensors(
        self, step: int, tensors: dict[str, Tensor], read: Callable[[str], Tensor], extra: dict[str, Any]
    ) -> None:
        """Write a checkpoint of a model alone, whose tensors are read by name just before they are written.

        `tensors` are on the meta device: no more than two of those that `read` returns are in memory at once.
        """
        import torch.distributed.checkpoint as dcp

        class ReadingPlanner(dcp.DefaultSavePlanner):
            def lookup_object(self, index: Any) -> Any:
                is_tensor = index.fqn.startswith("model.")
                return read(index.fqn.removeprefix("model.")) if is_tensor else super().lookup_object(index)

        self.folder.mkdir(parents=True, exist_ok=True)
        state = {**{f"model.{name}": tensor for name, tensor in tensors.items()}, "extra": (extra,)}
        # A file for each tensor: the writer holds on to all that it has written to the file it is at.
        writer = dcp.FileSystemWriter(self._temporary(step), single_file_per_rank=False)
        try:
            with _quiet_about_one_process():
                dcp.save(state, storage_writer=writer, planner=ReadingPlanner())
        except dcp.api.CheckpointException as error:
            # An interrupt, or an error of `read`, comes wrapped.
            raise error.failures[0][0] from error
        self._publish(step)

    def tensors(self, step: int) -> dict[str, Tensor]:
        """The model's tensors in the checkpoint of `step`, by name, on the meta device."""
        import torch.distributed.checkpoint as dcp

        saved = dcp.FileSystemReader(self._complete_path(step)).read_metadata().state_dict_metadata
        return {
            name.removeprefix("model."): torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for name, entry in saved.items()
            if isinstance(entry, dcp.TensorStorageMetadata) and name.startswith("model.")
        }

    def read_tensor(self, step: int, name: str, like: Tensor) -> Tensor:
        """One of the model's tensors in full, with the shape and dtype of `like`, whatever ranks have written it."""
        import torch.distributed.checkpoint as dcp

        state = {f"model.{name}": torch.empty(like.shape, dtype=like.dtype)}
        with _quiet_about_one_process():
            dcp.load(state, checkpoint_id=self._complete_path(step), no_dist=True)
        return state[f"model.{name}"]

    def _complete_path(self, step: int) -> Path:
        if step not in self._steps():
            there = ", ".join(map(str, self._steps())) or "none"
            raise ValueError(f"there is no complete checkpoint {self._path(step)}; steps in that folder: {there}")
        return self._path(step)

    def _steps(self) -> list[int]:
        """The steps of the complete checkpoints, ascending; `.metadata` is the last file that gets written."""
        names = [path.parent.name for path in self.folder.glob("step-*/.metadata")]
        return sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d{8,}", name))

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _temporary(self, step: int, why: str = "") -> Path:
        return self.folder / f".step-{step:08d}{why}.tmp"

    def _remove_temporaries(self) -> None:
        for path in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(path)


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items()}


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"optimizer.{key}.{name}": tensor
        for name, parameter in model.named_parameters()
        for key, tensor in optimizer.state.get(parameter, {}).items()
    }


def _misfits(saved: dict[str, Any], model_tensors: dict[str, Tensor]) -> list[str]:
    """One phrase for each tensor that the checkpoint and the model don't share, in the order of their names."""
    found = []
    for name in sorted(model_tensors.keys() | {name for name in saved if name.startswith("model.")}):
        bare_name = name.removeprefix("model.")
        if name not in saved:
            found.append(f"{bare_name} is not in the checkpoint")
        elif name not in model_tensors:
            found.append(f"{bare_name} is not in the model")
        elif saved[name].size != model_tensors[name].shape:
            sizes = tuple(saved[name].size), tuple(model_tensors[name].shape)
            found.append(f"{bare_name} is {sizes[0]} in the checkpoint, {sizes[1]} in the model")
    return found


def _empty_optimizer_tensors(saved: dict[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """Room for the optimizer state that was saved; a new optimizer has none until its first step."""
    parameters = dict(model.named_parameters())
    empty = {}
    for name, entry in saved.items():
        if name.startswith("optimizer."):
            parameter, dtype = parameters[name.split(".", 2)[2]], entry.properties.dtype
            # Made like its parameter, moments are sharded as it is; the step count has a shape of its own.
            if entry.size == parameter.shape:
                empty[name] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:
                empty[name] = torch.empty(entry.size, dtype=dtype)
    return empty


def _load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state_of: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        _, key, name = full_name.split(".", 2)
        state_of.setdefault(name, {})[key] = tensor
    names = {parameter: name for name, parameter in model.named_parameters()}
    in_order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.load_state_dict(
        {
            "state": {index: state_of[name] for index, name in enumerate(in_order) if name in state_of},
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )


@contextmanager
def _first_rank_alone() -> Iterator[bool]:
    """Whether this is the rank that handles folders; the others wait for it at the end."""
    distributed = torch.distributed.is_initialized()
    yield not distributed or torch.distributed.get_rank() == 0
    if distributed:
        torch.distributed.barrier()


@contextmanager
def _quiet_about_one_process() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
