"""The options of `spurline launch`: how many ranks and where they meet. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass

DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Options:
    ranks: int = 0
    """Ranks on each node: one for each accelerator, or CPU processes. 0: one for each accelerator of this machine, or
    one on the CPU."""
    nnodes: str = "1"
    """Number of nodes. With spare nodes a range, such as 62:64: the job goes on while at least 62 of 64 are there."""
    rdzv_endpoint: str = ""
    """HOST:PORT where several nodes meet; HOST is one of them, and the same command runs on every node."""
    rdzv_id: str = "spurline"
    """Name of the job at that endpoint."""
    join_timeout: int = 600
    """Seconds to wait for the other nodes, at the start and after one was lost."""
    restarts: int = 0
    """How often all ranks are started again after one has failed or a node was lost."""
    grace: int = 600
    """Seconds that ranks have after a signal to write a checkpoint and end, before they are killed."""
    log_rank: str = "0"
    """Ranks of each node whose output is shown, comma-separated."""

    env: str = ""
    """Environment variables for the ranks: NAME=VALUE,NAME=VALUE."""
    interface: str = ""
    """Network interface for NCCL's and gloo's sockets, such as ib0 (default: NCCL chooses; gloo takes the one that
    reaches the endpoint)."""

    @property
    def nodes(self) -> range:
        """Every number of nodes that the job may have."""
        least, _, most = self.nnodes.partition(":")
        return range(int(least), int(most or least) + 1)

    @property
    def shown_ranks(self) -> set[int]:
        return {int(rank) for rank in self.log_rank.split(",")}

    @property
    def variables(self) -> dict[str, str]:
        """Those of --env."""
        return dict(item.partition("=")[::2] for item in self.env.split(",") if item)

    def problems(self) -> list[str]:
        found = []
        if self.ranks < 0:
            found.append(f"--ranks must be a number of ranks, got {self.ranks}")
        found += self._node_problems()
        for name in ("restarts", "grace"):
            if getattr(self, name) < 0:
                found.append(f"--{name} must not be negative, got {getattr(self, name)}")
        if self.join_timeout < 1:
            found.append(f"--join_timeout must be positive, got {self.join_timeout}")
        if not re.fullmatch(r"\d+(,\d+)*", self.log_rank):
            found.append(f"--log_rank must be numbers of ranks such as 0,1, got {self.log_rank!r}")
        for item in filter(None, self.env.split(",")):
            if not re.fullmatch(r"[A-Za-z_]\w*=.*", item):
                found.append(f"--env: {item!r} is not NAME=VALUE")
        return found

    def _node_problems(self) -> list[str]:
        found = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", self.nnodes)
        if not found:
            return [f"--nnodes must be a number, or a range such as 62:64, got {self.nnodes!r}"]
        if found[2] and int(found[2]) < int(found[1]):
            return [f"--nnodes {self.nnodes}: the smaller number comes first"]
        if self.nnodes == "1":
            return []
        if not self.rdzv_endpoint:
            return [f"--nnodes {self.nnodes} needs --rdzv_endpoint HOST:PORT, where HOST is one of the nodes"]
        host, port = split_endpoint(self.rdzv_endpoint)
        if not host or not 0 < port < 2**16:
            return [f"--rdzv_endpoint must be HOST:PORT, got {self.rdzv_endpoint!r}"]
        return []


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """The host and the port of HOST, HOST:PORT or [IPv6]:PORT; the port is -1 if it is no number."""
    found = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\s]+))(?::(\d+))?", endpoint)
    if not found:
        return "", -1
    return found[1] or found[2], int(found[3] or DEFAULT_PORT)
