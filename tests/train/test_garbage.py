"""Garbage is collected between steps, and a step needs no collection to give back its tensors."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from spurline.config import Job
from spurline.parallel.world import joined_world
from spurline.testing import RankPool
from spurline.testing.tiny import tiny_run, write_words
from spurline.train.garbage import collecting_every
from spurline.train.run import train
from spurline.train.trainer import Trainer, make_trainer


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each collection."""
    calls: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda *generation: calls.append(1) or 0)
    return calls


@pytest.fixture(autouse=True)
def _enabled_before_and_after() -> Iterator[None]:
    assert gc.isenabled()
    yield
    assert gc.isenabled()


def test_only_every_nth_step_collects(collected: list[int]) -> None:
    with collecting_every(3) as collect:
        assert not gc.isenabled()
        assert len(collected) == 1, "what is there before the first step is not looked at again"
        for step, expected in ((1, 1), (2, 1), (3, 2), (4, 2), (5, 2), (6, 3)):
            collect(step)
            assert len(collected) == expected, step


def test_interval_of_zero_leaves_it_to_python(collected: list[int]) -> None:
    with collecting_every(0) as collect:
        assert gc.isenabled()
        collect(1)
    assert collected == []


def test_objects_of_a_caller_that_froze_them_stay_frozen() -> None:
    frozen = gc.get_freeze_count()
    assert frozen, "tests/conftest.py freezes what was imported"
    with collecting_every(1):
        pass
    assert gc.get_freeze_count() == frozen


def test_objects_of_the_run_are_looked_at_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    monkeypatch.setattr(gc, "freeze", lambda: called.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: called.append("unfreeze"))
    with pytest.raises(KeyError), collecting_every(1):
        raise KeyError
    assert called == ["freeze", "unfreeze"]


def test_a_run_collects_when_it_is_due(tmp_path: Path, collected: list[int]) -> None:
    job = Job(dump_folder=str(tmp_path / "run"))
    config = tiny_run(write_words(tmp_path), training={"steps": 5, "gc_freq": 2}, job=job)
    before = len(collected)
    train("deepseek_v3", "deepseek_v3_debugmodel", config)
    assert len(collected) - before == 1 + 2


def tensors_after_steps(trainer: Trainer) -> list[int]:
    """The number of tensors that are alive after 3 and after 8 steps, without a collection in between."""
    alive = []
    for step in range(1, 9):
        trainer.step(step)
        if step == 3:
            gc.collect()
            gc.disable()
        if step in (3, 8):
            alive.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    gc.enable()
    return alive


AOT_EAGER = {"enable": True, "backend": "aot_eager"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation_checkpoint": {"mode": "full"}},
        {"activation_checkpoint": {"mode": "selective"}},
        {"activation_checkpoint": {"mode": "selective"}, "compile": AOT_EAGER},
    ],
    ids=["eager", "full recomputation", "selective recomputation", "compiled"],
)
def test_no_tensor_of_a_step_waits_for_a_collection(tmp_path: Path, options: dict[str, Any]) -> None:
    after_3, after_8 = tensors_after_steps(make_trainer(tiny_run(write_words(tmp_path), **options)))
    assert after_8 == after_3


def tensors_on_rank(rank: int, folder: str, degrees: dict[str, int]) -> list[int]:
    config = tiny_run(folder, parallelism=degrees)
    with mock.patch.dict(os.environ, {"WORLD_SIZE": "2"}), joined_world(config.parallelism) as world:
        return tensors_after_steps(make_trainer(config, world))


def test_no_tensor_of_a_sharded_step_waits_for_a_collection(ranks: RankPool, tmp_path: Path) -> None:
    degrees = {"expert_parallel_degree": 2, "tensor_parallel_degree": 2}
    for after_3, after_8 in ranks.run(tensors_on_rank, 2, str(write_words(tmp_path)), degrees):
        assert after_8 == after_3
