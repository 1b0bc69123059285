"""How the nodes of a job meet, round after round: torchrun's own c10d rendezvous, with a store that all learn of."""

from __future__ import annotations

import contextlib
import os
import secrets
import time

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from spurline.launch.network import address_towards, is_own_address, wait_for_name
from spurline.launch.options import Options, split_endpoint
from spurline.parallel.rendezvous import JOB_VARIABLE
from spurline.train.launcher import ATTEMPT_VARIABLE

SECONDS_TO_LEAVE = 20.0
"""More than ranks wait for the first one to tell an error that all of them have (tools/console.py)."""


class Rounds(RendezvousHandler):
    """torchrun's rendezvous, except that each round tells all nodes where the ranks' store is, and has a number.

    torchrun tells it in the first round only: a node that comes in later waits for it forever, and one that was lost
    may have served it. It counts restarts on each node by itself, so that a new node counts fewer.

    The first node serves the same store in all rounds, for as long as it is the first: ranks that are started again
    find there what those before them have left (the folder of the run), and keep the rest apart by the round's number.
    """

    def __init__(self, inner: RendezvousHandler, address: str, store: dist.Store, is_host: bool) -> None:
        """`store` is where the nodes meet; it ends with the node that `is_host`."""
        self._inner, self.address, self._store, self._is_host = inner, address, store, is_host
        self._server: dist.TCPStore | None = None
        self._num_nodes = 1

    def next_rendezvous(self) -> RendezvousInfo:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # read by the inner one: no store of its own
        info = self._inner.next_rendezvous()
        self._num_nodes = info.world_size
        store = info.store  # its keys are those of this round
        if info.rank == 0:
            self._server = self._server or dist.TCPStore(self.address, 0, is_master=True, wait_for_workers=False)
            before = self._store.add("spurline/rounds", 1) - 1
            own = self._store.compare_set("spurline/job", "", secrets.token_hex(8)).decode()
            store.set("spurline/round", f"{before} {self._server.port} {self.address} {own}")
        else:
            self._server = None
        number, port, address, job = store.get("spurline/round").decode().split()
        os.environ |= {ATTEMPT_VARIABLE: number, JOB_VARIABLE: job}
        return RendezvousInfo(store, info.rank, info.world_size, RendezvousStoreInfo(address, int(port)))

    def leave(self) -> None:
        """End after the others, if they meet here: their ranks end for the same reason, and each has its own code."""
        with contextlib.suppress(dist.DistError, SignalException):
            left, deadline = self._store.add("spurline/left", 1), time.monotonic() + SECONDS_TO_LEAVE
            while self._is_host and left < self._num_nodes and time.monotonic() < deadline:
                time.sleep(0.1)
                left = self._store.add("spurline/left", 0)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return self._inner.get_backend()

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()


def meeting_place(options: Options) -> Rounds:
    """Serve or join the rendezvous of a job; a RendezvousConnectionError if there is nobody at the endpoint."""
    endpoint = options.rdzv_endpoint or "localhost:0"
    host, _ = split_endpoint(endpoint)
    if not wait_for_name(host, options.join_timeout):
        raise RendezvousConnectionError(f"{host} is not known")
    address = address_towards(host) if options.rdzv_endpoint else "127.0.0.1"
    # One of several agents on the endpoint's machine serves it; the others find the port taken and join.
    for is_host in (True, False) if is_own_address(host) else (False,):
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=endpoint,
            run_id=options.rdzv_id,
            min_nodes=options.nodes[0],
            max_nodes=options.nodes[-1],
            local_addr=address,
            is_host=str(is_host),
            join_timeout=options.join_timeout,
            read_timeout=options.join_timeout if not is_host else 60,
        )
        try:
            backend, store = create_backend(parameters)
        except RendezvousConnectionError:
            if not is_host:
                raise
            continue
        return Rounds(create_handler(store, backend, parameters), address, store, is_host)
    raise AssertionError("unreachable: the last attempt returns or raises")
