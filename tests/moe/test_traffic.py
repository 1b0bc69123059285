"""The arithmetic of plans across ranks: forced balance, splits and segments."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline.moe.dispatch.permute import SegmentPermutation, UniformPermutation, index_of_segments
from spurline.moe.dispatch.traffic import Traffic, counts_of_parts, forced_counts, forced_order, forced_rows

GRID = [(6, 2, 8, 2), (5, 2, 4, 2), (16384, 3, 36, 12), (0, 2, 4, 2), (1, 1, 4, 4), (7, 3, 12, 4), (8, 2, 8, 8)]


@pytest.mark.parametrize(("T", "K", "E", "ep"), GRID)
def test_forced_balance_follows_from_the_numbers_alone(T: int, K: int, E: int, ep: int) -> None:
    expert_S = torch.arange(T * K) % E
    count_E = torch.bincount(expert_S, minlength=E)
    assert torch.equal(forced_order(count_E, T * K), torch.argsort(expert_S, stable=True))
    assert torch.equal(forced_counts([T * K] * ep, E, torch.device("cpu")), count_E.expand(ep, E))
    for rank in range(ep):
        check_forced_traffic([T * K] * ep, E, rank)


def check_forced_traffic(num_rows_P: list[int], E: int, rank: int, parts: int = 1) -> None:
    """What follows from the numbers of rows is what counting would find."""
    P = len(num_rows_P)
    count_PE = forced_counts(num_rows_P, E, torch.device("cpu"))
    if parts > 1:
        count_PE = counts_of_parts(count_PE, P // parts, parts)
    counted = Traffic.of_counts(count_PE, rank)
    forced = Traffic.forced(num_rows_P, counted.count_e, E, rank, parts)
    for field in dataclasses.fields(Traffic):
        found, expected = getattr(forced, field.name), getattr(counted, field.name)
        assert torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected, field.name


@settings(max_examples=200)
@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_forced_traffic_of_unequal_ranks_and_of_parts(data: st.DataObject, e: int, owners: int, parts: int) -> None:
    P = owners * parts
    num_rows_P = data.draw(st.lists(st.integers(0, 40), min_size=P, max_size=P))
    for rank in range(P):
        check_forced_traffic(num_rows_P, e * owners, rank, parts)


@settings(max_examples=200)
@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 6), st.integers(1, 4))
def test_forced_order_is_the_stable_sort(T: int, K: int, e: int, ep: int) -> None:
    test_forced_balance_follows_from_the_numbers_alone(T, K, e * ep, ep)


@given(st.integers(0, 200), st.integers(1, 20), st.data())
def test_forced_rows_counts_a_range_of_experts(num_rows: int, E: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, E))
    last = data.draw(st.integers(first, E))
    assert forced_rows(num_rows, E, first, last) == sum(first <= i % E < last for i in range(num_rows))


@st.composite
def counts(draw: st.DrawFn) -> list[list[int]]:
    P, e = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    row = st.lists(st.integers(0, 6), min_size=P * e, max_size=P * e)
    return draw(st.lists(row, min_size=P, max_size=P))


@settings(max_examples=200)
@given(counts())
def test_traffic_conserves_rows(count_PE: list[list[int]]) -> None:
    P, E = len(count_PE), len(count_PE[0])
    everyone = [Traffic.of_counts(torch.tensor(count_PE), rank) for rank in range(P)]
    splits = [traffic.splits_2P.tolist() for traffic in everyone]
    rows_E = [sum(rows) for rows in zip(*count_PE, strict=True)]
    for p in range(P):
        assert sum(splits[p][0]) == sum(count_PE[p])
        assert everyone[p].num_received == sum(splits[p][1])
        for q in range(P):
            assert splits[p][0][q] == splits[q][1][p]
        mine = slice(p * E // P, (p + 1) * E // P)
        assert (
            everyone[p].known_count_e
            == everyone[p].host_count_e.tolist()
            == everyone[p].count_e.tolist()
            == rows_E[mine]
        )
        segments = [rows for row in count_PE for rows in row[mine]]
        assert everyone[p].segment_range == (min(segments), max(segments))
    assert {t.num_rows for t in everyone} == {sum(map(sum, count_PE))}
    assert {t.largest_split for t in everyone} == {max(max(send) for send, _ in splits)}
    assert {t.expert_range for t in everyone} == {(min(rows_E), max(rows_E))}


@settings(max_examples=200)
@given(counts())
def test_segments_become_expert_major_and_come_back(count_PE: list[list[int]]) -> None:
    """Each row carries (expert, rank, place): sorted by that, it is where it should be."""
    count_Pe = torch.tensor(count_PE)[:, : max(1, len(count_PE[0]) // len(count_PE))]
    rows = [(e, p, i) for p, row in enumerate(count_Pe.tolist()) for e, n in enumerate(row) for i in range(n)]
    rows_RD = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).requires_grad_()
    step = SegmentPermutation.make(count_Pe, len(rows))
    moved = step.forward(rows_RD)
    assert [tuple(map(int, row)) for row in moved.tolist()] == sorted(rows)
    assert torch.equal(step.inverse(moved), rows_RD)
    weight = torch.arange(moved.numel(), dtype=torch.float64).view_as(moved)
    (gradient,) = torch.autograd.grad((moved * weight).sum(), rows_RD)
    assert torch.equal(step.forward(gradient), weight)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_uniform_segments_need_no_index(P: int, e: int, length: int) -> None:
    rows_RD = torch.randn(P * e * length, 3)
    uniform = UniformPermutation(P, e)
    general = SegmentPermutation.make(torch.full((P, e), length), P * e * length)
    assert torch.equal(uniform.forward(rows_RD), general.forward(rows_RD))
    assert torch.equal(uniform.inverse(rows_RD), general.inverse(rows_RD))


def test_the_size_of_an_index_is_optional() -> None:
    start, length = torch.tensor([5, 0, 9]), torch.tensor([2, 0, 3])
    assert index_of_segments(start, length).tolist() == [5, 6, 9, 10, 11]
    assert torch.equal(index_of_segments(start, length, output_size=5), index_of_segments(start, length))
