"""The state of all random number generators of a rank, as plain data."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spurline.untrusted import parse_json

_MERSENNE_WORDS = 624
_DAMAGE = (ValueError, TypeError, KeyError, IndexError, OverflowError, RuntimeError, AttributeError, struct.error)


def random_state() -> Tensor:
    """The generator states of Python, NumPy, torch and, if there is one, the accelerator, as bytes of JSON."""
    kind, keys, *rest = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.accelerator.is_available():
        state["device"] = torch.get_device_module().get_rng_state().numpy().tobytes().hex()
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def restore_random_state(stored: bytes | dict[str, Any]) -> None:
    """Restore what `random_state` returned, as bytes, or the dict of a checkpoint of version 1."""
    try:
        state = _parsed(stored) if isinstance(stored, bytes) else stored
        _check(state)
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if "device" in state and torch.accelerator.is_available():
            torch.get_device_module().set_rng_state(state["device"])
    except _DAMAGE as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"the random state in the checkpoint is damaged: {reason}") from None


def _parsed(stored: bytes) -> dict[str, Any]:
    state = parse_json(stored)
    version, internal, gauss = state["python"]
    kind, keys, *rest = state["numpy"]
    parsed: dict[str, Any] = {
        "python": (version, tuple(internal), gauss),
        "numpy": (kind, np.array(keys, np.uint32), *rest),
    }
    for name in state.keys() & {"torch", "device"}:
        parsed[name] = torch.frombuffer(bytearray.fromhex(state[name]), dtype=torch.uint8)
    return parsed


def _check(state: dict[str, Any]) -> None:
    """Raise a ValueError for what the generators take unseen and then read outside of their memory, or fail on."""
    *_, gauss = state["python"]
    if gauss is not None and not isinstance(gauss, float):
        raise ValueError("Python's next normal number is not a number")
    _, _, position, *_ = state["numpy"]
    if not (isinstance(position, int) and 0 <= position <= _MERSENNE_WORDS):
        raise ValueError(f"NumPy's position is not a number from 0 to {_MERSENNE_WORDS}")
    # The seed, how many words are left, whether it was seeded, the next word. A new state has to be mixed first.
    left, position = struct.unpack_from("=8xi4xQ", bytes(state["torch"].numpy()))
    if (left, position) != (1, 0) and left + position != _MERSENNE_WORDS + 1:
        raise ValueError("torch's position is not valid")


def seed_random(seed: int, step: int, rank: int) -> None:
    """Seed all generators, differently for each seed, step and rank."""
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    number = int.from_bytes(digest[:4], "little")  # numpy accepts 32 bits
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
