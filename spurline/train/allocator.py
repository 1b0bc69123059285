"""Keep freed memory in the process: a training step asks for the same large blocks again and again.

glibc hands large freed blocks back to the system, which then gives them out anew a page fault at a time: on a CPU that
is a good part of a step's time.
"""

import ctypes
import sys

# Names and numbers of glibc's <malloc.h>.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_KEPT = 1 << 30
_GROWTH = 64 << 20


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed, for the rest of the process; False where the allocator is another one."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _KEPT, _M_TOP_PAD: _GROWTH}
    return all(mallopt(name, value) == 1 for name, value in settings.items())
