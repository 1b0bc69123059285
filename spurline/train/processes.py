"""Identify a process on a machine, so that another one can tell whether it is still alive. Torch-free."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    host: str
    """Host name, boot id and PID namespace: a restarted machine or a container may have the same name."""
    pid: int
    started: str
    """Start time of the process in kernel ticks, because process ids are reused. Empty if unknown."""

    @staticmethod
    def own() -> Process:
        return Process(_host(), os.getpid(), _stat(os.getpid())[1])

    @property
    def is_local(self) -> bool:
        return self.host == _host()

    @property
    def machine(self) -> str:
        return self.host.split("/")[0]

    def state(self) -> str:
        """The kernel's state letter of a local process: R, S, D, T (stopped) ...; empty if it has ended."""
        state, started = _stat(self.pid)
        if not state or state in "ZX" or (self.started and started != self.started):
            return ""
        return state

    def kill(self) -> None:
        """Kill it at once, if it is on this machine and still the same process."""
        if self.is_local and self.started and self.state():
            try:
                os.kill(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                return


def _host() -> str:
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(os.readlink(path) if path.endswith("pid") else Path(path).read_text().strip())
        except OSError:
            continue
    return "/".join(parts)


def _stat(pid: int) -> tuple[str, str]:
    """State and start time of a process; ("", "") if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return "", ""
    except OSError:
        pass
    try:  # a system without /proc
        os.kill(pid, 0)
    except ProcessLookupError:
        return "", ""
    except PermissionError:
        pass
    return "?", ""
