"""Each path can be forced, and the counters show that it ran."""

import os
import subprocess
import sys

import pytest
import torch

from spurline import MoE, MoEConfig
from spurline.moe import telemetry
from spurline.moe.kernels.loop import LoopKernel
from spurline.testing.params import slow_but


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
        ("experts.stream", True, {}),
        ("experts.stream", False, {"experts_backend": "stream"}),
        ("experts.bmm", True, {"experts_backend": "bmm", "force_load_balance": True}),
        ("experts.bmm", False, {"force_load_balance": True}),
        ("fused_weights.misses", False, {"force_load_balance": True}),
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
    assert counted.pop("experts.on_tokens", 1) == 1
    assert counted[path] == 1
    kind = path.split(".")[0]
    assert [name for name in counted if name.startswith(kind)] == [path]


def test_cache_hits_and_bfloat16_weighing_are_counted() -> None:
    moe = MoE(MoEConfig(dim=8, hidden_dim=16, num_experts=4, top_k=2, force_load_balance=True), dtype=torch.bfloat16)
    telemetry.reset()
    telemetry.enable()
    try:
        with torch.no_grad():
            for _ in range(3):
                moe(torch.randn(6, 8, dtype=torch.bfloat16))
        counted = telemetry.counters()
    finally:
        telemetry.enable(False)
    assert counted["fused_weights.misses"] == 1
    assert counted["fused_weights.hits"] == 2
    assert counted["weigh.bfloat16"] == counted["weigh.after_experts"] == 3


def test_a_counted_method_is_untouched_while_counters_are_off() -> None:
    before = LoopKernel.__dict__["run"]
    telemetry.enable()
    assert LoopKernel.__dict__["run"] is not before
    telemetry.enable(False)
    assert LoopKernel.__dict__["run"] is before


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
    ("wanted", "rank", "counts"),
    [
        ("1", 0, True),  # on, for rank 0: not rank 1
        ("1", 1, False),
        ("true", 0, True),
        ("YES", 0, True),
        ("on", 1, False),
        ("rank0", 0, True),
        ("rank1", 1, True),
        ("rank1", 0, False),
        ("1, 3", 3, True),
        ("1,3", 2, False),
        ("rank0,rank3", 3, True),
        ("all", 7, True),
        ("", 0, False),
        ("0", 0, False),
        ("off", 0, False),
    ],
)
def test_the_ranks_that_a_value_names(wanted: str, rank: int, counts: bool) -> None:
    named = telemetry.ranks_that_count(wanted)
    assert named is not None
    assert named(rank) is counts


@pytest.mark.parametrize("wanted", ["maybe", "rank", "0;3", "-1", "1,,3", "ranks0"])
def test_a_value_that_names_no_ranks(wanted: str) -> None:
    assert telemetry.ranks_that_count(wanted) is None


@pytest.mark.parametrize(
    ("wanted", "rank", "printed"),
    slow_but([("1", "1", False), ("1, 3", "3", True)], [("1", "0", True), ("1", "1", False), ("1, 3", "3", True)]),
)
def test_the_line_at_exit(wanted: str, rank: str, printed: bool) -> None:
    script = (
        "import torch; from spurline import MoE, MoEConfig;"
        "MoE(MoEConfig(dim=8, hidden_dim=8, experts_backend='loop'))(torch.randn(3, 8))"
    )
    line = f"spurline counters rank {rank}: experts.loop=1 scatter.out_of_place=1 weigh.after_experts=1"
    assert exit_line(script, wanted, rank) == ([line] if printed else [])


def test_a_value_that_is_not_understood_is_told_and_leaves_counters_off() -> None:
    (line,) = exit_line("import spurline.moe.telemetry", "0;3", "0")
    assert line == (
        "spurline: SPURLINE_COUNTERS='0;3' is not understood, so counters stay off: use 1 for rank 0, all, or"
        " ranks such as 0,3"
    )


def test_the_line_at_exit_when_nothing_ran() -> None:
    assert exit_line("import spurline.moe.telemetry", "all", "0") == ["spurline counters rank 0: empty"]


def exit_line(script: str, wanted: str, rank: str) -> list[str]:
    environment = os.environ | {"SPURLINE_COUNTERS": wanted, "RANK": rank}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return [line for line in done.stderr.splitlines() if "counters" in line]
