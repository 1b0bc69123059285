import os

# Waiting OpenMP threads spin, and with several ranks on few cores they starve the ones that work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from spurline.testing.pytest_plugin import ranks

__all__ = ["ranks"]

# One tree, one verdict: examples are the same in every run. `make test-slow` looks at new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("new", max_examples=500, deadline=None, print_blob=True)
settings.load_profile("same")


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Every test draws the same numbers in every run, whatever ran before it."""
    torch.manual_seed(0)
