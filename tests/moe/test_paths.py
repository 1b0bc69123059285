"""Each path can be forced, and the counters show that it ran."""

import os
import subprocess
import sys

import pytest
import torch

from spurline import MoE, MoEConfig
from spurline.moe import telemetry


def run(grad: bool, **changes: object) -> dict[str, int]:
    config = MoEConfig(**({"dim": 8, "hidden_dim": 16, "num_experts": 4, "top_k": 2} | changes))
    moe = MoE(config)
    telemetry.reset()
    telemetry.enable()
    try:
        with torch.set_grad_enabled(grad):
            moe(torch.randn(6, 8))
        return telemetry.counters()
    finally:
        telemetry.enable(False)


@pytest.mark.parametrize(
    ("path", "grad", "changes"),
    [
        ("experts.loop", True, {"experts_backend": "loop"}),
        ("experts.grouped_mm", True, {"experts_backend": "grouped_mm"}),
        ("experts.on_tokens", True, {}),
        ("experts.on_tokens", False, {"experts_backend": "stream"}),
        ("experts.bmm", True, {"experts_backend": "bmm", "force_load_balance": True}),
        ("experts.fused_weights", False, {"force_load_balance": True}),
        ("scatter.in_place", False, {"experts_backend": "loop"}),
        ("scatter.in_place", False, {"experts_backend": "loop", "num_shared_experts": 1}),
        ("scatter.out_of_place", True, {"experts_backend": "loop"}),
        ("weigh.before_experts", True, {"score_before_experts": True}),
        ("weigh.after_experts", True, {"experts_backend": "loop"}),
        ("weigh.after_experts", True, {"experts_backend": "stream"}),
    ],
)
def test_the_forced_path_runs(path: str, grad: bool, changes: dict[str, object]) -> None:
    counted = run(grad, **changes)
    assert counted[path] == 1
    kind = path.split(".")[0]
    assert [name for name in counted if name.startswith(kind)] == [path]


def test_counters_are_off_by_default() -> None:
    telemetry.reset()
    MoE(MoEConfig(dim=8, hidden_dim=8))(torch.randn(3, 8))
    assert telemetry.counters() == {}


def test_counters_are_silent_while_compiling() -> None:
    moe = torch.compile(MoE(MoEConfig(dim=8, hidden_dim=8)), fullgraph=True, backend="aot_eager")
    telemetry.reset()
    telemetry.enable()
    try:
        moe(torch.randn(3, 8))
        assert telemetry.counters() == {}
    finally:
        telemetry.enable(False)


@pytest.mark.parametrize(
    ("wanted", "rank", "printed"),
    [
        ("0", "0", True),
        ("0", "1", False),
        ("1, 3", "3", True),
        ("1,3", "2", False),
        ("all", "7", True),
        ("", "0", False),
    ],
)
def test_the_line_at_exit(wanted: str, rank: str, printed: bool) -> None:
    script = "from spurline.moe.telemetry import count; count('b.two', 2); count('a.one'); count('b.two')"
    assert exit_line(script, wanted, rank) == ([f"spurline counters rank {rank}: a.one=1 b.two=3"] if printed else [])


def test_the_line_at_exit_when_nothing_ran() -> None:
    assert exit_line("import spurline.moe.telemetry", "all", "0") == ["spurline counters rank 0: empty"]


def exit_line(script: str, wanted: str, rank: str) -> list[str]:
    environment = os.environ | {"SPURLINE_COUNTERS": wanted, "RANK": rank}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return [line for line in done.stderr.splitlines() if "counters" in line]


def test_routing_statistics() -> None:
    assert telemetry.routing_statistics([2, 2, 2, 2]) == {"load": 1.0, "entropy": 1.0, "dead_experts": 0.0}
    assert telemetry.routing_statistics([8, 0, 0, 0]) == {"load": 4.0, "entropy": 0.0, "dead_experts": 3.0}
    assert telemetry.routing_statistics([0, 0]) == {"load": 0.0, "entropy": 0.0, "dead_experts": 2.0}
