"""Output shared by all commands: error reports and number formatting. Torch-free."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from spurline.config_io import ConfigError

SECONDS_FOR_THE_FIRST_RANK = 10.0


def complain(prog: str, problems: list[str], code: int = 2) -> int:
    """Print all problems to stderr, one line each; returns the exit code (default: 2, a usage error)."""
    rank = os.environ.get("RANK", "0")
    if os.environ.get("LOCAL_RANK", rank) != "0":
        # Under torchrun all ranks usually find the same problems. The first rank of a node prints them and exits, and
        # torchrun then stops the others during this sleep; a rank that is still alive afterwards has a problem of its
        # own.
        time.sleep(SECONDS_FOR_THE_FIRST_RANK)
    if rank != "0":
        prog = f"{prog}, rank {rank}"
    if len(problems) == 1:
        print(f"{prog}: {problems[0]}", file=sys.stderr)
    else:
        print("\n  ".join([f"{prog}: {len(problems)} problems", *problems]), file=sys.stderr)
    return code


def run_command(
    prog: str,
    run: Callable[[], int],
    where: str = "",
    interrupted: str = "interrupted",
    reword: Callable[[str], str] = str,
) -> int:
    """Call `run` and return its exit code; an error meant for the user becomes one line on stderr, and exit code 2.

    where: what a system error without a file name is about; reword: applied to messages of Spurline.
    """
    try:
        return run()
    except ConfigError as error:
        return complain(prog, [reword(problem) for problem in error.problems])
    except ValueError as error:
        if not raised_by_us(error):
            raise
        return complain(prog, [reword(str(error))])
    except BrokenPipeError:  # the reader of our output has gone, which `cli.main` handles
        raise
    except OSError as error:
        return complain(prog, [": ".join(filter(None, [str(error.filename or where), error.strerror or str(error)]))])
    except KeyboardInterrupt:
        print("\n" * sys.stderr.isatty() + f"{prog}: {interrupted}", file=sys.stderr)  # a terminal shows ^C
        return 130


@contextmanager
def ended_by_interrupt(prog: str) -> Iterator[None]:
    """While libraries are imported, end at once on Ctrl-C: some (NumPy) drop a KeyboardInterrupt, and all goes on."""

    def end(number: int, frame: object) -> None:
        os.write(2, f"{prog}: interrupted\n".encode())
        os._exit(130)

    is_ours = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if not is_ours or before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def raised_by_us(error: BaseException) -> bool:
    """Whether Spurline raised the error, as a message to the user; other errors are bugs and keep their traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("spurline.")


def human(number: float, units: Sequence[str] = ("", "K", "M", "B", "T")) -> str:
    """Format with three significant digits and a unit: 842, 3.68M, 9.41B."""
    for unit in units[:-1]:
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}{units[-1]}"


def human_flops(number: float) -> str:
    """Format with three significant digits and a unit: 11.1 MFLOP, 45.4 GFLOP."""
    return human(number, [f" {prefix}FLOP" for prefix in ("", *"KMGTPEZY")])


def gib(num_bytes: float) -> str:
    """Format bytes of memory: 12.34 GiB, 87.2 MiB, 4.5 KiB."""
    for unit, name, digits in ((2**30, "GiB", 2), (2**20, "MiB", 1)):
        if num_bytes >= unit / 4:
            return f"{num_bytes / unit:.{digits}f} {name}"
    return f"{num_bytes / 2**10:.1f} KiB"
