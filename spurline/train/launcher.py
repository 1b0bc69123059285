"""What ties a rank to the launcher that started it (torchrun): lifetime, error file, exit. Torch-free."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from typing import NoReturn

ATTEMPT_VARIABLE = "SPURLINE_ATTEMPT"
"""The number of the job's current attempt, the same on all nodes; set by `spurline launch`."""
LAUNCHER_VARIABLE = "SPURLINE_LAUNCHER"
"""The process of `spurline launch`, to notice that it ended before its rank asked to die with it."""
_PR_SET_PDEATHSIG = 1


def is_launched() -> bool:
    """Whether this process is one of several ranks."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def restart_count() -> int:
    """How often torchrun has restarted the ranks before this process."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def adopt_attempt() -> None:
    """Use the attempt count of the job: torchrun's own count starts over on a replaced node."""
    if ATTEMPT_VARIABLE in os.environ:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ[ATTEMPT_VARIABLE]


def die_with_launcher() -> None:
    """Let the kernel kill this rank when torchrun dies, even by SIGKILL: nothing else would reap, restart or stop it.

    For a single rank too. Linux only. The signal follows the end of the parent *thread*; torchrun starts its ranks in
    its main thread.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or not sys.platform.startswith("linux"):
        return
    parent = int(os.environ.get(LAUNCHER_VARIABLE, os.getppid()))
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def record_error(line: str, trace: str = "", is_final: bool = False) -> None:
    """Tell the launcher why this rank ends; it shows the error of the first rank to fail. Later calls change nothing.

    `is_final`: a restart would fail in the same way.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    details = {"py_callstack": trace or line, "timestamp": str(int(time.time())), "is_final": is_final}
    with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:
        json.dump({"message": {"message": line, "extraInfo": details}}, file)


def end_process(code: int) -> NoReturn:
    """End this rank with its exit code, as the last thing it does, without tearing down the interpreter.

    Threads of a process group outlive it if a layer, a mesh or a cache still refers to the group. One that releases a
    tensor while CPython finalizes asks for the GIL, is made to exit in the middle of a C++ destructor, and the process
    aborts: 'terminate called without an active exception'. Nothing is left to tear down here: files are closed, groups
    destroyed, and on success the atexit handlers are run.
    """
    if code == 0:
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
