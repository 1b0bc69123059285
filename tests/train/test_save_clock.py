"""Checkpoints by time, and by default."""

import itertools

from spurline.config import Checkpoint
from spurline.testing.tiny import tiny_run, write_words
from spurline.train import loop
from spurline.train.run import train
from spurline.train.save_clock import SaveClock


def test_it_rings_once_and_counts_from_the_last_checkpoint():
    now = [0.0]
    clock = SaveClock(2, lambda: now[0])
    now[0] = 119
    assert not clock.rings()
    now[0] = 120
    assert clock.rings()
    assert not clock.rings(), "ranks that learn of it late would save twice"
    now[0] = 200
    clock.restart()
    now[0] = 300
    assert not clock.rings()
    now[0] = 320
    assert clock.rings()


def test_without_minutes_it_never_rings():
    now = [0.0]
    clock = SaveClock(0, lambda: now[0])
    now[0] = 1e9
    assert not clock.rings()


def test_run_saves_by_default_by_minutes_and_after_the_last_step(tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    minutes = itertools.count()  # each look at the clock is one later: one a step, and two with a checkpoint
    monkeypatch.setattr(loop, "SaveClock", lambda limit: SaveClock(limit, lambda: 60.0 * next(minutes)))
    config = tiny_run(
        write_words(tmp_path / "text"),
        job={"dump_folder": str(tmp_path / "run")},
        checkpoint=Checkpoint(interval_minutes=3.0),
        metrics={"validation_batches": 0, "sample_tokens": 0},
    )
    train("deepseek_v3", "deepseek_v3_debugmodel", config)
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["step-00000003", "step-00000006", "step-00000008"]
