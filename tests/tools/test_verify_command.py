"""`spurline verify` without ranks: which cells it chooses, what it prints, and what it refuses."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from itertools import combinations, product

import pytest

from spurline.models import family_names
from spurline.models.deepseek_v3.configs import deepseek_v3_debugmodel
from spurline.testing.verification.cells import (
    AS_GIVEN,
    MOE_OPTIONS,
    TINY_MODEL,
    Cell,
    cell_problems,
    keep_given,
    reference_config,
    run_config,
)
from spurline.testing.verification.matrix import AXES, QUICK, full_cells
from spurline.testing.verification.run import Finding, Outcome

GATE = "layers.1.moe.router.gate_ED"
PRESET = ["--module", "deepseek_v3", "--config", "deepseek_v3_debugmodel"]


def findings(gradient=2e-7, norm=1e-7):
    return {
        "loss": [Finding(0.0, "loss", 0, 1), Finding(0.0, "balance_loss", 0, 1)],
        "norm": [Finding(norm, "gradient", 1, 1)],
        "gradient": [Finding(gradient, GATE, 1, 2), Finding(1e-7, "norm.weight", 0, 1)],
        "weight": [Finding(gradient / 10, GATE, 1, 2)],
        "rows": [Finding(0.0, "layers.1.moe", 0, 1)],
    }


@pytest.fixture
def judged(monkeypatch):
    """Has every cell come out as a function of it says, without running it; returns what was asked for."""
    asked = {"cells": []}

    def prepare(outcome_of):
        class Judge:
            reference = "the model by itself"

            def __init__(self, model, package):
                asked.update(model=model, package=package)

            def run(self, cells):
                for cell in cells:
                    asked["cells"].append(cell)
                    yield outcome_of(cell)

        monkeypatch.setattr("spurline.tools.verify.Verifier", Judge)
        return asked

    return prepare


def passes(cell):
    return Outcome(cell, 1.25, findings())


# What is chosen


def test_quick_has_every_value_of_every_axis():
    for axis, values in AXES.items():
        for fields in (
            values if axis != "spread" else [{name: 2} for name in ("replicate", "pp", "cp", "tp", "ep", "etp")]
        ):
            assert any(all(getattr(cell, name) == value for name, value in fields.items()) for cell in QUICK), fields


def test_quick_has_every_moe_option():
    for field, values in MOE_OPTIONS.items():
        assert {getattr(cell, field) for cell in QUICK} == set(values)


def test_every_dispatcher_and_precision_has_cells():
    """On one rank where experts need no other, on two and on four; what is not trained with is tested elsewhere."""
    ranks_of: dict[str, set[int]] = {}
    for cell in full_cells():
        aligned = "aligned" if cell.rows == "aligned rows" else ""
        for name in (cell.dispatcher, cell.precision, cell.sent, cell.experts, aligned):
            ranks_of.setdefault(name, set()).add(cell.ranks)
    for name in ("aligned", "capacity", "float8", "mxfp8", "triton"):
        assert ranks_of[name] >= {1, 2, 4}, name
    for name in ("deep_ep stand-in", "hybrid_ep stand-in"):
        assert ranks_of[name] >= {2, 4}, name
    assert 2 in ranks_of["rows sent as float8"]


def test_full_has_every_pair_of_values_that_go_together():
    cells = full_cells()
    assert set(QUICK) <= set(cells)
    assert len(set(cells)) == len(cells) < 210
    spread_of_one = {"ranks": 1, "replicate": 1, "tp": 1, "ep": 1, "etp": 1, "cp": 1, "pp": 1}
    values = {axis: [spread_of_one | v if axis == "spread" else v for v in values] for axis, values in AXES.items()}
    for of_one, of_other in combinations(values.values(), 2):
        for one, other in product(of_one, of_other):
            fields = one | other
            met = any(fields.items() <= vars(cell).items() for cell in cells)
            assert met != exclude_each_other(**fields), fields


SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV")
KINDS = ("all_gather", "ulysses")
COMPOSED = [  # degrees above 1 and other values; the degrees that are not named are 1, but for data parallelism
    *({"pp": pp, "schedule": schedule} for pp in (2, 4) for schedule in SCHEDULES),
    *({"cp": cp, "context": kind, "seq_len": 13} for cp in (2, 4) for kind in KINDS),
    *({"cp": 2, "tp": 2, "context": kind, "seq_len": 13, "balance": "batch and z loss"} for kind in KINDS),
    *({"cp": 2, "ep": 2, "context": kind} for kind in KINDS),
    {"pp": 2, "ep": 2, "seq_len": 13, "balance": "batch and z loss"},
    {"pp": 2, "ep": 2, "replicate": 2, "seq_len": 13, "balance": "batch and z loss"},
    {"pp": 2, "tp": 2, "ep": 2, "seq_len": 13},
    {"pp": 2, "tp": 2, "ep": 2, "etp": 2},
    {"pp": 2, "cp": 2, "ep": 2, "seq_len": 13, "balance": "batch and z loss"},
]


@pytest.mark.parametrize("fields", COMPOSED, ids=str)
def test_full_has_pipeline_stages_and_shared_positions_composed_with_the_others(fields):
    degrees = dict.fromkeys(("pp", "cp", "tp", "ep", "etp", "replicate"), 1)
    wanted = {**degrees, "dtype": "float32", "precision": "none", **fields}
    assert any(wanted.items() <= vars(cell).items() for cell in full_cells())


STAND_INS = ("deep_ep stand-in", "hybrid_ep stand-in")


def exclude_each_other(
    ranks=None, ep=None, cp=None, exchange=None, dispatcher=None, num_experts=None, experts=None, context=None,
    compile=None, separate_expert_units=None, seq_len=None, precision=None, **_,
):  # fmt: skip
    return (
        (ranks == 1 and separate_expert_units)
        or (ep == 1 and exchange in ("equal split", "adaptive equal split"))
        or (dispatcher not in (None, "all-to-all") and exchange in ("equal split", "adaptive equal split"))
        or (dispatcher in STAND_INS and (ep == 1 or compile == "aot_eager" or experts == "bmm"))
        or (ep == 4 and num_experts == "6 experts")
        or (experts == "bmm" and exchange not in (None, "forced balance"))
        or (experts == "bmm" and compile == "aot_eager")
        or ((experts == "bmm" or exchange == "forced balance") and seq_len == 13)
        or (cp == 1 and context == "ulysses")
        or (experts == "stream" and precision in ("float8", "mxfp8"))
    )


def test_every_cell_works_with_the_tiny_model():
    assert [cell.name for cell in full_cells() if cell_problems(cell, TINY_MODEL)] == []


def test_experts_that_hybrid_ep_does_not_take_are_left_out():
    cell = Cell(4, ep=2, etp=2, dispatcher="hybrid_ep stand-in", num_experts="6 experts")
    assert cell_problems(cell, TINY_MODEL) == []
    (problem,) = cell_problems(replace(cell, etp=1), TINY_MODEL)
    assert problem == "dispatcher hybrid_ep needs experts in multiples of 4"


def test_reference_is_one_rank_without_anything_clever():
    cell = Cell(
        4, tp=2, ep=2, exchange="equal split", experts="grouped_mm", compile="aot_eager", remat="full", clip=True
    )
    config = reference_config(run_config(cell, TINY_MODEL))
    usual = reference_config(run_config(replace(Cell(), clip=True), TINY_MODEL))
    assert config == usual
    assert config.training.max_grad_norm > 0
    assert config.model.moe.experts_backend == "auto"


def test_cells_keep_the_options_that_are_given():
    cell = keep_given(Cell(2, ep=2, experts="grouped_mm", exchange="equal split"), {"experts_backend"})
    assert (cell.experts, cell.exchange) == (AS_GIVEN, "equal split")
    model = replace(TINY_MODEL, moe=replace(TINY_MODEL.moe, experts_backend="mine"))
    moe = run_config(cell, model).model.moe
    assert (moe.experts_backend, moe.equal_split) == ("mine", "forced")


def test_forced_balance_takes_a_length_at_which_ranks_number_tokens_like_one_rank():
    cells = [Cell(exchange="forced balance"), Cell(4, tp=4, exchange="forced balance")]
    for cell in (*cells, Cell(4, cp=2, tp=2, exchange="forced balance")):
        training = run_config(cell, TINY_MODEL).training
        parts = cell.tp * (2 * cell.cp if cell.cp > 1 else 1)  # a chunk of the head and one of the tail
        positions_of_a_rank = training.seq_len // parts
        assert training.seq_len % parts == 0
        assert positions_of_a_rank * TINY_MODEL.moe.top_k % TINY_MODEL.moe.num_experts == 0


# What the command does with it


def test_prints_a_line_a_cell_and_a_summary(spurline, judged):
    asked = judged(passes)
    code, out, err = spurline("verify")
    assert (code, err) == (0, "")
    assert asked["cells"] == QUICK
    assert asked["model"] == TINY_MODEL
    header, *rows, reference, summary = out.splitlines()
    assert header.split() == ["result", "ranks", "loss", "norm", "weight", "gradient", "of", "seconds", "cell"]
    assert rows[0].split(maxsplit=8) == ["ok", "1", "0.0e+00", "1.0e-07", "2.0e-08", "2.0e-07", GATE, "1.2", "defaults"]
    assert [row.split(maxsplit=8)[8] for row in rows] == [cell.name for cell in QUICK]
    assert reference == "reference: the model by itself"
    assert summary == f"all {len(QUICK)} cells passed, in 0 s"


def test_failed_cells_say_what_is_wrong_and_the_exit_code_is_1(spurline, judged):
    def outcome_of(cell):
        if cell == QUICK[1]:
            return Outcome(cell, 1.0, findings(gradient=0.5, norm=2e-5))
        if cell == QUICK[2]:
            return Outcome(cell, 2.0, failure="rank 1 raised ValueError: no")
        return passes(cell)

    judged(outcome_of)
    code, out, _ = spurline("verify", "--quick")
    assert code == 1
    lines = out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("FAIL"))
    assert [line.strip() for line in lines[at + 1 : at + 3]] == [
        "the norm of the gradient is off by 2.0e-05 on rank 1 in step 1 (allowed: 1e-05)",
        f"the gradient of {GATE} is off by 5.0e-01 on rank 1 in step 2 (allowed: 1e-04)",
    ]
    assert lines[at + 3].split()[:6] == ["FAIL", "1", "-", "-", "-", "-"]
    assert lines[at + 4].strip() == "rank 1 raised ValueError: no"
    assert lines[-1] == f"2 of {len(QUICK)} cells FAILED, in 0 s"


def test_only_the_first_names_are_printed_and_all_are_in_the_json(spurline, judged):
    wrong = [Finding(1.0 - i / 10, f"p{i}", 0, 1) for i in range(8)]
    judged(lambda cell: Outcome(cell, 1.0, findings() | {"gradient": wrong}))
    assert "7 more beyond tolerance: p1, p2, p3, p4, ..." in spurline("verify").out
    cells = json.loads(spurline("verify", "--json").out)["cells"]
    assert cells[0]["worst"]["gradient"]["beyond_tolerance"] == [f"p{i}" for i in range(8)]


def test_json_has_every_cell_with_its_axes_and_stays_json_when_a_result_is_not_a_number(spurline, judged):
    judged(lambda cell: Outcome(cell, 1.25, findings(gradient=math.inf if cell == QUICK[0] else 1e-7)))
    code, out, _ = spurline("verify", "--json")
    report = json.loads(out, parse_constant=lambda name: pytest.fail(name))
    assert (code, report["passed"], report["reference"]) == (1, False, "the model by itself")
    assert report["cells"][0]["worst"]["gradient"] == {
        "error": None,
        "name": GATE,
        "rank": 1,
        "step": 2,
        "beyond_tolerance": [GATE],
    }
    assert [cell["passed"] for cell in report["cells"]] == [False] + [True] * (len(QUICK) - 1)
    assert {"ranks": 2, "tp": 2, "ep": 2, "compile": "aot_eager"}.items() <= report["cells"][8].items()
    assert report["tolerances"] == {"loss": 1e-5, "norm": 1e-5, "gradient": 1e-4, "weight": 1e-5, "rows": 0.0}


def test_world_chooses_cells(spurline, judged):
    asked = judged(passes)
    assert spurline("verify", "--world", "2", "4").code == 0
    assert asked["cells"] == [cell for cell in QUICK if cell.ranks in (2, 4)]


def test_model_of_a_preset_is_taken_as_it_is_and_equal_cells_run_once(spurline, judged):
    asked = judged(passes)
    assert spurline("verify", *PRESET, "--model.num_layers", "2").code == 0
    assert asked["model"] == replace(deepseek_v3_debugmodel().model, num_layers=2)
    assert len(set(asked["cells"])) == len(asked["cells"])
    for cell in asked["cells"]:
        assert run_config(cell, asked["model"]).model == asked["model"]
        assert {getattr(cell, field) for field in MOE_OPTIONS} == {AS_GIVEN}


def test_cells_that_do_not_fit_the_model_are_skipped_with_the_reason(spurline, judged):
    asked = judged(passes)
    code, out, _ = spurline("verify", "--model.num_heads", "3")
    assert code == 0
    assert {cell.tp for cell in asked["cells"]} == {1}
    skipped = [line for line in out.splitlines() if line.startswith("skip")]
    assert len(skipped) == sum(cell.tp > 1 or cell.context == "ulysses" for cell in QUICK)
    assert skipped[0].endswith(
        "tp 2, batch and z loss, length 13, clip: parallelism.tensor_parallel_degree 2 does not divide the model's 3"
        " attention heads"
    )
    assert out.splitlines()[-1] == f"all {len(asked['cells'])} cells passed, {len(skipped)} skipped, in 0 s"


def test_nothing_to_run_is_not_a_success(spurline, judged):
    judged(passes)
    code, out, _ = spurline("verify", "--world", "2", "--model.num_heads", "3", "--model.moe.experts_backend", "bmm")
    assert code == 1
    assert out.splitlines()[-1].startswith("no cell applies to this model")


def test_all_that_is_wrong_is_told_at_once(spurline):
    options = ["--quick", "--full", "--world", "3", "--jsn", "--model.dim", "x", "--model.moe.top_k", "99"]
    code, out, err = spurline("verify", *options, "--import", "no_such_package")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "spurline verify: 6 problems",
        "  --import no_such_package: No module named 'no_such_package'",
        "  --jsn: no such option. Did you mean --json?",
        "  --model.dim: 'x' is not an integer",
        "  --quick and --full are mutually exclusive",
        "  --world 3: no cell has 3 ranks. Choose from: 1, 2, 4, 8",
        "  model.moe.top_k 99 is larger than num_experts 8: a token visits an expert once at most",
    ]


@pytest.mark.parametrize(("model", "factor"), [([], 4.0), (["--model.moe.top_k", "1"], 8.0), (PRESET, 4.0)], ids=str)
def test_capacity_has_room_for_all_rows_as_the_reference_does(spurline, judged, model, factor):
    asked = judged(passes)
    assert spurline("verify", *model, "--model.moe.dispatcher", "capacity").code == 0
    for cell in asked["cells"]:
        moe = run_config(cell, asked["model"]).model.moe
        assert (moe.dispatcher, moe.capacity_factor) == ("capacity", factor)
        assert moe.capacity_factor >= moe.num_experts / moe.top_k


def test_a_capacity_that_may_drop_rows_is_refused(spurline, judged):
    asked = judged(passes)
    capacity = ["--model.moe.dispatcher", "capacity", "--model.moe.capacity_factor"]
    code, _, err = spurline("verify", *capacity, "1.25")
    assert (code, asked["cells"]) == (2, [])
    assert err == (
        "spurline verify: model.moe.capacity_factor 1.25 may drop rows, and the reference drops none: leave the option"
        " out, or set it to 4 (num_experts / top_k) or more\n"
    )
    assert spurline("verify", *capacity, "5").code == 0
    assert asked["model"].moe.capacity_factor == 5.0


def test_model_that_is_too_large_for_this_machine_is_refused(spurline):
    code, _, err = spurline("verify", "--model.dim", "4096", "--model.num_layers", "80")
    assert code == 2
    assert err.startswith("spurline verify: the model has ")
    assert "at most 100M" in err


def test_unknown_module_and_missing_config(spurline):
    code, _, err = spurline("verify", "--module", "deepseek_v4", "--model.dim", "8")
    assert code == 2
    assert err.splitlines() == [
        "spurline verify: 2 problems",
        f"  --module: there is no 'deepseek_v4'. Did you mean deepseek_v3? Choose from: {', '.join(family_names())}",
        "  --config is missing: `spurline configs` lists the presets",
    ]


def test_interrupt_is_no_traceback(spurline, judged):
    def interrupted(cell):
        raise KeyboardInterrupt

    judged(interrupted)
    code, _, err = spurline("verify")
    assert (code, err) == (130, "spurline verify: interrupted\n")


def test_help_and_errors_leave_torch_alone():
    script = """
import contextlib, io, sys
from spurline.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    for argv in (["--help"], ["--world", "3"], ["--full", "--quick"]):
        with contextlib.suppress(SystemExit):
            main(["verify", *argv])
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
