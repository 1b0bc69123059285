"""The process of one rank: joins a gloo process group, calls functions, and sends back their results."""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from spurline.testing.messages import Call, Raised, Returned, World


def serve(connection: Connection, stack_path: str) -> None:
    """Handle calls until the connection closes; SIGUSR1 writes the current stack to `stack_path`."""
    gc.freeze()  # collections need not look at what the fork server has imported, nor copy its memory
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then stops its ranks
    stack_file = open(stack_path, "w")  # noqa: SIM115 - stays open for the life of the process
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Ranks outnumber cores.
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    # All ranks are local; don't depend on host name resolution.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    connection.send_bytes(pickle.dumps("ready"))

    world: World | None = None
    while True:
        try:
            call: Call = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        if call.world != world:
            _leave_world()
            _join_world(call.rank, call.world)
            world = call.world
        reply = _answer(call)
        sys.stdout.flush()
        connection.send_bytes(pickle.dumps(reply))
        # Graphs compiled by one call must not count against the recompile limit of the next.
        torch._dynamo.reset()


def _end_with_parent() -> None:
    """Exit when the parent process is gone, even from within a collective."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _join_world(rank: int, world: World) -> None:
    # Not a TCPStore, which sometimes takes five seconds to reconnect after a group was destroyed.
    store = dist.FileStore(world.store_path, world.size)
    # The pool has its own timeout, with a report of where each rank is; gloo's must not fire first.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world.size, timeout=timedelta(days=1))


def _leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
        # This cache compares meshes by ranks, and would return meshes of the destroyed group.
        _clear_sharding_prop_cache()


def _answer(call: Call) -> Returned | Raised:
    sys.path[:] = call.sys_path
    os.chdir(call.folder)
    torch.manual_seed(0)
    try:
        function, args = pickle.loads(call.function_and_args)
        result = pickle.dumps(function(call.rank, *args))
    except BaseException as error:
        error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)  # without this frame
        summary = traceback.format_exception_only(error)[-1].strip()
        return Raised(summary, "".join(traceback.format_exception(error)), _pickled_or_none(error))
    if not dist.is_initialized():
        return Returned(result, num_collectives=0, num_groups=0)
    world_group: Any = dist.group.WORLD  # its type stub lacks the method below
    num_collectives = world_group._get_sequence_number_for_group()
    return Returned(result, num_collectives, len(c10d._world.pg_map))


def _pickled_or_none(error: BaseException) -> bytes | None:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        return None
    return pickled
