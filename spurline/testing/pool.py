"""A pool of local gloo ranks that are reused between calls. For Linux and macOS."""

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from spurline.testing.cpu_time import cpu_seconds
from spurline.testing.failures import RankError, RankFailure, died, raised, stuck
from spurline.testing.messages import Call, Raised, Returned, World

# Imported once, in the fork server: ranks then start in milliseconds and share its memory.
_PRELOAD = ["torch.distributed.fsdp", "torch._dynamo", "spurline.testing.worker"]
# What a call imports, each of its ranks would import again: the trainer takes 0.5 s, the compiler 1 s.
_PRELOAD_IF_IN_USE = ["pytest", "hypothesis", "spurline.train.run", "torch._inductor.compile_fx"]
_SECONDS_TO_START = 600.0
BUSY = 0.01
"""Ranks whose total CPU time is at least this fraction of the timeout are slow, not stuck..."""
MOST_TIMEOUTS = 20
"""... and get up to this many timeouts."""


class RankPool:
    """Long-lived gloo rank processes, started on demand and stopped with the pool.

    The process group is reused by calls with the same world size. After a call that failed, ran different numbers of
    collectives on its ranks, or created process groups, the processes are replaced: any leftover reference to a group
    (such as a cached mesh) keeps gloo threads alive, and processes with many of those have crashed.
    """

    def __init__(self, *, grace: float = 2.0) -> None:
        """`grace`: seconds for the other ranks to return after a rank has failed."""
        self._grace = grace
        self._workers: list[_Worker] = []
        self._world: World | None = None
        self._number = count()
        self._folder: tempfile.TemporaryDirectory[str] | None = tempfile.TemporaryDirectory(prefix="spurline-ranks-")
        atexit.register(self.close)

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call function(rank, *args) on world_size ranks and return the results by rank.

        On the ranks, torch.distributed is initialized, torch uses one thread, and the seed is 0. The function must be
        at the top level of a module; arguments and results are pickled, tensors by value.

        Raises a RankError if a rank raises, dies, or is stuck: not done after `timeout` seconds and not computing
        (on Linux; elsewhere a slow machine can't be told from a hang).
        """
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        name = getattr(function, "__qualname__", repr(function))
        function_and_args = _pickle_call(name, function, args)
        workers = self._first_workers(world_size)
        if self._world is None or self._world.size != world_size:
            self._world = World(world_size, self._fresh_path("store"))
        try:
            for rank, worker in enumerate(workers):
                worker.send(Call(rank, self._world, sys.path, os.getcwd(), function_and_args))
            returned = self._collect(workers, f"{name} failed on {world_size} ranks:", timeout)
        except BaseException:
            # Some ranks may be stuck in a collective or have one in flight: don't reuse any.
            self._world = None
            self._retire(workers)
            raise
        if len({r.num_collectives for r in returned}) > 1 or any(r.num_groups != 1 for r in returned):
            self._world = None
            self._dismiss(workers)
        return [pickle.loads(r.result) for r in returned]

    def close(self) -> None:
        """Stop the processes."""
        self._dismiss(self._workers.copy())
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        atexit.unregister(self.close)

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _dismiss(self, workers: list["_Worker"]) -> None:
        """Let idle processes exit by closing their connections."""
        for worker in workers:
            worker.connection.close()
        for worker in workers:
            worker.process.join(timeout=5)
        self._retire(workers)

    def _retire(self, workers: list["_Worker"]) -> None:
        for worker in workers:
            worker.stop()
            self._workers.remove(worker)

    def _first_workers(self, number: int) -> list["_Worker"]:
        started = [_Worker(self._fresh_path("stack")) for _ in range(len(self._workers), number)]
        try:
            for worker in started:
                worker.wait_until_ready()
        except BaseException:
            for worker in started:
                worker.stop()
            raise
        self._workers += started
        return self._workers[:number]

    def _fresh_path(self, kind: str) -> str:
        if self._folder is None:
            raise ValueError("this RankPool is closed: make a new one")
        return os.path.join(self._folder.name, f"{kind}-{next(self._number)}")

    def _collect(self, workers: list["_Worker"], what: str, timeout: float) -> list[Returned]:
        begin = time.monotonic()
        deadline, last_deadline = begin + timeout, begin + MOST_TIMEOUTS * timeout
        computed = _computed(workers)
        returned: dict[int, Returned] = {}
        failures: list[RankFailure] = []
        rank_of: dict[Any, int] = {worker.connection: rank for rank, worker in enumerate(workers)}
        while rank_of:
            ready = wait(list(rank_of), max(0.0, deadline - time.monotonic()))
            if not ready:
                before, computed = computed, _computed(workers)
                # Ranks that compute are slow, not stuck: the machine may be busy.
                if failures or computed - before < BUSY * timeout or time.monotonic() > last_deadline:
                    break
                deadline = time.monotonic() + timeout
            for rank in [rank_of.pop(connection) for connection in ready]:
                reply = workers[rank].receive()
                if isinstance(reply, Returned):
                    returned[rank] = reply
                elif isinstance(reply, Raised):
                    failures.append(raised(rank, reply))
                else:
                    failures.append(died(rank, workers[rank].process.exitcode))
            if failures:
                deadline = min(deadline, time.monotonic() + self._grace)
        seconds = time.monotonic() - begin
        failures += [stuck(rank, workers[rank].stack(), seconds) for rank in rank_of.values()]
        if failures:
            raise RankError(what, failures)
        return [returned[rank] for rank in range(len(workers))]


def _computed(workers: list["_Worker"]) -> float:
    """CPU seconds of these ranks so far; 0 if the system does not report it."""
    return sum(cpu_seconds(worker.process.pid) or 0.0 for worker in workers if worker.process.pid is not None)


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Like RankPool.run, on ranks that are started for this call only."""
    with RankPool() as pool:
        return pool.run(function, world_size, *args, timeout=timeout)


def _pickle_call(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{name} can't be sent to the ranks: it must be at the top level of a module, and its arguments must"
            f" be picklable ({error})"
        ) from error


def _serve(connection: Connection, stack_path: str) -> None:
    from spurline.testing.worker import serve  # imports torch

    serve(connection, stack_path)


class _Worker:
    """The parent's end of one process."""

    def __init__(self, stack_path: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_PRELOAD, *(name for name in _PRELOAD_IF_IN_USE if name in sys.modules)])
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, stack_path), name="spurline-rank")
        self.process.start()
        theirs.close()
        self._stack_path = Path(stack_path)

    def wait_until_ready(self) -> None:
        if not self.connection.poll(_SECONDS_TO_START) or self.receive() is None:
            raise RuntimeError(
                f"a rank process did not start (exit code {self.process.exitcode}): see its output;"
                ' scripts must start ranks below `if __name__ == "__main__":`'
            )

    def send(self, message: Call) -> None:
        # A dead process is detected when its reply is awaited.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(pickle.dumps(message))

    def receive(self) -> Any:
        """The next message of the process, or None if it is dead."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(timeout=5)
            return None

    def stack(self) -> str:
        """The stack of the process, from faulthandler; empty if it does not respond to a signal within two seconds."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        text = ""
        for _ in range(40):
            time.sleep(0.05)
            before, text = text, self._stack_path.read_text(errors="replace")
            if text and text == before:
                break
        return text

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
