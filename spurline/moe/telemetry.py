"""Fast-path counters: which path ran, how often, with how much padding. And what row counts say about routing.

Off by default and then free. `SPURLINE_COUNTERS=0` switches them on for rank 0, `SPURLINE_COUNTERS=0,3` for some ranks,
`SPURLINE_COUNTERS=all` for every rank; each prints one sorted line at exit. From Python: `enable`, `counters`, `reset`.
"""

import atexit
import math
import os
import sys
from collections.abc import Sequence

import torch

_on = False
_counts: dict[str, int] = {}


def count(path: str, amount: int = 1) -> None:
    """Note that `path` ran; free when counters are off, silent while compiling."""
    if _on and not torch.compiler.is_compiling():
        _counts[path] = _counts.get(path, 0) + amount


def enable(on: bool = True) -> None:
    global _on
    _on = on


def counters() -> dict[str, int]:
    """What was counted since the last reset, sorted by name."""
    return dict(sorted(_counts.items()))


def reset() -> None:
    _counts.clear()


def _enable_from_environment() -> None:
    wanted = os.environ.get("SPURLINE_COUNTERS", "").strip()
    rank = os.environ.get("RANK", "0")
    if wanted and (wanted == "all" or rank in [part.strip() for part in wanted.split(",")]):
        enable()
        atexit.register(_print_line, rank)


def _print_line(rank: str) -> None:
    line = " ".join(f"{path}={amount}" for path, amount in counters().items()) or "empty"
    print(f"spurline counters rank {rank}: {line}", file=sys.stderr, flush=True)


_enable_from_environment()


def routing_statistics(rows_per_expert: Sequence[float]) -> dict[str, float]:
    """How even the routing is: load (max over mean), entropy (1 = even, 0 = one expert), dead experts."""
    total = sum(rows_per_expert)
    if not total:
        return {"load": 0.0, "entropy": 0.0, "dead_experts": float(len(rows_per_expert))}
    shares = [rows / total for rows in rows_per_expert if rows]
    entropy = -sum(share * math.log(share) for share in shares)
    return {
        "load": max(rows_per_expert) * len(rows_per_expert) / total,
        "entropy": entropy / math.log(len(rows_per_expert)) if len(rows_per_expert) > 1 else 1.0,
        "dead_experts": float(len(rows_per_expert) - len(shares)),
    }
