"""The same step fails again and again: an older checkpoint, and then an end of it."""

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from spurline.config import Job
from spurline.testing.tiny import tiny_run, write_words
from spurline.train.checkpoint.ranks import DiskError
from spurline.train.crash_loop import CrashLoop, StepBack
from spurline.train.run import train
from spurline.train.trainer import Trainer


def start(folder, resumed_from, run="a"):
    loop = CrashLoop(folder, {"run": run}, max_same_failures=4)
    back = loop.step_back().num_checkpoints
    loop.start(resumed_from)
    return loop, back


def fail(folder, resumed_from, step, error="lost", run="a", rank=0):
    """One start that fails; returns by how many checkpoints it stepped back."""
    loop, back = start(folder, resumed_from, run)
    with pytest.raises(RuntimeError), loop.recorded(rank, lambda: step):
        raise RuntimeError(error)
    return back


def test_from_the_second_equal_failure_on_it_steps_back_and_after_the_fourth_it_gives_up(tmp_path):
    assert [fail(tmp_path, resumed_from, 12) for resumed_from in (0, 10, 8, 6)] == [0, 0, 1, 2]
    with pytest.raises(
        ValueError, match=r"step 12 has failed 4 times in a row .*resumed from steps 0, 10, 8, 6\..*lost"
    ):
        CrashLoop(tmp_path, {"run": "a"}, 4).step_back()
    assert CrashLoop(tmp_path, {"run": "a"}, 0).step_back().num_checkpoints == 3, "without a limit"
    assert CrashLoop(tmp_path, {"run": "other options"}, 4).step_back() == StepBack()
    (tmp_path / "failures.jsonl").unlink()
    assert CrashLoop(tmp_path, {"run": "a"}, 4).step_back() == StepBack()


def test_another_step_another_error_another_run_or_a_good_end_begin_anew(tmp_path):
    fail(tmp_path, 0, 12)
    fail(tmp_path, 10, 12)
    assert fail(tmp_path, 8, 13) == 1
    assert fail(tmp_path, 10, 13, "port 4711 of peer 0x7f closed") == 0
    assert fail(tmp_path, 10, 13, "port 17 of peer 0xab closed") == 0
    assert fail(tmp_path, 10, 13, run="b") == 0
    loop, back = start(tmp_path, 10, "b")
    assert back == 0
    with loop.recorded(0, lambda: 13):
        pass
    assert fail(tmp_path, 10, 13, run="b") == 0


def test_errors_that_differ_in_numbers_only_are_the_same(tmp_path):
    fail(tmp_path, 0, 12, "port 4711 of peer 0x7f closed after 0.3 s")
    fail(tmp_path, 10, 12, "port 17 of peer 0xab closed after 12 s")
    assert start(tmp_path, 10)[1] == 1


def test_the_ranks_may_fail_in_any_order(tmp_path):
    for resumed_from, order in ((0, (0, 2)), (10, (2, 0))):
        loop, _ = start(tmp_path, resumed_from)
        for rank in order:
            with pytest.raises(RuntimeError), loop.recorded(rank, lambda: 12):
                raise RuntimeError("out of memory" if rank == 2 else "connection closed")
    assert CrashLoop(tmp_path, {"run": "a"}, 4).step_back().num_checkpoints == 1


def test_a_start_without_an_end_was_killed_in_the_step_after_its_last_line(tmp_path):
    for resumed_from in (0, 10, 10):
        _, back = start(tmp_path, resumed_from)
        (tmp_path / "metrics.jsonl").write_text('{"step": 10}\n{"step": 11}\n{"step": 1')
    assert back == 1
    (tmp_path / "metrics.jsonl").write_text('{"step": 11}\n{"step": 14}\n')
    assert start(tmp_path, 10)[1] == 0, "it has come further"
    assert '"step": 15, "error": "the process was killed"' in (tmp_path / "failures.jsonl").read_text()


def test_an_interrupt_and_a_full_disk_do_not_count(tmp_path):
    def disk_error():
        try:
            raise DiskError("No space left on device")
        except DiskError as error:
            raise ValueError("can't write the checkpoint") from error

    for _ in range(3):
        loop, back = start(tmp_path, 10)
        assert back == 0
        with pytest.raises(KeyboardInterrupt), loop.recorded(0, lambda: 12):
            raise KeyboardInterrupt
    for step in (12, 13):
        loop, back = start(tmp_path, 10)
        assert back == 0
        with pytest.raises(ValueError, match="can't write"), loop.recorded(0, lambda step=step: step):
            disk_error()
    assert "can't write" not in (tmp_path / "failures.jsonl").read_text()


@pytest.mark.parametrize(
    "content", [b"\0\xff\n", b"[]\n1\nnull\n", b'{"resumed_from": "x", "run": 1}\n', b'{"error": 1, "step": {}}\n' * 3]
)
def test_a_file_with_anything_in_it_is_no_traceback(tmp_path, content):
    (tmp_path / "failures.jsonl").write_bytes(content)
    assert CrashLoop(tmp_path, {"run": "a"}, 4).step_back() == StepBack()


@pytest.fixture
def run(tmp_path, capsys):
    """Trains 8 steps with a checkpoint every second one; `broken(trainer, step)` may raise. Returns what was said."""
    (tmp_path / "text").mkdir()
    config = tiny_run(
        write_words(tmp_path / "text"),
        checkpoint={"enable": True, "interval": 2},
        metrics={"validation_batches": 0, "sample_tokens": 0, "tensorboard": False},
    )

    def run(folder, broken=lambda trainer, step: None):
        step_of = Trainer.step

        def step(self, number):
            broken(self, number)
            return step_of(self, number)

        capsys.readouterr()
        with mock.patch.object(Trainer, "step", step):
            train("deepseek_v3", "deepseek_v3_debugmodel", replace(config, job=Job(str(tmp_path / folder))))
        return capsys.readouterr().out

    return run


def losses(folder: Path):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"], record["tokens_seen"]) for record in records]


def test_a_run_steps_back_past_a_state_that_does_not_work_and_ends_as_an_undisturbed_one(run, tmp_path):
    def broken(trainer, step):
        """Something in the state that was reached by step 4, and is loaded with it."""
        if step == 5 and trainer.start.step in (0, 4):
            raise RuntimeError("out of luck")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of luck"):
            run("run", broken)
    out = run("run", broken)
    assert (
        "step 5 has failed 2 times in a row with the same error (RuntimeError: out of luck):"
        " stepping back to the checkpoint of step 2\n"
    ) in out
    assert "step 3/8" in out
    run("undisturbed")
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")


def test_a_run_that_has_stepped_back_does_not_return_to_the_checkpoint_it_left(run, tmp_path):
    """Killed before its next checkpoint, it would take the steps after the old one again, and miss those before."""

    def broken(trainer, step):
        if step == 5:
            raise RuntimeError("out of luck")

    def interrupted(trainer, step):
        if step == 4:
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of luck"):
            run("run", broken)
    with pytest.raises(KeyboardInterrupt):
        run("run", interrupted)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == [".step-00000004.passed", "step-00000002"]
    assert "resuming from the checkpoint of step 2\n" in run("run")
    run("undisturbed")
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")
    assert not (checkpoints / ".step-00000004.passed").exists()


def test_a_run_that_always_fails_is_not_started_a_fifth_time(run, tmp_path):
    def broken(trainer, step):
        if step == 5:
            raise RuntimeError("out of luck")

    for _ in range(4):
        with pytest.raises(RuntimeError, match="out of luck"):
            run("run", broken)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"resumed from steps 0, 4, 2, 2\..*The error: RuntimeError: out of luck"):
        run("run", broken)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
