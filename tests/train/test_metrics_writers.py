"""Where lines of metrics go beside metrics.jsonl."""

import json
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest

from spurline.config import Metrics
from spurline.train.metrics.scalars import scalars
from spurline.train.metrics.tensorboard import TensorBoardWriter
from spurline.train.metrics.writers import open_writers

RECORD = {
    "step": 3,
    "loss": 2.5,
    "balance_loss": None,
    "expert_load": {"layers.1.moe": [3, 1]},
    "routing": {"layers.1.moe": {"load": 1.5}},
    "warnings": ["look here"],
}
NUMBERS = {"loss": 2.5, "routing/layers.1.moe/load": 1.5}


def test_scalars_are_the_numbers_by_their_path():
    assert dict(scalars(RECORD)) == NUMBERS


class SummaryWriter:
    """Notes what it is told, in the way of torch.utils.tensorboard."""

    made: list["SummaryWriter"]

    def __init__(self, log_dir, purge_step):
        self.log_dir, self.purge_step, self.closed = log_dir, purge_step, False
        self.file_writer = self
        self.events, self.texts = [], []
        self.made.append(self)

    def add_summary(self, summary, step):
        self.events.append(({value.tag: value.simple_value for value in summary.value}, step))

    def add_text(self, name, text, step):
        self.texts.append((name, text, step))

    def close(self):
        self.closed = True


@pytest.fixture
def stand_in_tensorboard(monkeypatch):
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    SummaryWriter.made = []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr("spurline.train.metrics.tensorboard.is_installed", lambda: True)
    return SummaryWriter.made


def test_tensorboard_is_written_by_default_where_it_is_installed(tmp_path, stand_in_tensorboard):
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    with open_writers(tmp_path, Metrics(), {}) as metrics:
        metrics.write(RECORD)
    (writer,) = stand_in_tensorboard
    assert writer.log_dir == str(tmp_path / "tensorboard")
    assert writer.events == [(NUMBERS, 3)]  # one event, as an event for each number would slow down the step
    assert writer.texts == [("warnings", "look here", 3)]
    assert writer.closed
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == RECORD


@pytest.mark.parametrize(("resume_from_step", "purged_from"), [(None, 1), (7, 8)])
def test_tensorboard_forgets_the_steps_that_are_written_again(
    tmp_path, stand_in_tensorboard, resume_from_step, purged_from
):
    open_writers(tmp_path, Metrics(), {}, resume_from_step)
    assert stand_in_tensorboard[0].purge_step == purged_from


def test_tensorboard_can_be_switched_off_or_be_missing(tmp_path, stand_in_tensorboard, monkeypatch):
    open_writers(tmp_path, Metrics(tensorboard=False), {})
    monkeypatch.setattr("spurline.train.metrics.tensorboard.is_installed", lambda: False)
    open_writers(tmp_path, Metrics(), {})
    assert stand_in_tensorboard == []


def test_other_ranks_write_nothing(tmp_path, stand_in_tensorboard):
    with open_writers(tmp_path, Metrics(), {}, enabled=False) as metrics:
        metrics.write(RECORD)
    assert stand_in_tensorboard == []
    assert list(tmp_path.iterdir()) == []


def test_tensorboards_own_reader_finds_what_was_written_and_not_what_was_written_again(tmp_path):
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_from_step, steps in [(None, [1, 2, 3]), (1, [2])]:
        writer = TensorBoardWriter(tmp_path, resume_from_step)
        for step in steps:
            writer.write({"step": step, "loss": 10.0 * step + (resume_from_step or 0)})
        writer.close()
        time.sleep(1.1)  # files are sorted by the second in their names: a run resumes in a later one
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 10.0), (2, 21.0)]


@pytest.fixture
def stand_in_wandb(monkeypatch):
    """Notes what it is told, in the way of wandb."""
    calls = SimpleNamespace(inits=[], logs=[], alerts=[], finished=0)

    class Run:
        id = "abc"

        def log(self, numbers, step):
            calls.logs.append((numbers, step))

        def alert(self, title, text):
            calls.alerts.append(text)

        def finish(self):
            calls.finished += 1

    def init(**options):
        calls.inits.append(options)
        return Run()

    module = ModuleType("wandb")
    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_wandb_gets_numbers_warnings_and_the_config(tmp_path, stand_in_wandb):
    folder = tmp_path / "my_run"
    folder.mkdir()
    metrics = Metrics(tensorboard=False, wandb="offline", wandb_project="moe")
    with open_writers(folder, metrics, {"training": {"steps": 3}}) as writers:
        writers.write(RECORD)
    (options,) = stand_in_wandb.inits
    assert options["config"] == {"training": {"steps": 3}}
    assert [options[name] for name in ("mode", "project", "name", "dir")] == ["offline", "moe", "my_run", str(folder)]
    assert stand_in_wandb.logs == [(NUMBERS, 3)]
    assert stand_in_wandb.alerts == ["look here"]
    assert stand_in_wandb.finished == 1


def test_a_resumed_run_goes_on_under_its_id_and_a_new_one_does_not(tmp_path, stand_in_wandb):
    for resume_from_step in (None, 5, None):
        open_writers(tmp_path, Metrics(tensorboard=False, wandb="online"), {}, resume_from_step)
    assert [(options["id"], options["resume"]) for options in stand_in_wandb.inits] == [
        (None, None),
        ("abc", "allow"),
        (None, None),
    ]


def test_missing_wandb_is_told_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"metrics.wandb: .* pip install 'spurline\[wandb\]'"):
        open_writers(tmp_path, Metrics(wandb="online"), {})
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_fails_to_close_keeps_no_other_from_closing(tmp_path, stand_in_tensorboard, stand_in_wandb):
    def fail():
        raise RuntimeError("no network")

    writers = open_writers(tmp_path, Metrics(wandb="online"), {})
    stand_in_tensorboard[0].close = fail
    with pytest.raises(RuntimeError, match="no network"), writers:
        writers.write(RECORD)
    assert stand_in_wandb.finished == 1
