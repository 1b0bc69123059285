"""Parts that the scripts and manifests of all clusters share. Torch-free."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass

from spurline.launch.options import Options
from spurline.train.exit_codes import ExitCode

# Exit codes that a restart may fix; others (options, divergence, a folder in use) would recur.
RETRIED = (ExitCode.LOST_RANK, ExitCode.WATCHDOG)
FINAL = (ExitCode.USAGE, ExitCode.DIVERGED, ExitCode.FOLDER_IN_USE, ExitCode.COPIES_DIFFER)


@dataclass(frozen=True)
class JobText:
    """The contents of a job for a cluster."""

    options: Options
    name: str
    """Name of the job."""
    run_folder: str
    train: list[str]
    """All options of `spurline train`."""

    @property
    def launch(self) -> list[str]:
        """The options of `spurline launch` on every node, without the rendezvous."""
        options = self.options
        words = ["--ranks", str(options.ranks), "--nnodes", options.nnodes, "--restarts", str(self.restarts)]
        words += ["--join_timeout", str(options.join_timeout), "--grace", str(options.notice)]
        if options.log_rank != "0":
            words += ["--log_rank", options.log_rank]
        return words

    @property
    def restarts(self) -> int:
        """At least one restart per spare node, so that the remaining nodes can continue when one is lost."""
        spare = self.options.nodes[-1] - self.options.nodes[0]
        return max(self.options.restarts, spare)

    def variables(self) -> dict[str, str]:
        """The environment of the ranks."""
        found = {"NCCL_DEBUG": "WARN"} if self.options.accelerators else {"OMP_NUM_THREADS": "1"}
        if self.options.interface:
            found |= {"NCCL_SOCKET_IFNAME": self.options.interface, "GLOO_SOCKET_IFNAME": self.options.interface}
        return found | self.options.variables


def python() -> str:
    """The Python of this environment, which the nodes of a cluster see on a shared disk."""
    return sys.executable


def quoted(words: list[str], indent: str = "    ", width: int = 100) -> str:
    """The words of a command, quoted for a shell and wrapped between options."""
    lines, line = [], ""
    for number, word in enumerate(words):
        word = shlex.quote(word)
        starts_option = word.startswith("-") or number == 0
        if line and starts_option and len(line) + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return f" \\\n{indent}".join([*lines, line])
