import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from spurline.train.progress import Progress


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def plain_console():
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def terminal(width):
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        force_interactive=True,
        width=width,
        color_system=None,
        legacy_windows=False,
    )


def run_plain(total_steps, steps=None, validate_at=(), seconds_per_step=1.0):
    console, clock = plain_console(), Clock()
    with Progress(total_steps, console, clock=clock) as progress:
        for step in steps or range(1, total_steps + 1):
            clock.now = step * seconds_per_step
            progress.update(
                step,
                loss=2.1344,
                tokens_per_second=9812.0,
                memory_bytes=1_234_000_000,
                expert_load=1.349,
                validation_loss=2.2008 if step in validate_at else None,
                bits_per_byte=1.5876 if step in validate_at else None,
                grad_norm=0.5,
                lr=1e-3,
            )
    return console.file.getvalue().splitlines()


def live_line(progress, width):
    """What the live line shows, as a terminal of this width prints it."""
    console = terminal(width)
    progress._console = console
    console.print(progress._render(), end="")
    return console.file.getvalue()


def test_plain_line_reads_as_promised():
    lines = run_plain(150, validate_at=[50], seconds_per_step=0.125)
    assert lines[0] == "step   1/150  loss 2.134  9.8k tok/s  1.2 GB  load 1.35"
    assert "step  50/150  loss 2.134  bpb 1.588  val 2.201  9.8k tok/s  eta 0:13  1.2 GB  load 1.35" in lines
    assert lines[-1] == "step 150/150  loss 2.134  9.8k tok/s  eta 0:00  1.2 GB  load 1.35"


@given(total_steps=st.integers(1, 500), interval=st.integers(1, 30))
def test_plain_lines_are_few_and_hold_the_first_the_last_and_every_validation(total_steps, interval):
    steps = sorted({1, *range(interval, total_steps + 1, interval), total_steps})
    validate_at = steps[::7]
    lines = run_plain(total_steps, steps, validate_at)
    shown = [int(re.search(r"(\d+)/", line)[1]) for line in lines]
    assert shown == sorted(set(shown))
    assert {steps[0], steps[-1], *validate_at} <= set(shown)
    assert len(lines) <= 20 + 2 + len(validate_at)
    assert sum("val " in line for line in lines) == len(validate_at)


def test_a_short_run_shows_every_step():
    assert len(run_plain(12)) == 12


def test_a_long_run_shows_about_twenty_steps_whatever_the_interval_of_updates():
    for interval in (1, 7, 30):
        assert 20 <= len(run_plain(1000, range(interval, 1001, interval))) <= 22


def test_a_resumed_run_shows_its_first_step_and_reckons_the_eta_from_there():
    lines = run_plain(1000, range(501, 1001))
    assert lines[0].startswith("step  501/1000")
    assert lines[1] == "step  550/1000  loss 2.134  9.8k tok/s  eta 7:30  1.2 GB  load 1.35"


def test_plain_output_neither_wraps_nor_has_control_characters_nor_reads_brackets_as_markup():
    console = plain_console()
    with Progress(10, console) as progress:
        progress.log("a[i] = b[/j] " + "x" * 200)
    assert console.file.getvalue() == "a[i] = b[/j] " + "x" * 200 + "\n"


def test_disabled_shows_nothing_anywhere():
    for console in (plain_console(), terminal(80)):
        with Progress(2, console, enabled=False) as progress:
            progress.log("hello")
            progress.update(1, loss=1.0, tokens_per_second=1.0)
            progress.update(2, loss=1.0, tokens_per_second=1.0, validation_loss=2.0)
        assert console.file.getvalue() == ""


def updated_progress(total_steps=150, step=50):
    clock = Clock()
    progress = Progress(total_steps, terminal(80), clock=clock)
    common = {"tokens_per_second": 9812.0, "memory_bytes": 812e6, "expert_load": 1.35, "grad_norm": 0.83, "lr": 4e-3}
    progress.update(step - 10, loss=2.5, validation_loss=2.201, bits_per_byte=1.588, **common)
    clock.now += 10
    progress.update(step, loss=2.134, **common)
    return progress


def test_live_line_at_80_columns_has_everything_the_run_is_judged_by():
    line = live_line(updated_progress(), 80)
    assert line.split("━")[-1].strip() == "50/150  loss 2.134  bpb 1.588  9.8k tok/s  eta 1:40  load 1.35"


def test_live_line_at_130_columns_adds_gradient_norm_and_learning_rate():
    assert live_line(updated_progress(), 130).rstrip().endswith("load 1.35  grad 0.83  lr 4.0e-03")


def test_narrow_live_line_keeps_step_and_loss_longest():
    progress = updated_progress(total_steps=150_000, step=5000)
    assert live_line(progress, 40).strip() == "5000/150000  loss 2.134  bpb 1.588"
    assert live_line(progress, 30).strip() == "5000/150000  loss 2.134"


@given(width=st.integers(1, 200), total_steps=st.sampled_from([150, 2000, 1_000_000]))
def test_live_line_is_one_line_that_leaves_the_last_column_free(width, total_steps):
    line = live_line(updated_progress(total_steps), width)
    assert "\n" not in line.rstrip("\n")
    assert len(line.rstrip()) < max(width, 2)


def test_terminal_shows_the_last_state_and_messages():
    console = terminal(80)
    with Progress(2, console) as progress:
        progress.update(1, loss=3.0, tokens_per_second=10.0)
        progress.log("saved [1]")
        progress.update(2, loss=2.5, tokens_per_second=10.0)
    lines = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", console.file.getvalue()).replace("\r", "\n").splitlines()
    assert "saved [1]" in [line.strip() for line in lines]
    assert "2/2  loss 2.500" in [line for line in lines if line.strip()][-1]


def test_an_error_ends_the_live_line_and_gives_the_cursor_back():
    console = terminal(80)
    with pytest.raises(RuntimeError), Progress(2, console):
        raise RuntimeError
    assert console.file.getvalue().endswith("\x1b[?25h")


@pytest.mark.parametrize(
    ("loss", "rate", "memory", "shown"),
    [
        (12.345, 812.4, 999_499_999, "loss 12.35   812 tok/s  999 MB"),
        (123.45, 98_100, 12_340_000_000, "loss 123.5   98k tok/s  12.3 GB"),
        (float("nan"), 9_960, 5e6, "loss nan   10k tok/s  5 MB"),
        (0.05, 1_250_000, 0, "loss 0.050  1.2M tok/s  0 MB"),
        (0.05, 3_100_000_000, 0, "loss 0.050  3.1G tok/s  0 MB"),
    ],
)
def test_numbers_stay_short(loss, rate, memory, shown):
    console = plain_console()
    Progress(9, console).update(1, loss=loss, tokens_per_second=rate, memory_bytes=memory)
    assert console.file.getvalue() == f"step 1/9  {shown}\n"
