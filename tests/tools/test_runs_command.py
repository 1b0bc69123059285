"""`spurline runs`: what a folder of runs tells."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spurline.cli import main
from spurline.config import Job
from spurline.config_io import load
from spurline.testing.tiny import tiny_run, write_words
from spurline.train.exit_codes import DivergedError
from spurline.train.folder_lock import FolderLock
from spurline.train.run import train
from spurline.train.trainer import Trainer


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Trains a few steps in the next folder of outputs/tiny."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    write_words(tmp_path / "text")

    def run(steps=3, lr=4e-3):
        metrics = {"validation_batches": 1, "sample_tokens": 0, "tensorboard": False}
        config = tiny_run("text", job=Job(runs_folder="outputs/tiny"), optimizer={"lr": lr}, metrics=metrics)
        config = replace(config, training=replace(config.training, steps=steps))
        return train("deepseek_v3", "deepseek_v3_debugmodel", config).folder

    return run


def listed(capsys, *arguments):
    capsys.readouterr()
    assert main(["runs", *arguments, "--json"]) == 0
    return {Path(entry["folder"]).name: entry for entry in json.loads(capsys.readouterr().out)}


def test_runs_are_listed_with_their_state(run, monkeypatch, capsys):
    run()

    def fail(self, step):
        raise DivergedError("the loss is nan")

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "step", fail)
        with pytest.raises(DivergedError):
            run()
    killed, running = run(), run()
    (killed / "state.json").unlink()
    lines = (killed / "metrics.jsonl").read_text().splitlines(keepends=True)
    (killed / "metrics.jsonl").write_text("".join(lines[:1]))
    (running / "state.json").unlink()
    lock = FolderLock(running)
    lock.take()
    found = listed(capsys)
    lock.release()
    assert {name: (entry["state"], entry["step"]) for name, entry in found.items()} == {
        "0001": ("finished", 3),
        "0002": ("failed", 0),
        "0003": ("failed", 1),
        "0004": ("running", 3),
    }
    assert (found["0002"]["why"], found["0003"]["why"]) == ("the loss is nan", "it was killed")
    first = json.loads(Path("outputs/tiny/0001/metrics.jsonl").read_text().splitlines()[-1])
    assert found["0001"]["loss"] == first["loss"]
    assert found["0001"]["validation_loss"] == first["validation_loss"]
    assert list(listed(capsys, "outputs/tiny/0001")) == ["0001"]

    assert main(["runs"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:5] == ["run", "state", "step", "loss", "validation"]
    assert len(table) == 5
    assert any(line.startswith("outputs/tiny/0001  finished  3/3") for line in table)


def test_two_runs_are_compared_by_options_and_losses(run, capsys):
    first, second = run(), run(steps=5, lr=1e-3)
    capsys.readouterr()
    assert main(["runs", "compare", str(first), "outputs/tiny", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == [str(first), str(second)], "a folder of numbered runs is its latest"
    assert {entry["option"]: entry["values"] for entry in found["options"]} == {
        "training.steps": [3, 5],
        "optimizer.lr": [4e-3, 1e-3],
    }
    assert [entry["step"] for entry in found["losses"]] == [1, 2, 3]
    assert found["losses"][0]["loss"][0] == found["losses"][0]["loss"][1], "the same weights and data"
    assert main(["runs", "compare", str(first), str(second)]) == 0
    out = capsys.readouterr().out
    assert "optimizer.lr    0.004  0.001" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no folder nowhere"),
        (["compare", "a"], "compare takes two runs, as in spurline runs compare outputs/a outputs/b, got 1"),
        (["compare", "a", "b"], "a is not a run folder: there is no config.json in it"),
        (["a", "b"], "expected one FOLDER, got 2: a b"),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["runs", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_config_records_where_the_run_was_started_and_is_read_without_it(run):
    folder = run()
    recorded = json.loads((folder / "config.json").read_text())["environment"]
    assert recorded.keys() == {
        *("spurline", "torch", "python", "git_commit", "host", "platform", "device", "ranks", "started")
    }
    assert (recorded["device"], recorded["ranks"]) == ("cpu", 1)
    assert all(recorded[name] for name in ("spurline", "torch", "python", "host", "started"))
    assert load(folder / "config.json")[2].job.dump_folder == str(folder)
