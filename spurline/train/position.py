"""How far a run has come: what a checkpoint stores of it, and how a run that resumes restores it. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Position:
    """How far a run has come."""

    step: int = 0
    """The number of steps taken."""
    tokens_seen: int = 0
    """Tokens of the steps that the host has read from the device."""
    sequences_seen: int = 0
    """The position in the data: the next step begins with this sequence, on any number of ranks."""

    def stored(self) -> dict[str, int]:
        """What a checkpoint stores of it, besides the step."""
        return {"tokens_seen": self.tokens_seen, "sequences_seen": self.sequences_seen}


def stored_position(
    step: int, extra: Mapping[str, Any], global_batch_size: int, tokens_per_sequence: int | None
) -> Position:
    """The position in the checkpoint of `step`, whose plain data is `extra`; a ValueError if it is unknown.

    Checkpoints of earlier versions have no sequences_seen: steps of `global_batch_size` sequences are assumed, if the
    token count agrees. `tokens_per_sequence` is None if it varies.
    """
    tokens_seen = _count(extra, "tokens_seen")
    if tokens_seen is None:
        raise ValueError(f"the checkpoint of step {step} does not say how many tokens the run has seen")
    sequences_seen = _count(extra, "sequences_seen")
    if sequences_seen is None:
        sequences_seen = step * global_batch_size
        if tokens_per_sequence and tokens_seen != sequences_seen * tokens_per_sequence:
            raise ValueError(
                f"the checkpoint of step {step} does not say how many sequences the run has read, and {tokens_seen:,}"
                f" tokens are not {step} steps of {global_batch_size} sequences of {tokens_per_sequence} tokens: set"
                " --training.global_batch_size and --training.seq_len as it was written with, until the next checkpoint"
            )
    return Position(step, tokens_seen, sequences_seen)


def _count(extra: Mapping[str, Any], name: str) -> int | None:
    value = extra.get(name)
    return value if type(value) is int and value >= 0 else None
