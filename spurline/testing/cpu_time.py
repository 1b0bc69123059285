"""CPU time of a process and its children, to tell a hang from a slow machine. Linux only."""

import os
from pathlib import Path


def cpu_seconds(pid: int) -> float | None:
    """CPU time of a process and of its descendants so far, or None if the system does not report it."""
    try:
        # The name in parentheses may contain spaces; after it come 11 fields, then utime, stime, cutime, cstime.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [Path(task, "children").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()]
    except (OSError, ValueError):
        return None
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(int(child)) or 0.0 for each in children for child in each)
