"""The options of `spurline launch`: ranks, rendezvous, and cluster resources. Torch-free."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass
from typing import Annotated

import tyro

DEFAULT_PORT = 29500
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True)
class Options:
    ranks: int = 0
    """Ranks per node, on accelerators or the CPU (0: one per accelerator of this machine, or one on the CPU)."""
    nnodes: str = "1"
    """Number of nodes, or with spare nodes a range: with 62:64 the job continues while at least 62 are available."""
    rdzv_endpoint: str = ""
    """HOST:PORT of the rendezvous of several nodes; HOST is one of them, and the same command runs on every node."""
    rdzv_id: str = "spurline"
    """Name of the job at that endpoint."""
    join_timeout: int = 600
    """Seconds to wait for the other nodes, at the start and after a node is lost."""
    restarts: int = 0
    """How often to restart all ranks after a rank fails or a node is lost."""
    grace: int = 600
    """Seconds for ranks to write a checkpoint and exit after a signal, before they are killed."""
    log_rank: str = "0"
    """Ranks of each node whose output is shown, comma-separated."""

    slurm: Flag = False
    """Write a script for `sbatch` instead of starting ranks."""
    kubernetes: Flag = False
    """Write a JobSet manifest for `kubectl apply` instead of starting ranks."""
    torchrun: Flag = False
    """Write a script that calls torchrun, to be started on every node, instead of starting ranks."""
    print_: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(name="print")] = False
    """Print the script or manifest instead of writing it."""
    out: str = ""
    """File to write (default: the name of the job with .sbatch, .yaml or .sh); it must not exist."""

    name: str = ""
    """Name of the job on the cluster, and of its folder, outputs/NAME-job (default: the name of the config)."""
    gpus: int = -1
    """Accelerators per node; 0 for CPU ranks (default: as many as ranks)."""
    cpus: int = 0
    """CPU cores per node (default: the full node with Slurm, no request with Kubernetes)."""
    memory: str = ""
    """Memory per node, in the scheduler's notation: 900G with Slurm, 900Gi with Kubernetes."""
    env: str = ""
    """Environment variables for the ranks: NAME=VALUE,NAME=VALUE. Values may contain commas, as in
    NCCL_IB_HCA=mlx5_0,mlx5_1."""
    interface: str = ""
    """Network interface for NCCL's and gloo's sockets, such as ib0.
    Default: NCCL chooses; gloo uses the one that reaches the endpoint."""
    notice: int = 120
    """Seconds to write a checkpoint before the time limit of a job, or after a preemption notice."""
    requeues: int = 5
    """How often the scheduler restarts a job that lost a node or got stuck (Slurm: in a row)."""

    partition: str = ""
    """Slurm: partition."""
    account: str = ""
    """Slurm: account."""
    time: str = ""
    """Slurm: time limit, such as 24:00:00; when it expires, the job is requeued and resumes."""
    sbatch: str = ""
    """Slurm: other sbatch options, as in --sbatch="--qos=high --constraint=h100"."""

    image: str = ""
    """Kubernetes: container image with spurline installed."""
    volume: str = ""
    """Kubernetes: CLAIM:/PATH, a volume claim that all pods can write to (ReadWriteMany) and its mount path.
    Pods work in that folder, and the run folder is inside it."""
    namespace: str = ""
    """Kubernetes: namespace."""
    queue: str = ""
    """Kubernetes: Kueue local queue."""
    gpu_resource: str = "nvidia.com/gpu"
    """Kubernetes: resource name of the accelerator, such as amd.com/gpu."""

    @property
    def target(self) -> str:
        """The kind of job to write: slurm, kubernetes, torchrun, or none ("")."""
        return next((name for name in ("slurm", "kubernetes", "torchrun") if getattr(self, name)), "")

    @property
    def nodes(self) -> range:
        """Every number of nodes that the job may have."""
        least, _, most = self.nnodes.partition(":")
        return range(int(least), int(most or least) + 1)

    @property
    def accelerators(self) -> int:
        """Accelerators per node."""
        return self.ranks if self.gpus < 0 else self.gpus

    @property
    def shown_ranks(self) -> set[int]:
        return {int(rank) for rank in self.log_rank.split(",")}

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of --env."""
        return dict(item.partition("=")[::2] for item in self._assignments)

    @property
    def _assignments(self) -> list[str]:
        """The parts of --env, which begin where a name and an equals sign follow a comma."""
        return re.split(r",(?=[A-Za-z_]\w*=)", self.env) if self.env else []

    def problems(self) -> list[str]:
        found = []
        if self.ranks < 0:
            found.append(f"--ranks must be a number of ranks, got {self.ranks}")
        found += self._node_problems()
        for name in ("restarts", "grace", "notice", "requeues", "cpus"):
            if getattr(self, name) < 0:
                found.append(f"--{name} must not be negative, got {getattr(self, name)}")
        if self.join_timeout < 1:
            found.append(f"--join_timeout must be positive, got {self.join_timeout}")
        if not re.fullmatch(r"\d+(,\d+)*", self.log_rank):
            found.append(f"--log_rank must be numbers of ranks such as 0,1, got {self.log_rank!r}")
        targets = [f"--{name}" for name in ("slurm", "kubernetes", "torchrun") if getattr(self, name)]
        if len(targets) > 1:
            found.append(f"{' and '.join(targets)}: choose one")
        if (self.print_ or self.out) and not targets:
            found.append("--print and --out are for --slurm, --kubernetes and --torchrun")
        for item in self._assignments:
            if not re.fullmatch(r"[A-Za-z_]\w*=.*", item):
                found.append(f"--env: {item!r} is not NAME=VALUE")
        if self.name and not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?", self.name):
            found.append(f"--name {self.name!r}: letters, digits, and - _ . between them")
        return found + self._target_problems()

    def _node_problems(self) -> list[str]:
        found = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", self.nnodes)
        if not found:
            return [f"--nnodes must be a number, or a range such as 62:64, got {self.nnodes!r}"]
        if found[2] and int(found[2]) < int(found[1]):
            return [f"--nnodes {self.nnodes}: the smaller number comes first"]
        if self.nnodes == "1" or self.target:
            return []
        if not self.rdzv_endpoint:
            return [f"--nnodes {self.nnodes} needs --rdzv_endpoint HOST:PORT, where HOST is one of the nodes"]
        host, port = split_endpoint(self.rdzv_endpoint)
        if not host or not 0 < port < 2**16:
            return [f"--rdzv_endpoint must be HOST:PORT, got {self.rdzv_endpoint!r}"]
        return []

    def _target_problems(self) -> list[str]:
        found = []
        if self.target and not self.ranks:
            found.append(f"--{self.target} needs --ranks, the number of ranks on each node")
        if self.kubernetes:
            found += [f"--kubernetes needs --{name}" for name in ("image", "volume") if not getattr(self, name)]
            if self.volume and not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?:/\S+", self.volume):
                found.append(f"--volume must be CLAIM:/PATH, got {self.volume!r}")
        of_slurm, of_kubernetes = ("partition", "account", "time", "sbatch"), ("image", "volume", "namespace", "queue")
        for target, names in (("slurm", of_slurm), ("kubernetes", of_kubernetes)):
            if self.target != target:
                found += [f"--{name} is for --{target}" for name in names if getattr(self, name)]
        if self.slurm:
            found += self._slurm_problems()
        return found

    def _slurm_problems(self) -> list[str]:
        found = []
        try:
            shlex.split(self.sbatch)
        except ValueError as error:
            found.append(f"--sbatch {self.sbatch}: {str(error).lower()}")
        limit = seconds_of(self.time) if self.time else math.inf
        if limit is None:
            found.append(f"--time must be a time limit of Slurm, such as 24:00:00 or 2-12:00:00, got {self.time!r}")
        elif limit <= self.notice:
            found.append(f"--notice {self.notice} is not shorter than --time {self.time}: nothing would be trained")
        return found


def seconds_of(limit: str) -> float | None:
    """A time limit of Slurm in seconds, infinite for UNLIMITED and 0 (which are no limit); None if it is malformed.

    Slurm has minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes and
    days-hours:minutes:seconds.
    """
    if limit.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit, re.ASCII)
    if not found:
        return None
    days, *parts = found.groups()
    values = [int(part) for part in parts if part is not None]
    units = (3600, 60, 1) if days is not None or len(values) == 3 else (60, 1)
    seconds = sum(value * unit for value, unit in zip(values, units, strict=False))
    return int(days or 0) * 86400 + seconds or math.inf


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """The host and the port of HOST, HOST:PORT or [IPv6]:PORT; ("", -1) if it is malformed."""
    found = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\s]+))(?::(\d+))?", endpoint)
    if not found:
        return "", -1
    return found[1] or found[2], int(found[3] or DEFAULT_PORT)
