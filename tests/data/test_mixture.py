from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spurline.data.mixture import SampleOrder

seeds = st.integers(-(2**63), 2**64)
mixtures = st.lists(
    st.tuples(st.integers(1, 30), st.fractions(Fraction(1, 100), 10, max_denominator=1000)), min_size=1, max_size=6
)


def order_of(mixture: list[tuple[int, Fraction]], seed: int) -> SampleOrder:
    return SampleOrder([size for size, _ in mixture], [weight for _, weight in mixture], seed)


def source(sizes: list[int], sample_id: int) -> int:
    return next(i for i in range(len(sizes)) if sample_id < sum(sizes[: i + 1]))


@given(mixtures, seeds, st.integers(0, 10**6), st.integers(0, 300))
def test_position_alone_decides_what_is_read(mixture, seed, start, count):
    used = order_of(mixture, seed)
    used.ids(start + 7, 20)
    ids = used.ids(start, count)
    for i in range(0, count, 50):
        assert order_of(mixture, seed).ids(start + i, 1) == ids[i : i + 1]


@given(mixtures, seeds, st.integers(0, 10**15), st.integers(1, 400))
def test_any_stretch_has_every_source_in_its_proportion(mixture, seed, start, count):
    order = order_of(mixture, seed)
    counts = Counter(order.source_of(start + i)[0] for i in range(count))
    total = sum(weight for _, weight in mixture)
    for i, (_, weight) in enumerate(mixture):
        assert abs(counts[i] - count * weight / total) <= 2 * len(mixture)


@given(mixtures, seeds, st.integers(0, 10**12))
def test_proportions_are_exact_in_the_long_run(mixture, seed, num_positions):
    """The number of windows of each source before a far position is its share, to within a few."""
    order = order_of(mixture, seed)
    total = sum(weight for _, weight in mixture)
    seen = {}
    position = num_positions
    while len(seen) < len(mixture):
        i, before = order.source_of(position)
        seen.setdefault(i, (position, before))
        position += 1
        if position > num_positions + 20_000:
            pytest.fail("a source is never read")
    for i, (position, before) in seen.items():
        assert abs(before - position * mixture[i][1] / total) <= len(mixture)


@given(mixtures, seeds)
def test_source_goes_epoch_by_epoch_through_all_of_its_windows(mixture, seed):
    order = order_of(mixture, seed)
    sizes = [size for size, _ in mixture]
    read: list[list[int]] = [[] for _ in sizes]
    for sample_id in order.ids(0, 500):
        read[source(sizes, sample_id)].append(sample_id)
    for i, ids in enumerate(read):
        first = sum(sizes[:i])
        for begin in range(0, len(ids) - sizes[i] + 1, sizes[i]):
            assert sorted(ids[begin : begin + sizes[i]]) == list(range(first, first + sizes[i]))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), seeds, st.integers(0, 3))
def test_without_weights_every_window_is_read_once_an_epoch(sizes, seed, epoch):
    order = SampleOrder(sizes, [], seed)
    assert sorted(order.ids(epoch * sum(sizes), sum(sizes))) == list(range(sum(sizes)))


@pytest.mark.parametrize("ranks", [[4, 2, 1], [1, 2, 4], [2, 4, 2]])
def test_change_of_ranks_repeats_and_loses_no_sample(ranks):
    """As the trainer reads: 8 sequences a step, in micro-batches of 2 on each rank; every 5 steps the ranks change."""
    sizes, weights = [40, 90], [Fraction(1), Fraction(2)]
    expected = SampleOrder(sizes, weights, seed=3).ids(0, 15 * 8)
    seen: list[int] = []
    for step in range(15):
        num_ranks = ranks[step // 5]
        of_step = {}
        for rank in range(num_ranks):
            order = SampleOrder(sizes, weights, seed=3)  # a rank knows nothing but the step
            for done in range(0, 8, 2 * num_ranks):
                of_step[done + rank * 2] = order.ids(step * 8 + done + rank * 2, 2)
        seen += [sample_id for start in sorted(of_step) for sample_id in of_step[start]]
    assert seen == expected
    assert len(set(seen)) == 120  # 40 of the first source and 80 of the second: each once


def test_seeds_change_the_order_within_and_between_sources():
    sizes, weights = [100, 100, 100], [Fraction(3), Fraction(2), Fraction(1)]
    orders = [SampleOrder(sizes, weights, seed) for seed in range(4)]
    assert len({tuple(order.ids(0, 50)) for order in orders}) == 4
    assert len({tuple(order.source_of(i)[0] for i in range(50)) for order in orders}) > 1
    of_source = [[i % 100 for i in orders[0].ids(0, 300) if i // 100 == source] for source in (0, 1)]
    assert of_source[0][:50] != of_source[1][:50]
