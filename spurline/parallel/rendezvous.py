"""Rendezvous of ranks before there is a process group: a key-value store, served by the launcher or by rank 0."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

JOB_VARIABLE = "SPURLINE_JOB"
_MAX_SHOWN = 5
_SECONDS_TO_READ = 10.0


@dataclass(frozen=True)
class Meeting:
    """The ranks of one attempt of a run; a restarted run has a new meeting, and sees nothing of earlier attempts."""

    rank: int
    size: int
    store: dist.Store
    """For process groups."""
    side_store: dist.Store
    """The same keys through a separate connection, which is not blocked by operations on `store`."""


def meet(timeout_seconds: int = 0) -> Meeting:
    """Join the store given by torchrun's environment variables.

    torchrun's store outlives a restart, and gloo reads the addresses of the ranks from it: without a prefix for each
    attempt, restarted ranks would wait for killed ones.
    """
    timeout = timedelta(seconds=timeout_seconds) if timeout_seconds else distributed_c10d.default_pg_timeout
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"spurline/attempt_{attempt}_of_{size}"
    return Meeting(rank, size, dist.PrefixStore(prefix, store), dist.PrefixStore(prefix, store.clone()))


def job_of_launcher() -> str:
    """A unique id of the job, the same for all its attempts, on all nodes; empty without a launcher.

    `spurline launch` passes it to its ranks; under torchrun, the first rank to ask writes it to the store, which
    outlives restarts.
    """
    if JOB_VARIABLE in os.environ or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return os.environ.get(JOB_VARIABLE, "")
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return store.compare_set("spurline/job", "", secrets.token_hex(8)).decode()


def refuse_different_options(meeting: Meeting, options: Mapping[str, str]) -> None:
    """Raise the same ValueError on all ranks if they were started with different options, or run different code.

    Rank 0 compares them through the store: ranks with different options might not even create the same process groups.
    Ranks wait in `store`, which leaves `side_store` to those that watch them.
    """
    store, rank = meeting.store, meeting.rank
    store.set(f"options/{rank}", json.dumps(dict(options)))
    if rank == 0:
        keys = [f"options/{other}" for other in range(meeting.size)]
        store.wait(keys)
        by_rank = [json.loads(text) for text in store.multi_get(keys)]
        agree = all(options == by_rank[0] for options in by_rank)
        store.set("options/verdict", "" if agree else describe_differences(by_rank))
    if problem := store.get("options/verdict").decode():
        store.add("options/read", 1)
        deadline = time.monotonic() + _SECONDS_TO_READ
        while rank == 0 and store.add("options/read", 0) < meeting.size and time.monotonic() < deadline:
            time.sleep(0.05)  # without torchrun, the store ends with this rank
        raise ValueError(problem)


def describe_differences(by_rank: list[dict[str, str]]) -> str:
    """One line with the options that differ, and each value with its ranks."""
    names = list(dict.fromkeys(name for options in by_rank for name in options))
    differing = []
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank, options in enumerate(by_rank):
            ranks_of.setdefault(options.get(name, "absent"), []).append(rank)
        if len(ranks_of) > 1:
            values = [f"{value} on {name_ranks(ranks)}" for value, ranks in ranks_of.items()]
            differing.append(f"{name} is {' and '.join(values)}")
    more = f"; and {len(differing) - _MAX_SHOWN} more" if len(differing) > _MAX_SHOWN else ""
    shown = "; ".join(differing[:_MAX_SHOWN])
    return f"ranks were started with different options: {shown}{more}. Start all ranks with the same command"


def name_ranks(ranks: list[int]) -> str:
    """Text such as: rank 3; ranks 0, 1, 3; ranks 0 to 6, 8."""
    spans: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = spans[-1][0], rank
        else:
            spans.append((rank, rank))
    words = [
        f"{first} to {last}" if last - first > 1 else ", ".join(map(str, range(first, last + 1)))
        for first, last in spans
    ]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(words)}"
