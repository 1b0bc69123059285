"""The list of runs when some of their files were made by somebody else."""

import json

import pytest

from spurline.cli import main
from spurline.report.runs import status_of


def write_run(folder, metrics='{"step": 1, "loss": 2.0}\n', state=None, config='{"training": {"steps": 10}}'):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(metrics)
    (folder / "config.json").write_text(config)
    (folder / "state.json").write_text(json.dumps(state or {}))
    return folder


@pytest.mark.parametrize(
    "why",
    ["\x1b[2J\x1b]0;owned\x07", "lost\nspurline runs: all good", "\ud800", "\x9b31m", "\u202etxt", "x" * 10**6, ["a"]],
)
def test_the_reason_of_a_failure_is_one_printable_line(tmp_path, capsys, why):
    write_run(tmp_path / "good", state={"state": "finished", "why": ""})
    write_run(tmp_path / "bad", state={"state": "failed", "why": why})
    assert main(["runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 3
    assert out.replace("\n", "").isprintable()
    assert len(out) < 1500
    assert len(status_of(tmp_path / "bad").why) <= 300


def test_names_of_folders_and_options_are_printable_too(tmp_path, capsys):
    runs = [write_run(tmp_path / f"\x1b[2J{number}", config=f'{{"\\u001b[2J": {number}}}') for number in range(2)]
    assert main(["runs", str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert main(["runs", "compare", *map(str, runs)]) == 0
    assert "·[2J" in capsys.readouterr().out.partition("\n\n")[2]


HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    ("line", "step", "loss"),
    [
        (f'{{"step": 2, "loss": {HUGE}}}', 2, 2.0),
        ('{"step": 2, "loss": 1e999}', 2, 2.0),
        ('{"step": 2, "loss": NaN}', 2, 2.0),
        ('{"step": 2, "loss": true}', 2, 2.0),
        (f'{{"step": {HUGE}, "loss": 1.0}}', 1, 2.0),
        ('{"step": -1, "loss": 1.0}', 1, 2.0),
        ('{"step": "2", "loss": 1.0}', 1, 2.0),
        ("[1]", 1, 2.0),
        ('{"step": 2, "loss": 1.5}', 2, 1.5),
    ],
)
def test_only_steps_and_numbers_of_a_run_count(tmp_path, capsys, line, step, loss):
    run = write_run(tmp_path / "run", f'{{"step": 1, "loss": 2.0}}\n{line}\n')
    status = status_of(run)
    assert (status.step, status.loss) == (step, loss)
    assert main(["runs", "compare", str(run), str(run)]) == 0


@pytest.mark.parametrize("steps", [HUGE, "-1", "true", '"10"', "1.5"])
def test_a_number_of_steps_that_can_not_be_is_unknown(tmp_path, steps):
    assert status_of(write_run(tmp_path / "run", config=f'{{"training": {{"steps": {steps}}}}}')).steps is None
