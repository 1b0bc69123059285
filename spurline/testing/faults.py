"""Inject faults into a run to test its recovery: at a named point, in a step, on a rank.

    SPURLINE_FAULTS="kill@backward:step=4,rank=2; slow@data:step=6,rank=0,seconds=3" spurline train ...

The variable is read once, when a run starts; without it this file is not loaded. Faults replace functions of the
trainer, which has no hooks of its own for them. If SPURLINE_FAULTS_LOG names a file, each fault is logged there before
it happens, and so are the ids of the samples that each rank reads for each step.

| kind | what happens | points |
| --- | --- | --- |
| kill, stop | SIGKILL or SIGSTOP to the rank | all |
| raise | an exception | all |
| slow | it takes `seconds` longer (2 unless given) | all |
| nan | the loss is NaN | forward |
| splits | one row goes to a different rank than agreed | exchange |
| full_disk | no space is left for checkpoints | write |
| read_error | reading the data fails | data |
| bit_flip | bit `bit` (22 unless given) of a weight of the rank changes silently | optimizer |
"""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

import torch
from torch import Tensor

from spurline.comm.exchange import Departure
from spurline.data.loader import TrainBatches
from spurline.parallel import world as world_module
from spurline.train import loop as loop_module
from spurline.train import run as run_module
from spurline.train import trainer as trainer_module
from spurline.train.checkpoint.folder import CheckpointFolder
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.checkpoint.writer import ChecksummedStream
from spurline.train.launcher import restart_count
from spurline.train.loop import TrainingLoop
from spurline.train.trainer import Trainer

IN_A_STEP = ("data", "step", "exchange", "forward", "backward", "optimizer")
AROUND_STEPS = ("meet", "start", "load", "validation", "save", "write", "publish", "end", "leave")
POINTS = (*IN_A_STEP, *AROUND_STEPS)
SPECIAL = {
    "nan": "forward",
    "splits": "exchange",
    "full_disk": "write",
    "read_error": "data",
    "bit_flip": "optimizer",
}
KINDS = ("kill", "stop", "raise", "slow", *SPECIAL)


class InjectedError(RuntimeError):
    """The exception of the kind `raise`."""


@dataclass
class Fault:
    kind: str
    point: str
    step: int = 0
    """0: the first time the point is reached."""
    rank: int = 0
    attempt: int = 0
    """The attempt in which it happens: how often torchrun has restarted the ranks."""
    seconds: float = 2.0
    bit: int = 22

    @staticmethod
    def parse(text: str) -> Fault:
        """Parse `kind@point:step=4,rank=2`; raises a ValueError with one line if it is invalid."""
        what, _, rest = text.strip().partition(":")
        kind, _, point = what.partition("@")
        if kind not in KINDS or point not in POINTS or SPECIAL.get(kind, point) != point:
            raise ValueError(
                f"SPURLINE_FAULTS {text.strip()!r}: a fault is KIND@POINT:step=N,rank=N with a kind of"
                f" {', '.join(KINDS)} and a point of {', '.join(POINTS)}"
            )
        hints = get_type_hints(Fault)
        known = {f.name for f in fields(Fault)} - {"kind", "point"}
        values: dict[str, Any] = {}
        for entry in filter(None, rest.split(",")):
            name, _, value = entry.partition("=")
            if name.strip() not in known:
                raise ValueError(f"SPURLINE_FAULTS {text.strip()!r}: there is no {name.strip()!r}")
            values[name.strip()] = hints[name.strip()](value)
        return Fault(kind, point, **values)


def install(text: str) -> None:
    """Install the faults in `text` for this rank and attempt; each happens once."""
    rank = int(os.environ.get("RANK", "0"))
    faults = [Fault.parse(part) for part in text.split(";") if part.strip()]
    own = [fault for fault in faults if (fault.rank, fault.attempt) == (rank, restart_count())]
    if own:
        _Injector(own).install()
    if os.environ.get("SPURLINE_FAULTS_LOG"):
        _note_samples(rank)


def note(**entry: Any) -> None:
    """Append a line to the fault log in one write, so that it is complete even if the process is killed next."""
    if path := os.environ.get("SPURLINE_FAULTS_LOG"):
        line = json.dumps({"time": time.time(), "attempt": restart_count(), **entry}) + "\n"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(descriptor, line.encode())
        os.close(descriptor)


def _note_samples(rank: int) -> None:
    batch = TrainBatches.batch
    step = threading.local()
    micro_batches = Trainer.micro_batches_on_host

    def of_step(trainer: Trainer, number: int) -> Any:
        step.number = number
        return micro_batches(trainer, number)

    def call(batches: TrainBatches, start: int, count: int) -> Any:
        note(step=step.number, rank=rank, samples=batches.sample_ids(start, count))
        return batch(batches, start, count)

    Trainer.micro_batches_on_host = of_step  # type: ignore[method-assign, assignment]
    TrainBatches.batch = call  # type: ignore[method-assign, assignment]


