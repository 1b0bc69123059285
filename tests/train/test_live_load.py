"""Sparklines of the load of experts, and when they are shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_progress import live_line, plain_console, terminal

from spurline.train.live_load import MAX_LINES, load_lines, sparkline
from spurline.train.progress import Progress

LOADS = {"layers.1.moe": [10, 20, 30, 0], "layers.2.moe": [15, 15, 15, 15]}


def test_half_a_bar_is_the_mean_and_a_whole_one_twice_the_mean_or_more():
    assert sparkline([10, 10, 10, 10], 4) == "▅▅▅▅"
    assert sparkline([0, 1, 9, 20, 30], 5) == " ▁▄▇█"  # mean 12
    assert sparkline([1, 0, 0, 0, 0, 0, 0, 0], 8) == "█       "


def test_of_more_experts_than_letters_the_busiest_neighbor_is_shown():
    assert sparkline([0, 40, 5, 5, 0, 0], 3) == "█▃ "
    assert len(sparkline([1] * 256, 60)) <= 60


def test_layers_stand_side_by_side_with_their_busiest_expert():
    (line,) = load_lines(LOADS, 120)
    assert line == "layer 1 ▃▆█   2.00   layer 2 ▅▅▅▅  1.00"
    assert load_lines(LOADS, 120, ascii_only=True) == ["layer 1 -*@   2.00   layer 2 ++++  1.00"]


def test_a_narrow_terminal_or_a_dense_model_has_none():
    assert load_lines(LOADS, 99) == []
    assert load_lines({}, 200) == []
    assert load_lines({"layers.1.moe": [0, 0]}, 200) == []


def test_of_many_layers_those_with_the_busiest_experts_are_shown():
    loads = {f"layers.{i}.moe": [1.0] * 255 + [1.0 + i] for i in range(58)}
    lines = load_lines(loads, 120)
    assert len(lines) == MAX_LINES
    shown = " ".join(lines)
    assert "layer 57" in shown
    assert "layer 0 " not in shown


@given(
    st.lists(st.lists(st.integers(0, 10**6), min_size=1, max_size=300), min_size=1, max_size=70),
    st.integers(100, 250),
)
def test_lines_fit_whatever_the_loads(rows, width):
    lines = load_lines({f"layers.{i}.moe": counts for i, counts in enumerate(rows)}, width)
    assert len(lines) <= MAX_LINES
    assert all(len(line) <= width for line in lines)


@pytest.mark.parametrize(("width", "wanted", "shown"), [(120, True, True), (120, False, False), (90, True, False)])
def test_a_wide_terminal_shows_them_below_the_live_line(width, wanted, shown):
    progress = Progress(10, terminal(width), show_expert_load=wanted)
    progress.update(3, loss=1.0, tokens_per_second=1.0, rows_of_experts=LOADS)
    lines = live_line(progress, width).splitlines()
    assert " 3/10" in lines[0]
    assert [line.rstrip() for line in lines[1:]] == (["layer 1 ▃▆█   2.00   layer 2 ▅▅▅▅  1.00"] if shown else [])


def test_plain_output_has_none():
    console = plain_console()
    console.width = 200
    Progress(10, console).update(3, loss=1.0, tokens_per_second=1.0, rows_of_experts=LOADS)
    assert "layer" not in console.file.getvalue()
