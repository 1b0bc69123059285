"""`spurline plan` and `spurline audit`, from the command line."""

import json

import pytest

DEBUG = ("--module", "deepseek_v3", "--config", "deepseek_v3_debugmodel")


def test_a_plan_as_tables(spurline, tmp_path):
    code, out, err = spurline(
        "plan", *DEBUG, "--ranks", "8", "--parallelism.expert_parallel_degree", "4", "--html", "p.html"
    )
    assert (code, err) == (0, "")
    assert out.startswith(
        "deepseek_v3_debugmodel on 8 x h100 (dp_shard 8, ep 4), float32, recompute none, 4 x 256 tokens"
    )
    for words in (
        "at the peak",
        "fits",
        "kept for backward",
        "all-to-all over ep (4), float32, forward",
        "MFU at most",
    ):
        assert words in out
    page = (tmp_path / "p.html").read_text()
    assert "Memory over the step" in page
    assert page.count("<polygon") >= 5
    assert "<script" not in page


def test_a_plan_as_json_adds_up(spurline):
    code, out, _ = spurline("plan", *DEBUG, "--ranks", "2", "--json", "--device", "a100")
    assert code == 0
    plan = json.loads(out)
    assert (plan["device"], plan["fits"], plan["layout"]["ranks"]) == ("a100_80", True, 2)
    assert sum(plan["holders"].values()) == plan["peak_bytes"]
    assert plan["step_seconds"] == pytest.approx(
        plan["kernel_seconds"] + sum(plan["exposed_seconds"].values()), rel=0.01
    )
    curve = plan["curve"]["bytes"].values()
    assert max(map(sum, zip(*curve, strict=True))) == plan["peak_bytes"]


def test_a_plan_that_does_not_fit_says_what_would_help(spurline):
    large = ("--training.local_batch_size", "96", "--training.seq_len", "4096", "--device", "l4")
    code, out, err = spurline("plan", *DEBUG, *large)
    assert code == 1
    assert "DOES NOT FIT" in out
    assert len(err.splitlines()) == 1
    assert "too much; what would: --" in err
    assert "--activation_checkpoint.mode selective (" in err


@pytest.mark.slow
def test_a_search_lists_layouts_that_fit(spurline):
    code, out, err = spurline("plan", *DEBUG, "--ranks", "4", "--search", "--best", "2", "--gpus_per_node", "2")
    assert code == 0
    assert err.count("tried ") >= 2
    rows = out.splitlines()[2:]
    assert len(rows) == 2
    assert all("--activation_checkpoint.mode none" in row for row in rows)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--device", "h101"), "--device: hardware 'h101' is not known. Did you mean h100?"),
        (("--ranks", "0"), "--ranks must be positive, got 0"),
        (("--ranks", "6", "--parallelism.expert_parallel_degree", "4"), "expert_parallel_degree 4"),
        (("--routing", "nowhere"), "No such file"),
        (("--routing", "zipf:x"), "'x' is not a number"),
        (("--routing", "zipf:nan"), "--routing zipf:nan: the exponent must be a finite number, at least 0"),
        (("--routing", "zipf:inf"), "the exponent must be a finite number, at least 0"),
        (("--routing", "zipf:-1"), "the exponent must be a finite number, at least 0"),
        (("--routing", "balanced:2"), "--routing balanced:2: balanced has no exponent"),
        (("--search", "--best", "0"), "--best must be at least 1, got 0"),
        (("--html", "nowhere/plan.html"), "--html nowhere/plan.html: there is no folder"),
        (("--html", "."), "--html . is a folder: give a file name"),
        (("--html", "plan.html", "--search"), "can't be combined with --search"),
    ],
)
def test_bad_input_is_one_line(spurline, monkeypatch, options, problem):
    """Before anything is planned: a large model takes a minute."""
    for what in ("plan.plan_step", "search.search_layouts"):
        monkeypatch.setattr(f"spurline.simulate.{what}", lambda *args, **options: pytest.fail("planned"))
    code, out, err = spurline("plan", *DEBUG, *options)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert problem in err


def test_a_budget_that_nothing_exceeds_is_refused(spurline):
    code, out, err = spurline("audit", *DEBUG, "--check", "--budget.gather_dtype_share", "nan")
    assert (code, out) == (2, "")
    assert err == "spurline audit: --budget.gather_dtype_share must be at least 0, got nan\n"


def test_a_metrics_file_without_routing_is_one_line(spurline, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    code, _, err = spurline("plan", *DEBUG, "--routing", "metrics.jsonl")
    assert code == 2
    assert err.startswith("spurline plan: --routing metrics.jsonl: no expert_load in it: it has to come from a run")
    assert err.count("\n") == 1


def test_an_audit_checks_budgets(spurline):
    """The debug model on the branches of an accelerator: one host wait a layer, none in a step, gathers in bfloat16."""
    options = ("audit", *DEBUG, "--ranks", "8", "--parallelism.expert_parallel_degree", "4", "--check")
    options += ("--training.dtype", "bfloat16")
    code, out, err = spurline(*options)
    assert (code, err) == (0, "")
    assert "layers.1" in out
    assert "the host waits for the device" in out
    code, out, err = spurline(*options, "--budget.host_waits_per_layer", "0", "--json")
    assert code == 1
    assert json.loads(out)["violations"] == [line.removeprefix("spurline audit: ") for line in err.splitlines()]
    assert "layers.1: the host waits 1 times in forward, 0 allowed: spurline/accelerator.py:" in err
