"""`spurline verify` on real ranks: what is right passes, and each planted error is found where it is.

The mutants are packages for --import that break one thing on every rank: see tests/distributed/mutants.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spurline.cli import main
from spurline.testing.verification import run
from spurline.testing.verification.cells import TINY_MODEL, Cell
from spurline.testing.verification.run import Verifier

SHARD, TP, EP = Cell(2, clip=True), Cell(2, tp=2, seq_len=13), Cell(2, ep=2)
Verify = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(autouse=True)
def _mutants_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "mutants"))


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verify:
    """Runs `spurline verify --json` on a few cells; returns the exit code, and the cells by their names."""

    def run_command(cells: list[Cell], *argv: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr("spurline.tools.verify.QUICK", cells)
        code = main(["verify", "--json", *argv])
        report = json.loads(capsys.readouterr().out)
        assert report["passed"] == (code == 0)
        return code, {result["cell"]: result for result in report["cells"]}

    return run_command


def test_what_is_right_passes_with_float32_rounding(verify: Verify) -> None:
    cells = [
        Cell(experts="grouped_mm", score="score before", router="sigmoid", micro_batches=2),
        SHARD,
        TP,
        EP,
        Cell(2, ep=2, separate_expert_units=True, remat="selective", exchange="equal split", num_experts="6 experts"),
        Cell(4, replicate=2, tp=2, ep=2, router="groups and bias", balance="batch and z loss"),
        Cell(4, ep=2, etp=2, exchange="forced balance", experts="bmm", balance="no balance loss"),
    ]
    code, results = verify(cells)
    assert [result["problems"] for result in results.values()] == [[]] * len(cells)
    assert code == 0
    for result in results.values():
        assert 0 < result["worst"]["gradient"]["error"] < 1e-5
        assert result["worst"]["rows"]["error"] == 0


def test_missing_reduction_over_tp_is_found_in_router_and_norms(verify: Verify) -> None:
    code, results = verify([SHARD, TP, EP], "--import", "no_reduction_over_tp")
    assert code == 1
    assert [result["passed"] for result in results.values()] == [True, False, True]
    wrong = results[TP.name]["worst"]["gradient"]["beyond_tolerance"]
    assert {"norm.weight", "layers.0.attention_norm.weight", "layers.1.moe.router.gate_ED"} <= set(wrong)
    assert not any(".experts." in name or "embedding" in name for name in wrong)


@pytest.mark.parametrize("context", ["all_gather", "ulysses"])
def test_wrong_positions_on_one_rank_of_context_parallelism_are_found(verify: Verify, context: str) -> None:
    cells = [TP, Cell(2, cp=2, context=context)]
    code, results = verify(cells, "--import", "wrong_positions_on_one_rank")
    assert code == 1
    assert [result["passed"] for result in results.values()] == [True, False]
    assert "layers.0.attention.wkv_a.weight" in results[cells[1].name]["worst"]["gradient"]["beyond_tolerance"]


def test_balance_loss_of_a_part_of_the_sequence_is_found(verify: Verify) -> None:
    cells = [EP, Cell(2, cp=2)]
    code, results = verify(cells, "--import", "balance_of_own_positions")
    assert code == 1
    assert [result["passed"] for result in results.values()] == [True, False]
    assert "layers.1.moe.router.gate_ED" in results[cells[1].name]["worst"]["gradient"]["beyond_tolerance"]


PP = Cell(2, pp=2, micro_batches=2, tied=True, clip=True)
PP_EP = Cell(4, pp=2, ep=2, micro_batches=2, router="groups and bias", balance="batch and z loss", seq_len=13)


def test_pipeline_stages_pass(verify: Verify) -> None:
    code, results = verify([PP, PP_EP, Cell(2, pp=2, schedule="ZBV", micro_batches=4, num_layers=4, tied=True)])
    assert (code, [result["problems"] for result in results.values()]) == (0, [[]] * 3)


@pytest.mark.parametrize(
    ("mutant", "cell", "kind", "wrong"),
    [
        ("bias_of_own_tokens", PP_EP, "rows", "layers.1.moe"),
        ("norm_of_own_stage", PP, "norm", "gradient"),
        ("copies_not_summed", PP, "gradient", "embedding.weight"),
    ],
)
def test_what_one_pipeline_stage_keeps_to_itself_is_found(
    verify: Verify, mutant: str, cell: Cell, kind: str, wrong: str
) -> None:
    code, results = verify([EP, cell], "--import", mutant)
    assert code == 1
    assert not results[cell.name]["passed"]
    assert wrong in results[cell.name]["worst"][kind]["beyond_tolerance"]


def test_expert_gradients_scaled_by_ep_are_found_in_the_experts_alone(verify: Verify) -> None:
    code, results = verify([SHARD, TP, EP], "--import", "expert_gradients_times_ep")
    assert code == 1
    assert [result["passed"] for result in results.values()] == [True, True, False]
    gradient = results[EP.name]["worst"]["gradient"]
    assert gradient["error"] == pytest.approx(1.0, abs=1e-3)
    assert set(gradient["beyond_tolerance"]) == {f"layers.1.moe.experts.{w}" for w in ("w1_EFD", "w2_EDF", "w3_EFD")}


def test_bfloat16_is_close_to_float32_and_a_planted_error_is_not(verify: Verify) -> None:
    cells = [Cell(2, ep=2, dtype="bfloat16", micro_batches=2)]
    code, results = verify(cells)
    assert (code, [result["problems"] for result in results.values()]) == (0, [[]])
    assert all(result["worst"]["gradient"]["error"] > 1e-4 for result in results.values())
    code, results = verify(cells, "--import", "expert_gradients_times_ep")
    assert code == 1
    for result in results.values():
        assert all(".experts." in name for name in result["worst"]["gradient"]["beyond_tolerance"])


def test_clip_norm_that_differs_between_ranks_is_found_without_clipping_too(verify: Verify) -> None:
    code, results = verify([SHARD, EP], "--import", "norm_of_own_gradients")
    assert code == 1
    assert [result["passed"] for result in results.values()] == [False, False]
    assert results[EP.name]["worst"]["gradient"]["beyond_tolerance"] == []
    (problem,) = results[EP.name]["problems"]
    assert problem.startswith("the norm of the gradient is off by")
    assert len(results[SHARD.name]["worst"]["gradient"]["beyond_tolerance"]) > 20


def test_norm_that_is_wrong_on_the_last_rank_only_is_found(verify: Verify) -> None:
    code, results = verify([SHARD], "--import", "wrong_norm_on_last_rank")
    assert code == 1
    assert results[SHARD.name]["worst"]["norm"]["rank"] == 1


def test_own_experts_backend_is_judged_in_every_cell(verify: Verify) -> None:
    cells = [Cell(), Cell(experts="grouped_mm"), EP]
    options = ("--import", "own_backends", "--model.moe.experts_backend")
    code, results = verify(cells, *options, "right")
    assert (code, list(results)) == (0, ["defaults", "shard 2, ep 2"])
    code, results = verify(cells, *options, "wrong")
    assert code == 1
    for result in results.values():
        assert not result["passed"]
        # Its output is too large by a thousandth of the experts', which the loss hardly shows.
        assert "layers.1.moe.experts.w1_EFD" in result["worst"]["gradient"]["beyond_tolerance"]


def test_capacity_is_judged_without_dropped_rows(verify: Verify) -> None:
    code, results = verify([Cell(), EP], "--model.moe.dispatcher", "capacity")
    assert [result["problems"] for result in results.values()] == [[]] * 2
    assert code == 0


@pytest.mark.slow
def test_cells_that_raise_or_hang_fail_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    before, raising, hanging, after = EP, Cell(2, ep=2, exchange="equal split"), Cell(2, ep=2, remat="full"), EP
    outcomes = []
    for outcome in Verifier(TINY_MODEL, "fails_in_some_cells").run([before, raising, hanging, after]):
        outcomes.append(outcome)
        # All of them have the same reference, which is there now.
        monkeypatch.setattr(run, "SECONDS_FOR_A_CELL", 3.0 if outcome.cell == raising else 120.0)
    assert [outcome.passed for outcome in outcomes] == [True, False, False, True]
    assert outcomes[1].problems() == ["rank 1 raised ZeroDivisionError: planted"]
    (problem,) = outcomes[2].problems()
    assert "was stuck in" in problem
    assert "; stopped after " in problem
