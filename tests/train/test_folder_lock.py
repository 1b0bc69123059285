"""One owner a run folder: who has it, who may take it over, and what a second job is told."""

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from spurline.train import folder_lock
from spurline.train.exit_codes import FolderInUseError
from spurline.train.folder_lock import STALE_SECONDS, FolderLock
from spurline.train.processes import Process

ELSEWHERE = Process("elsewhere/1", 7, "1")


def write_owner(folder: Path, owner: Process, seconds_ago: float = 0.0, job: str = "") -> None:
    path = folder / "run.lock"
    path.write_text(json.dumps({**asdict(owner), "job": job, "since": "2026-01-01 00:00:00"}))
    now = path.stat().st_mtime
    os.utime(path, (now - seconds_ago, now - seconds_ago))


@pytest.fixture
def other():
    """A process that lives as long as the test."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield Process(Process.own().host, process.pid, started_of(process.pid))
    process.kill()
    process.communicate()


def started_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def test_owner_is_in_the_file_until_it_releases_the_folder(tmp_path):
    lock = FolderLock(tmp_path)
    lock.take()
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_second_job_is_refused_in_one_line_and_changes_nothing(tmp_path, other):
    write_owner(tmp_path, other)
    before = (tmp_path / "run.lock").read_bytes()
    with pytest.raises(FolderInUseError, match=re.escape(f"belongs to process {other.pid} on ")) as caught:
        FolderLock(tmp_path).take()
    assert "\n" not in str(caught.value)
    assert (tmp_path / "run.lock").read_bytes() == before


@pytest.mark.parametrize("how", ["ended", "id given again"])
def test_folder_of_a_dead_process_is_taken_over(tmp_path, other, how):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write_owner(tmp_path, replace(other, pid=ended.pid) if how == "ended" else replace(other, started="1"))
    lock = FolderLock(tmp_path)
    lock.take()
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("seconds", [0, STALE_SECONDS - 20])
def test_folder_of_another_machine_is_respected_while_its_heartbeat_is_fresh(tmp_path, other, seconds):
    write_owner(tmp_path, replace(other, host="elsewhere/1"), seconds)
    with pytest.raises(FolderInUseError, match=r"on elsewhere .* seconds ago"):
        FolderLock(tmp_path).take()
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]


def test_folder_of_another_machine_is_taken_over_when_its_heartbeat_is_old(tmp_path, other):
    write_owner(tmp_path, replace(other, host="elsewhere/1"), STALE_SECONDS + 20)
    FolderLock(tmp_path).take()


def test_later_attempt_of_a_job_takes_over_at_once_and_the_earlier_one_ends_with_its_next_beat(tmp_path):
    earlier = FolderLock(tmp_path, job="a")
    earlier.take()
    write_owner(tmp_path, replace(ELSEWHERE, pid=8), job="a")
    with pytest.raises(FolderInUseError, match=r"taken over by process 8 on elsewhere .*, a later attempt of this job"):
        earlier.beat()
    later = FolderLock(tmp_path, job="a")
    assert not later.wait(60, refuse_to_wait)
    later.take()
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize(("owner", "job"), [("a", ""), ("", ""), ("a", "b")])
def test_another_job_is_not_taken_for_an_attempt_of_this_one(tmp_path, owner, job):
    write_owner(tmp_path, ELSEWHERE, job=owner)
    with pytest.raises(FolderInUseError, match="belongs to process 7 on elsewhere"):
        FolderLock(tmp_path, job).take()


class Clock:
    """Time that passes only in `sleep`, which calls `each_second` as often. The lock's heartbeat was 30 s ago."""

    def __init__(self, monkeypatch, each_second=lambda: None):
        self.now, self.started, self.each_second, self.beat_ago = 1000.0, 1000.0, each_second, 30.0
        stand_in = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep, strftime=time.strftime)
        monkeypatch.setattr(folder_lock, "time", stand_in)
        monkeypatch.setattr(FolderLock, "_seconds_silent", lambda lock: self.beat_ago + self.passed)

    @property
    def passed(self):
        return self.now - self.started

    def sleep(self, seconds):
        self.now += seconds
        self.each_second()


def refuse_to_wait(line):
    raise AssertionError(line)


