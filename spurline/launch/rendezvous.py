"""The rendezvous of a job's nodes: torchrun's c10d rendezvous, with the ranks' store announced in every round."""

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
"""Longer than ranks wait for rank 0 to report an error that all of them have (tools/console.py)."""


class Rounds(RendezvousHandler):
    """torchrun's rendezvous, except that each round has a number and announces the address of the ranks' store.

    torchrun announces it in the first round only: a node that joins later waits for it forever, and the node that
    served it may be lost. torchrun also counts restarts per node, so a new node has a lower count.

    The first node serves the same store in all rounds, as long as it stays the first: restarted ranks find there what
    earlier ranks left (the folder of the run), and use the round number to keep everything else apart.
    """

    def __init__(self, inner: RendezvousHandler, address: str, store: dist.Store, is_host: bool) -> None:
        """`store` is the store of the rendezvous; it ends with the `is_host` node."""
        self._inner, self.address, self._store, self._is_host = inner, address, store, is_host
        self._server: dist.TCPStore | None = None
        self._num_nodes = 1

    def next_rendezvous(self) -> RendezvousInfo:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # the inner handler then makes no store of its own
        info = self._inner.next_rendezvous()
        self._num_nodes = info.world_size
        store = info.store  # its keys are private to this round
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
        """If this node hosts the rendezvous, exit last, so that the other nodes can return their own exit codes."""
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
    """Serve or join the rendezvous of a job; raises a RendezvousConnectionError if the endpoint does not answer."""
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