class _Injector:
    """Wraps the functions at the points, to let faults happen there."""

    def __init__(self, faults: list[Fault]) -> None:
        self._faults = faults
        self._step = 0
        self._saving = 0  # the step of the checkpoint, which may be written in the background
        self._lock = threading.Lock()  # batches are loaded in another thread

    def install(self) -> None:
        self._before(world_module, "refuse_different_options", "meet")
        self._before(run_module, "make_trainer", "start")
        self._before(CheckpointManager, "load_newest", "load")
        self._before(Trainer, "micro_batches_on_host", "data", step_of=lambda trainer, step: step)
        self._before(Trainer, "step", "step", step_of=self._note_step)
        self._before(loop_module, "validate", "validation")
        self._before(CheckpointManager, "save", "save", step_of=self._note_save)
        self._before(ChecksummedStream, "write", "write", step_of=lambda *args: self._saving)
        self._before(CheckpointFolder, "publish", "publish", step_of=lambda *args: self._saving)
        self._before(trainer_module, "step_unless", "optimizer")
        self._after(TrainingLoop, "run", "end")
        self._before(world_module, "wait_for_all_ranks", "leave")
        self._in_forward_and_backward()
        self._in_exchange()
        self._in_weights()

    def _note_step(self, trainer: Trainer, step: int) -> int:
        self._step = step
        return step

    def _note_save(self, checkpoints: CheckpointManager, step: int, *args: Any) -> int:
        self._saving = step
        return step

    def _due(self, point: str, *kinds: str, step: int | None = None) -> Fault | None:
        """The fault of this point and step, if there is one of these kinds that has not happened yet."""
        step = self._step if step is None else step
        with self._lock:
            for fault in self._faults:
                if fault.point == point and fault.kind in kinds and fault.step in (0, step):
                    self._faults.remove(fault)
                    note(step=step, rank=fault.rank, kind=fault.kind, point=point)
                    return fault
        return None

    def _happen(self, point: str, step: int | None = None) -> None:
        fault = self._due(point, "kill", "stop", "raise", "slow", "full_disk", "read_error", step=step)
        if fault is None:
            return
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "slow":
            time.sleep(fault.seconds)
        elif fault.kind == "raise":
            raise InjectedError(f"a fault on purpose at {point} of step {self._step if step is None else step}")
        elif fault.kind == "full_disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a checkpoint")
        else:
            raise OSError(errno.EIO, os.strerror(errno.EIO), "the data")

    def _before(self, owner: Any, name: str, point: str, step_of: Callable[..., int] | None = None) -> None:
        replaced = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            self._happen(point, step_of(*args) if step_of else None)
            return replaced(*args, **options)

        setattr(owner, name, call)

    def _after(self, owner: Any, name: str, point: str) -> None:
        replaced = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            result = replaced(*args, **options)
            self._happen(point)
            return result

        setattr(owner, name, call)

    def _in_forward_and_backward(self) -> None:
        loss_of = Trainer.loss_of

        def call(trainer: Trainer, batch: Any, *args: Any, **options: Any) -> Tensor:
            self._happen("forward")
            loss = loss_of(trainer, batch, *args, **options)
            if self._due("forward", "nan"):
                loss = loss * float("nan")
            if loss.requires_grad:  # not in validation
                loss.register_hook(lambda grad: self._happen("backward"))
            return loss

        Trainer.loss_of = call  # type: ignore[method-assign, assignment]

    def _in_exchange(self) -> None:
        start = Departure.start

        def call(departure: Departure, splits_2P: Tensor | None, *args: Any, **options: Any) -> Any:
            self._happen("exchange")
            if splits_2P is not None and self._due("exchange", "splits"):
                splits_2P = splits_2P.clone()
                giver = int(splits_2P[0].argmax())
                splits_2P[0, giver] -= 1
                splits_2P[0, (giver + 1) % splits_2P.size(1)] += 1
            return start(departure, splits_2P, *args, **options)

        Departure.start = call  # type: ignore[method-assign, assignment]

    def _in_weights(self) -> None:
        step_unless = trainer_module.step_unless

        def call(failed: Tensor, optimizer: torch.optim.Optimizer) -> None:
            step_unless(failed, optimizer)
            if fault := self._due("optimizer", "bit_flip"):
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                local = [p.to_local() if hasattr(p, "to_local") else p for p in parameters]
                # The last vector is the final norm's: every token passes through it, while an embedding row may never
                # be read, and no later norm divides a huge value away, as one behind the query's low-rank matrix does.
                weight = [p for p in local if p.dim() == 1 and p.numel()][-1]
                with torch.no_grad():
                    weight.view(torch.int32).view(-1)[:1].bitwise_xor_(1 << fault.bit)

        trainer_module.step_unless = call
