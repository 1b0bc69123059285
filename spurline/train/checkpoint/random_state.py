"""The state of all random number generators of a rank."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The states of the generators of Python, numpy, torch and, if there is one, the accelerator."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.accelerator.is_available():
        state["device"] = torch.get_device_module().get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "device" in state and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(state["device"])


def seed_random(seed: int, step: int, rank: int) -> None:
    """Seed all generators, differently for each seed, step and rank."""
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    number = int.from_bytes(digest[:4], "little")  # numpy accepts 32 bits
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
