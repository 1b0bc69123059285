"""Run the ranks of this machine under torchrun's elastic agent, and return their exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from spurline.launch.network import interface_of
from spurline.launch.options import Options
from spurline.launch.rendezvous import Rounds, meeting_place
from spurline.launch.shared_disk import refuse_unless_shared
from spurline.launch.signals import Signals
from spurline.train.exit_codes import ExitCode, RefusedError, exit_code_of_signal
from spurline.train.launcher import LAUNCHER_VARIABLE
from spurline.train.stop_signal import STOP_SIGNALS

STOPPED_CODES = {ExitCode.STOPPED, *(exit_code_of_signal(number, saved=False) for number in STOP_SIGNALS)}


class LaunchError(ValueError):
    """An error of the launcher itself, shown to the user as one line."""


class Agent(LocalElasticAgent):
    """torchrun's agent, with our own rules for shutting down ranks."""

    def __init__(
        self, spec: WorkerSpec, place: Rounds, logs: LogsSpecs, grace: int, signals: Signals, folder: Path | None
    ) -> None:
        super().__init__(spec, logs, log_line_prefix_template="[rank${rank}]:", shutdown_timeout=grace)
        self.place, self._signals, self._folder = place, signals, folder
        self.was_hurried = False
        """Whether a second signal arrived while ranks were shutting down."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        node, num_nodes, store = worker_group.group_rank, worker_group.group_world_size, worker_group.store
        if self._folder and num_nodes and num_nodes > 1:
            assert store is not None
            assert node is not None
            refuse_unless_shared(self._folder, store, node, num_nodes)
        with self._signals.deferred():
            return super()._start_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None) -> None:
        try:
            super()._shutdown(death_sig, self._shutdown_timeout)
        except SignalException:
            self.was_hurried = True
            assert self._pcontext is not None
            self._pcontext.close(signal.SIGKILL)
            raise

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Don't count ranks that stopped on request as failures: end on all nodes, or restart if nodes wait to join.

        Ranks that refused to start are not restarted either.
        """
        result = super()._monitor_workers(worker_group)
        if any(is_final(failure) for failure in result.failures.values()):
            self._remaining_restarts = 0
        codes = {failure.exitcode for failure in result.failures.values()} - {-signal.SIGTERM}
        if codes and codes <= STOPPED_CODES:
            others_wait = worker_group.spec.rdzv_handler.num_nodes_waiting() > 0
            self._remaining_restarts = self._remaining_restarts + 1 if others_wait else 0
        return result

    def exit_codes(self) -> list[int]:
        """The exit codes of this machine's ranks, as a shell reports them, without ranks that are still running."""
        handlers: dict[int, Any] = getattr(self._pcontext, "subprocess_handlers", {})
        return [shell_code(handler.proc.poll()) for handler in handlers.values() if handler.proc.poll() is not None]


def run_ranks(options: Options, command: list[str], folder: Path | None = None) -> int:
    """Start the ranks of this node together with the other nodes; returns the exit code of the run.

    Raises a RefusedError if there is a `folder` for the run, or for numbered runs, that the nodes do not share.
    """
    _set_environment(options)
    try:
        place = meeting_place(options)
    except RendezvousConnectionError:
        raise LaunchError(_nobody_at(options)) from None
    if options.rdzv_endpoint and not options.interface and (interface := interface_of(place.address)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    spec = WorkerSpec(
        role="rank",
        local_world_size=options.ranks,
        entrypoint=command[0],
        args=tuple(argument.replace("$", "$$") for argument in command[1:]),
        rdzv_handler=place,
        max_restarts=options.restarts,
        monitor_interval=0.1,
        local_addr=place.address,
    )
    with Signals() as signals, tempfile.TemporaryDirectory(prefix="spurline_ranks_") as scratch:
        logs = DefaultLogsSpecs(log_dir=scratch, tee=Std.ALL, local_ranks_filter=options.shown_ranks)
        return _run(Agent(spec, place, logs, options.grace, signals, folder), options)


def _set_environment(options: Options) -> None:
    if options.ranks > 1:  # CPU ranks share the cores
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if options.interface else ():
        os.environ[name] = options.interface
    os.environ |= options.variables
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # the ranks and the launcher report errors themselves
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _run(agent: Agent, options: Options) -> int:
    place = agent.place
    try:
        result = agent.run()
    except SignalException as stop:
        codes = agent.exit_codes()
        is_whole = len(codes) == options.ranks and not agent.was_hurried
        if is_whole:
            place.leave()
        return max(codes) if is_whole else shell_code(-stop.sigval)
    except RefusedError:
        place.leave()
        raise
    except RendezvousTimeoutError:
        raise LaunchError(
            f"there were not {options.nodes[0]} nodes at {options.rdzv_endpoint} within {options.join_timeout} s: start"
            " the same command on every node"
        ) from None
    except RendezvousClosedError:
        raise LaunchError("the job has ended on the other nodes; see their output") from None
    except (RendezvousError, dist.DistError) as error:
        raise LaunchError(
            f"the connection to {options.rdzv_endpoint} is lost: the job has ended there, or that node is gone"
            f" ({str(error).splitlines()[0]})"
        ) from None
    place.shutdown()
    if result is None or not result.is_failed():
        return ExitCode.FINISHED
    rank, failure = first_failure(result.failures)
    if failure.exitcode not in STOPPED_CODES:
        _tell(rank, failure, is_shown=failure.local_rank in options.shown_ranks)
    place.leave()
    return shell_code(failure.exitcode)


def _nobody_at(options: Options) -> str:
    return f"no connection to {options.rdzv_endpoint or 'localhost'}: is the job running on that node?"


def first_failure(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank that failed first; ranks that lost a peer or were terminated because of it come last."""
    consequences = (ExitCode.LOST_RANK, -signal.SIGTERM)
    return min(failures.items(), key=lambda item: (item[1].exitcode in consequences, item[1].timestamp))


def is_final(failure: ProcessFailure) -> bool:
    """Whether the rank has reported that a restart would fail in the same way."""
    details = failure.message.get("extraInfo") if isinstance(failure.message, dict) else None
    return isinstance(details, dict) and details.get("is_final") is True


def _tell(rank: int, failure: ProcessFailure, is_shown: bool) -> None:
    """Print one line about the failed rank, with its message unless that was already shown."""
    if failure.exitcode < 0:
        how = f"was killed by {failure.signal_name()}"
    else:
        how = f"ended with exit code {failure.exitcode}"
        content = failure.error_file_data.get("message", "")
        message = content.get("message", "") if isinstance(content, dict) else ""
        if message and not is_shown:
            how += f": {message}"
    print(f"spurline launch: rank {rank} {how}", file=sys.stderr)


def shell_code(code: int) -> int:
    """Convert an exit code to the shell's convention: 128 plus the signal number for a killed process."""
    return 128 - code if code < 0 else code
