"""The state of all random number generators of a rank, as plain data."""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spurline.untrusted import parse_json


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
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if "device" in state and torch.accelerator.is_available():
            torch.get_device_module().set_rng_state(state["device"])
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RuntimeError, AttributeError) as error:
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


def seed_random(seed: int, step: int, rank: int) -> None:
    """Seed all generators, differently for each seed, step and rank."""
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    number = int.from_bytes(digest[:4], "little")  # numpy accepts 32 bits
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
