"""Where the batch of an earlier step is in the data: recorded if the step was bad, else worked out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spurline.config import RunConfig
from spurline.config_io import load_environment
from spurline.parallel.degrees import resolve_degrees
from spurline.train.bad_steps import BAD_STEPS_FILE
from spurline.train.checkpoint.folder import CheckpointFolder
from spurline.untrusted import lines, open_regular, parse_json

MAX_SEQUENCES = 2**17
"""In the batch of a step, all of which is held in memory; eight times the largest batches in use."""


@dataclass(frozen=True)
class RecordedStep:
    """Where the batch of a step is in the data, and how it was split."""

    step: int
    first_sequence: int
    global_batch_size: int
    local_batch_size: int
    data_ranks: int

    def micro_batches(self) -> Iterator[tuple[str, int]]:
        """The name and the first sequence of each micro-batch, in data order."""
        for number, start in enumerate(range(0, self.global_batch_size, self.local_batch_size)):
            name = f"micro-batch {number // self.data_ranks + 1}"
            rank = f" of data rank {number % self.data_ranks}" if self.data_ranks > 1 else ""
            yield name + rank, self.first_sequence + start


def read_recorded_step(run_folder: Path, step: int) -> RecordedStep | None:
    """The last record of a step in bad_steps.jsonl; None if there is none."""
    path, found = run_folder / BAD_STEPS_FILE, None
    try:
        with open_regular(path) as file:
            for number, line in enumerate(lines(file), 1):
                recorded = _recorded(parse_json(line))
                if recorded is None:
                    raise ValueError(f"line {number} is not the record of a step")
                found = recorded if recorded.step == step else found
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: {error}") from None
    return found


def _recorded(content: Any) -> RecordedStep | None:
    names = [field.name for field in dataclasses.fields(RecordedStep)]
    found = [content.get(name) for name in names] if isinstance(content, dict) else []
    numbers = [number for number in found if type(number) is int and 0 <= number < 2**53]
    if len(numbers) < len(names) or 0 in numbers[2:]:
        return None
    recorded = RecordedStep(*numbers)
    _check_size(max(recorded.global_batch_size, recorded.local_batch_size))
    return recorded


def _check_size(num_sequences: int) -> None:
    if num_sequences > MAX_SEQUENCES:
        raise ValueError(f"a batch of {num_sequences:,} sequences is too large to replay (at most {MAX_SEQUENCES:,})")


def batch_size_of_step(run_folder: Path, config: RunConfig[Any], step: int, sign_key: bytes | None) -> int:
    """The sequences in a step that was not recorded; a ValueError if that is unknown.

    By default it depends on the number of ranks, and either may differ from start to start. The first checkpoint from
    the step on is of the process that took the step; without one, that was the last process, of config.json.
    """
    checkpoints = CheckpointFolder(run_folder, sign_key)
    steps = checkpoints.steps()
    since, before = [at for at in steps if at >= step][:1], [at for at in steps if at < step][-1:]
    found = (
        *(_in_checkpoint(checkpoints, at) for at in since),
        _in_config(run_folder / "config.json", config),
        *(_in_checkpoint(checkpoints, at) for at in before),
    )
    for size in found:
        if size > 0:
            _check_size(size)
            return size
    raise ValueError(
        f"{run_folder}: the sequences in a step are unknown, as neither a checkpoint nor the environment in config.json"
        " says how many ranks the run had: set training.global_batch_size in its config.json"
    )


def _in_checkpoint(checkpoints: CheckpointFolder, step: int) -> int:
    try:
        run = (checkpoints.record(step).extra or {}).get("run")
    except ValueError:  # damaged
        return 0
    size = run.get("training.global_batch_size") if isinstance(run, dict) else None
    return size if type(size) is int else 0


def _in_config(path: Path, config: RunConfig[Any]) -> int:
    training, ranks = config.training, load_environment(path).get("ranks")
    if training.global_batch_size > 0:
        return training.global_batch_size
    if type(ranks) is not int or ranks < 1:
        return 0
    degrees = resolve_degrees(config.parallelism, ranks)
    return training.local_batch_size * degrees.dp if degrees.world == ranks else 0
