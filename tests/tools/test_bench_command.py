"""spurline bench: what it measures is what it says, and what it finds is held against targets. No time is judged."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from spurline import MoE, MoEConfig
from spurline.bench import suites
from spurline.bench.cases import CASES, Case
from spurline.bench.figures import TARGETS, Figure, missed_targets
from spurline.bench.layers import Candidate, Contest, _other_kernels, check_agreement, make_contest
from spurline.bench.measure import Timing, interleave
from spurline.bench.step import _Worker
from spurline.tools.bench import main

TINY = Case("small", 16, 12, 4, 2, 9)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(CASES, "small", TINY)


@pytest.mark.parametrize("routing", ["balanced", "zipf", "one_hot", "uniform"])
def test_the_floor_multiplies_what_the_experts_multiply(routing: str) -> None:
    contest = make_contest(replace(TINY, routing=routing, num_tokens=40), peers=False)
    floor = contest.floor
    rows, w1, w3, w2 = (t.clone().requires_grad_() for t in (floor.rows_RD, floor.w1, floor.w3, floor.w2))
    outs = [
        F.linear(F.silu(F.linear(rows[span], w1[e])) * F.linear(rows[span], w3[e]), w2[e])
        for e, span in enumerate(floor.spans)
    ]
    out = torch.cat(outs)
    out.backward(floor.grad_RD)
    floor.forward_and_backward()
    for found, expected in (
        (floor.out_RD, out),
        (floor.dx_RD, rows.grad),
        (floor.dw1, w1.grad),
        (floor.dw3, w3.grad),
        (floor.dw2, w2.grad),
    ):
        torch.testing.assert_close(found, expected.detach())


def test_cases_are_routed_as_they_say() -> None:
    counts = {}
    for routing in ("balanced", "zipf", "one_hot", "uniform"):
        case = Case("x", 64, 8, 16, 2, 800, routing)
        contest = make_contest(case, peers=False)
        counts[routing] = sorted((span.stop - span.start for span in contest.floor.spans), reverse=True)
    assert counts["one_hot"] == [800, 800] + [0] * 14
    assert counts["uniform"] == [100] * 16
    assert counts["zipf"][0] > 2 * counts["balanced"][0]


def test_padding_and_dropped_rows_of_dispatchers_by_routing(monkeypatch) -> None:
    shape = {"dim": 64, "hidden_dim": 8, "num_experts": 16, "top_k": 2, "num_tokens": 800}
    for routing in ("balanced", "one_hot"):
        monkeypatch.setitem(CASES, routing, Case(routing, **shape, routing=routing))
    figures = list(suites.SUITES["dispatchers"](1, 1.0, ["balanced", "one_hot", "decode"]))
    found = {(figure.case, figure.what, figure.candidate): figure.value for figure in figures}
    assert {case for case, *_ in found} == {"balanced", "one_hot"}
    # 1600 rows: two experts want 800 each, and have 125 places of 2000, or 200 of 3200; the others have empty ones.
    assert found["one_hot", "dropped rows", "capacity 1.25"] == pytest.approx(100 * (1600 - 250) / 1600)
    assert found["one_hot", "padding", "capacity 1.25"] == pytest.approx(100 * (2000 - 250) / 1600)
    assert found["one_hot", "dropped rows", "capacity 2"] == pytest.approx(100 * (1600 - 400) / 1600)
    assert found["one_hot", "padding", "local"] == found["one_hot", "padding", "aligned 32"] == 0
    assert 0 < found["balanced", "padding", "aligned 32"] < 16 * 31 * 100 / 1600
    assert found["balanced", "dropped rows", "local"] == 0
    for case in ("balanced", "one_hot"):  # static sizes: what is kept does not follow the routing
        assert found[case, "saved for backward", "capacity 2"] > found[case, "saved for backward", "capacity 1.25"] > 0


def test_a_layer_that_computes_something_else_is_told() -> None:
    contest = make_contest(TINY, peers=False)
    ours = contest.candidates["spurline"]
    other = make_contest(replace(TINY, num_experts=5), peers=False).candidates["spurline"].layer
    both = Contest(contest.floor, {"spurline": ours, "other": Candidate(other, ours.x, ours.grad)})
    (line,) = check_agreement(both, 1e-4)
    assert line.startswith("other differs from spurline by ")


def test_candidates_take_turns_and_each_round_starts_with_another() -> None:
    ran: list[str] = []
    times = interleave({name: lambda name=name: ran.append(name) for name in "abc"}, seconds=0, least=4)
    assert "".join(ran) == "abc" + "abc" + "bca" + "cab" + "abc"
    assert {len(timing.seconds) for timing in times.values()} == {4}


def test_a_ratio_is_taken_round_by_round() -> None:
    # The machine was slow in two rounds: the ratio of medians would be 1.5.
    ours, floor = Timing([2.0, 20.0, 3.0]), Timing([2.0, 20.0, 2.0])
    assert ours.ratio_to(floor) == 1.0


def test_targets_that_are_missed_are_told_with_figure_and_limit() -> None:
    fine = Figure("layers", "medium", "forward", "spurline", 1.0, "ms", 1, None, 1.06, 0.9)
    slow = replace(fine, to_floor=1.061, threads=2)
    peer = replace(fine, candidate="torchtitan", to_floor=1.4)
    slower_than_peer = replace(fine, case="decode", to_best_peer=1.2)
    assert missed_targets([fine, peer]) == []
    assert missed_targets([slow, slower_than_peer]) == [
        "layers medium, forward, 2 threads: 1.061 x the floor, target 1.06",
        "layers decode, forward, 1 thread: 1.200 x the best peer, target 1",
    ]


def test_every_target_belongs_to_something_that_is_measured() -> None:
    assert {target.part for target in TARGETS} <= set(suites.SUITES)
    for target in TARGETS:
        assert set(target.cases) <= set(CASES) or target.part == "step"


def test_the_command_prints_a_table_and_writes_all_figures(tiny, tmp_path, capsys) -> None:
    file = tmp_path / "figures.json"
    options = ["--parts", "layers", "--cases", "small", "--threads", "1", "--seconds", "0.01", "--json", str(file)]
    assert main(options) == 0
    figures = json.loads(file.read_text())
    found = {(f["what"], f["candidate"]) for f in figures}
    assert {(what, who) for what in ("forward", "forward+backward") for who in ("floor", "spurline")} <= found
    assert all(f["part"] == "layers" and f["case"] == "small" and f["value"] > 0 and f["to_floor"] > 0 for f in figures)
    told = capsys.readouterr().out
    assert "layers small, forward, 1 thread\n" in told
    assert "x floor" in told


def test_check_ends_with_an_error_where_a_target_is_missed(tiny, monkeypatch, capsys) -> None:
    figure = Figure("layers", "small", "forward", "spurline", 1.0, "ms", 1, None, 1.2)
    options = ["--parts", "layers", "--cases", "small", "--threads", "1", "--check"]
    monkeypatch.setitem(suites.SUITES, "layers", lambda *_: iter([figure]))
    assert main(options) == 1
    assert "missed layers small, forward, 1 thread: 1.200 x the floor, target 1.1" in capsys.readouterr().out
    monkeypatch.setitem(suites.SUITES, "layers", lambda *_: iter([replace(figure, to_floor=1.0)]))
    assert main(options) == 0
    assert "all targets met" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--parts", "layer"], "--parts: there is no 'layer'"),
        (["--cases", "tiny"], "--cases: there is no 'tiny'"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--seconds", "0"], "--seconds must be positive, got 0"),
    ],
)
def test_bad_options_are_told_in_one_line(options, complaint, capsys) -> None:
    assert main(options) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert complaint in told[0]


def test_a_step_whose_process_ends_is_left_out() -> None:
    worker = _Worker("no such config", "transformers eager", 1)
    worker._process.wait()  # others are asked first, so it is long gone when its turn comes
    assert not worker.is_there()
    worker.end()


def test_a_device_that_is_not_here_is_told_in_one_line(spurline) -> None:
    code, _, err = spurline("bench", "--device", "xpu")
    assert code == 2
    assert err.startswith("spurline bench: device xpu: ")
    assert "--device auto or cpu" in err


def test_suites_of_cpus_are_refused_on_an_accelerator(capsys) -> None:
    assert main(["--device", "auto", "--parts", "ranks"]) == 2
    assert "--parts ranks runs on CPUs only" in capsys.readouterr().err


def test_every_kernel_of_an_accelerator_is_timed_beside_the_chosen_one() -> None:
    ours = MoE(MoEConfig(dim=16, hidden_dim=16, num_experts=4), device="cpu")
    assert not _other_kernels(ours, torch.empty(1, 4, 16))
    others = _other_kernels(ours, torch.empty(1, 4, 16, device="meta", dtype=torch.bfloat16))
    assert {name: layer.experts.backend for name, layer in others.items()} == {"spurline grouped_mm": "grouped_mm"}
    assert torch.equal(others["spurline grouped_mm"].experts.w1_EFD, ours.experts.w1_EFD)
    figures = [Figure("layers", "small", "forward", who, 2.0, "ms", 1) for who in ("spurline triton", "torchtitan")]
    assert [figure.to_best_peer for figure in suites._with_ratios(figures)] == [1.0, 1.0]
    assert suites._with_ratios(figures[:1])[0].to_best_peer is None
