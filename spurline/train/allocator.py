"""Keep freed memory in the process, because every training step allocates the same large blocks.

By default glibc returns large freed blocks to the system, and each page of a new block costs a page fault: a
considerable part of a step's time on a CPU.
"""

import ctypes
import sys

# Constants from glibc's <malloc.h>.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_KEPT = 1 << 30
_GROWTH = 64 << 20


def keep_freed_memory() -> bool:
    """Configure glibc to keep freed memory for the rest of the process; False if the allocator is not glibc's."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _KEPT, _M_TOP_PAD: _GROWTH}
    return all(mallopt(name, value) == 1 for name, value in settings.items())