def test_owner_elsewhere_that_stays_silent_is_waited_for_and_given_up(tmp_path, monkeypatch):
    clock, said = Clock(monkeypatch), []
    write_owner(tmp_path, ELSEWHERE)
    lock = FolderLock(tmp_path)
    turns = 1
    while lock.wait(5, said.append):
        turns += 1
    assert (clock.passed, turns) == (STALE_SECONDS - 30, 30)
    assert said == [f"waiting up to 150 s for the owner of {tmp_path} (process 7 on elsewhere), which may have died"]
    lock.take()
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("how", ["heartbeat", "taken over", "released"])
def test_owner_elsewhere_that_shows_up_is_not_waited_for_any_longer(tmp_path, monkeypatch, how):
    path = tmp_path / "run.lock"

    def show_up():
        if clock.passed != 12:
            return
        if how == "heartbeat":
            os.utime(path, (5, 5))  # whatever the clock of that machine says
            clock.beat_ago = -12.0
        elif how == "taken over":
            write_owner(tmp_path, replace(ELSEWHERE, pid=8))
        else:
            path.unlink()

    clock = Clock(monkeypatch, show_up)
    write_owner(tmp_path, ELSEWHERE)
    lock = FolderLock(tmp_path)
    while lock.wait(5, lambda line: None):
        pass
    assert clock.passed == 12
    assert bool(lock.owned_by()) == (how != "released")


@pytest.mark.parametrize("content", ["nothing", "damaged", "lives here", "died here", "of the future", "old"])
def test_nothing_is_waited_for_where_it_is_known_whether_the_owner_lives(tmp_path, other, content):
    if content == "damaged":
        (tmp_path / "run.lock").write_text("{")
    elif content.endswith("here"):
        write_owner(tmp_path, other if content == "lives here" else replace(other, started="1"))
    elif content != "nothing":
        write_owner(tmp_path, ELSEWHERE, -3600 if content == "of the future" else STALE_SECONDS + 20)
    assert not FolderLock(tmp_path).wait(60, refuse_to_wait)


def test_heartbeat_is_the_modification_time(tmp_path):
    lock = FolderLock(tmp_path)
    lock.take()
    os.utime(tmp_path / "run.lock", (1, 1))
    lock.beat()
    assert (tmp_path / "run.lock").stat().st_mtime > 1e9


OWNER = '{"host": %s, "pid": %s, "started": "1", "since": "now"}'


@pytest.mark.parametrize(
    "content",
    [
        *("{", "[]", '{"pid": "x"}', "[" * 5000, OWNER % ('"a"', "Infinity"), OWNER % ('"a"', "9" * 5000)),
        OWNER % ('"\\u001b[2J"', "1"),
    ],
)
def test_damaged_lock_is_one_line(tmp_path, content):
    (tmp_path / "run.lock").write_text(content)
    with pytest.raises(FolderInUseError, match=r"run\.lock is damaged"):
        FolderLock(tmp_path).take()


def test_lock_that_somebody_else_has_taken_over_is_not_removed(tmp_path, other):
    lock = FolderLock(tmp_path)
    lock.take()
    write_owner(tmp_path, other)
    lock.release()
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == other.pid


def test_lock_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "run.lock")
    with pytest.raises(OSError, match="not a regular file"):
        FolderLock(tmp_path).owned_by()


def test_lock_of_the_future_is_not_given_up_after_a_while(tmp_path, other):
    write_owner(tmp_path, replace(other, host="elsewhere/1"), -3600)
    with pytest.raises(FolderInUseError, match=r"last seen in the future: .* Remove .*run\.lock if no job uses"):
        FolderLock(tmp_path).take()


def test_owner_that_was_silent_for_too_long_learns_that_it_is_not_the_owner_any_more(tmp_path, other):
    lock = FolderLock(tmp_path)
    lock.take()
    lock.beat()
    write_owner(tmp_path, other, seconds_ago=9)
    before = (tmp_path / "run.lock").stat().st_mtime
    lock._next_beat = 0.0
    with pytest.raises(FolderInUseError, match=f"was taken over by process {other.pid} on "):
        lock.beat()
    assert (tmp_path / "run.lock").stat().st_mtime == before


def test_lock_that_was_removed_is_written_again(tmp_path):
    lock = FolderLock(tmp_path)
    lock.take()
    (tmp_path / "run.lock").unlink()
    lock.beat()
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


def test_run_whose_folder_was_removed_learns_it(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    lock = FolderLock(folder)
    lock.take()
    shutil.rmtree(folder)
    with pytest.raises(FolderInUseError, match="run was removed while this run wrote to it"):
        lock.beat()
    assert not folder.exists()


def take_it(folder: str, barrier, winners) -> None:
    barrier.wait()
    try:
        FolderLock(folder).take()
        winners.put(os.getpid())
    except FolderInUseError:
        winners.put(0)
    barrier.wait()  # alive until all have tried


def test_of_many_that_find_a_dead_owner_one_wins(tmp_path, other):
    context = multiprocessing.get_context("fork")
    for _ in range(5):
        write_owner(tmp_path, replace(other, started="1"))
        barrier, winners = context.Barrier(6), context.Queue()
        processes = [context.Process(target=take_it, args=(str(tmp_path), barrier, winners)) for _ in range(6)]
        for process in processes:
            process.start()
        won = [winners.get() for _ in processes]
        for process in processes:
            process.join()
        assert sum(pid != 0 for pid in won) == 1
