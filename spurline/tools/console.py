"""What every command says the same way. Free of torch."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

SECONDS_FOR_THE_FIRST_RANK = 10.0


def complain(prog: str, problems: list[str]) -> int:
    """Tell the user on stderr everything that is wrong, a line each; returns the exit code of a wrong command."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        # Under torchrun, all ranks find the same problems and the first one tells them: with its end torchrun ends the
        # others. Who is still there then has a problem of its own.
        time.sleep(SECONDS_FOR_THE_FIRST_RANK)
        prog = f"{prog}, rank {rank}"
    if len(problems) == 1:
        print(f"{prog}: {problems[0]}", file=sys.stderr)
    else:
        print("\n  ".join([f"{prog}: {len(problems)} problems", *problems]), file=sys.stderr)
    return 2


def human(number: float, units: Sequence[str] = ("", "K", "M", "B", "T")) -> str:
    """Three digits and a unit: 842, 3.68M, 9.41B."""
    for unit in units[:-1]:
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}{units[-1]}"


def human_flops(number: float) -> str:
    """Three digits and a unit: 11.1 MFLOP, 45.4 GFLOP."""
    return human(number, [f" {prefix}FLOP" for prefix in ("", *"KMGTPEZY")])
