"""Where and with what a run was started: recorded in its config.json, and never read back into a config."""

from __future__ import annotations

import platform
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

from spurline.parallel.world import World
from spurline.version import __version__


def environment(world: World) -> dict[str, str | int]:
    """Versions, the commit of the code if it is a git checkout, host, device and ranks."""
    device = world.device
    return {
        "spurline": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "git_commit": git_commit(Path(__file__).parent),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "device": str(torch.accelerator.current_accelerator()) if device.type != "cpu" else "cpu",
        "ranks": world.degrees.world,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def git_commit(folder: Path) -> str:
    """The commit that is checked out, with -dirty appended if files have changed since; empty if there is none."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
