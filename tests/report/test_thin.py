import pytest
from hypothesis import given
from hypothesis import strategies as st

from spurline.report.thin import mean_by_stretch, stretches, thin

series = st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=300)


def test_a_short_series_stays_as_it_is():
    assert thin([1, 5], [2.0, None], most=2) == ([1, 5], [2.0, None])


@given(series, st.integers(2, 50))
def test_a_long_series_keeps_its_extremes_in_order(values, most):
    steps = [10 * i for i in range(len(values))]
    kept_steps, kept = thin(steps, values, most)
    assert len(kept) <= most
    assert kept_steps == sorted(set(kept_steps))
    known = [value for value in values if value is not None]
    if known:
        found = [value for value in kept if value is not None]
        assert [min(found), max(found)] == pytest.approx([min(known), max(known)], rel=1e-4)


def test_a_stretch_without_values_stays_a_gap():
    _, kept = thin(range(8), [1.0, 2.0, None, None, None, None, 3.0, 4.0], most=8 // 2 * 2 - 2)
    assert None in kept


@given(series, st.integers(1, 50))
def test_means_are_of_all_values_that_are_known(values, most):
    means = mean_by_stretch(values, most)
    assert len(means) == min(len(values), most)
    for mean, stretch in zip(means, stretches(len(values), most), strict=True):
        known = [values[place] for place in stretch if values[place] is not None]
        assert mean == (pytest.approx(sum(known) / len(known), rel=1e-4, abs=1e-9) if known else None)


@given(st.integers(1, 1000), st.integers(1, 50))
def test_stretches_cover_every_place_once_and_none_is_empty(length, most):
    found = stretches(length, most)
    assert [place for stretch in found for place in stretch] == list(range(length))
    assert all(len(stretch) for stretch in found)
