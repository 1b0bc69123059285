import gc
import os
import signal

# Waiting OpenMP threads spin, and with several ranks on few cores they starve the ones that work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Nor start more processes to compile in: each of them would import torch first, and the cores are busy anyway.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

from pathlib import Path

# A compile cache of this checkout alone: what another process left in the shared one can't break the tests.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(__file__).parent.parent / ".pytest_cache" / "inductor")

import pytest
import torch
from hypothesis import settings

from spurline.parallel.compile_cache import remove_broken_libraries
from spurline.testing.pytest_plugin import ranks

__all__ = ["ranks"]

# One tree, one verdict: examples are the same in every run. `make test-slow` looks at new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("new", max_examples=500, deadline=None, print_blob=True)
settings.load_profile("same")


def pytest_configure() -> None:
    """Signals as in a terminal: nohup lets SIGHUP be ignored, a script that runs `make test &` SIGINT and SIGQUIT.

    Every process that tests start would inherit that, and a run that starts with a signal ignored rightly ignores it.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("SIGHUP", "SIGQUIT"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Garbage collections look at what tests make, not at the million objects of all modules (half a second each)."""
    gc.collect()
    gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Nor can a run of the tests that was killed."""
    if not hasattr(session.config, "workerinput"):
        remove_broken_libraries(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Every test draws the same numbers in every run, whatever ran before it."""
    torch.manual_seed(0)
