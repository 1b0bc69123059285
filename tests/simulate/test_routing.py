"""Which experts the tokens of the simulated rank visit."""

import json
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spurline.simulate.measured_routing import measured
from spurline.simulate.routing import RoutingModel, balanced, counts_of_shares, hottest_first, zipf
from spurline.train.metrics.expert_load_file import LARGE
from spurline.train.metrics.jsonl import JsonlWriter


@given(
    shares=st.lists(st.floats(0, 1e6), min_size=4, max_size=40),
    num_tokens=st.integers(1, 200),
    top_k=st.integers(1, 4),
)
def test_counts_add_up_and_no_token_visits_an_expert_twice(shares: list[float], num_tokens: int, top_k: int) -> None:
    counts = counts_of_shares(shares, num_tokens, top_k)
    assert sum(counts) == num_tokens * top_k
    assert 0 <= min(counts) <= max(counts) <= num_tokens


def test_counts_are_in_proportion_to_shares() -> None:
    assert counts_of_shares([1, 2, 3, 4], num_tokens=100, top_k=2) == [20, 40, 60, 80]
    assert counts_of_shares([0, 0, 1, 9], num_tokens=10, top_k=2) == [0, 0, 10, 10]


def test_balanced_rows_are_even_but_not_equal() -> None:
    """Equal counts would take short cuts that no real routing takes."""
    assert balanced().counts("layers.1.moe", 16, 2, 8, num_ranks=4) == [5, 3, 4, 4, 4, 4, 4, 4]


def test_the_first_rank_is_the_hottest() -> None:
    assert hottest_first([1, 1, 5, 0, 2, 2], num_ranks=3) == [5, 0, 2, 2, 1, 1]
    counts = zipf(1.0, 32).counts("layers.1.moe", 512, 2, 32, num_ranks=8)
    by_rank = [sum(counts[start : start + 4]) for start in range(0, 32, 4)]
    assert by_rank[0] == max(by_rank) > 1.5 * sum(by_rank) / 8


def test_the_steepest_distribution_has_counts() -> None:
    """1 / 64**400 is no float."""
    counts = zipf(400, 64).counts("layers.1.moe", 100, 2, 64, num_ranks=8)
    assert sorted(counts)[-2:] == [100, 100]


def write_metrics(folder: Path, *records: dict[str, object]) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def test_measured_routing_is_the_end_of_a_run_by_layer(tmp_path: Path) -> None:
    early = [{"step": i, "expert_load": {"layers.1.moe": [100, 0, 0, 0]}} for i in range(9)]
    last = {"step": 9, "expert_load": {"layers.1.moe": [1, 2, 3, 4]}}
    write_metrics(tmp_path, *early, last)
    model = measured(tmp_path)
    assert model.counts("layers.1.moe", 100, 2, 4, num_ranks=2) == [60, 80, 20, 40]


def test_measured_routing_of_many_experts_is_read_from_their_file(tmp_path: Path) -> None:
    """Runs with thousands of experts keep their load beside metrics.jsonl."""
    num_experts = LARGE + 8
    with closing(JsonlWriter(tmp_path)) as metrics:
        for step in range(1, 11):
            load = [0] * num_experts
            load[step] = 7
            metrics.write({"step": step, "expert_load": {"layers.1.moe": load}})
    assert measured(tmp_path).shares == {"layers.1.moe": [7.0 * (expert == 10) for expert in range(num_experts)]}
    (tmp_path / "expert_load.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"expert_load\.bin' is damaged"):
        measured(tmp_path)


def test_steps_of_different_models_are_refused(tmp_path: Path) -> None:
    loads = [{"layers.1.moe": [1, 2]}] * 10 + [{"layers.1.moe": [1, 2, 3]}, {"layers.2.moe": [1, 2]}] * 10
    path = write_metrics(tmp_path, *({"step": step, "expert_load": load} for step, load in enumerate(loads)))
    with pytest.raises(ValueError, match="do not have the same layers"):
        measured(path)


@pytest.mark.parametrize(
    ("records", "message"),
    [([{"step": 1, "expert_load": {}}], "no expert_load"), ([{"step": 1}], "no expert_load"), ([], "no expert_load")],
)
def test_metrics_without_routing_are_refused(tmp_path: Path, records: list[dict[str, object]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measured(write_metrics(tmp_path, *records))


def test_what_is_no_metrics_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        measured(tmp_path / "nothing")
    (tmp_path / "metrics.jsonl").write_text("not json")
    with pytest.raises(ValueError, match=r"is not a run's metrics\.jsonl"):
        measured(tmp_path)


def test_routing_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="8 experts there and 16 here"):
        RoutingModel("measured", {"": [1.0] * 8}).counts("layers.1.moe", 4, 2, 16, 1)
    measured_there = RoutingModel("measured in run", {f"layers.{layer}.moe": [1.0, 3.0] for layer in (3, 4, 5, 6)})
    line = r"^routing measured in run: no layers\.1\.moe there, only layers\.3\.moe to layers\.6\.moe: take a run"
    with pytest.raises(ValueError, match=line):
        measured_there.counts("layers.1.moe", 4, 1, 2, 1)
    assert measured_there.counts("layers.3.moe", 4, 1, 2, 1) == [1, 3]
