"""The watchdog's limits, what it knows of a rank, and whom it blames. Real runs: tests/distributed/test_faults.py."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from spurline.parallel.rendezvous import Meeting
from spurline.train import watchdog as watchdog_module
from spurline.train.exit_codes import ExitCode
from spurline.train.processes import Process
from spurline.train.side_channel import Beat, SideChannel, in_one_line, is_communication_error
from spurline.train.watchdog import STEP, Watchdog
from spurline.train.whereabouts import place_of


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(watchdog_module, "time", clock)
    return clock


def take_steps(watchdog, clock, *seconds):
    for step, duration in enumerate(seconds, 1):
        watchdog.mark(step, STEP)
        clock.now += duration
    watchdog.mark(len(seconds) + 1, STEP)


def test_limit_follows_the_median_step_with_a_floor(tmp_path, clock):
    watchdog = Watchdog(channel=channels(2, tmp_path)[0])
    assert watchdog.limit == 300
    take_steps(watchdog, clock, 1000, 30, 40, 2)
    assert watchdog.limit == 20 * 35
    assert Watchdog(seconds=10).limit == 10
    assert Watchdog(seconds=-1, channel=channels(2, tmp_path)[0]).limit == float("inf")
    assert Watchdog().limit == float("inf")


def test_first_step_and_other_phases_have_more_time(tmp_path, clock):
    watchdog = Watchdog(seconds=10)
    watchdog.mark(1, STEP)
    assert watchdog.limit_of_phase == 60
    clock.now += 1
    watchdog.mark(2, STEP)
    assert watchdog.limit_of_phase == 10
    watchdog.mark(2, "checkpoint")
    assert watchdog.limit_of_phase == 60


def channels(size, folder):
    store = dist.HashStore()
    return [SideChannel(Meeting(rank, size, store, store), folder) for rank in range(size)]


def beat(rank, **entries):
    return Beat(rank, Process("elsewhere/1", 7, "1"), 5, **{"step": 4, "phase": "forward", **entries})


@pytest.mark.parametrize(
    ("third", "why"),
    [({"collective": ""}, "not in a collective"), ({"step": 3, "collective": "x"}, "a step behind"),
     ({"collective": "x", "calls": 3}, "fewer collectives begun")],
)  # fmt: skip
def test_rank_that_did_not_arrive_is_named(tmp_path, third, why):
    sides = channels(4, tmp_path)
    for rank, side in enumerate(sides):
        side.send(beat(rank, **(third if rank == 2 else {"collective": "all_reduce", "calls": 9})))
    watchdog = Watchdog(10, sides[0])
    watchdog.mark(4, STEP)
    line, silent = watchdog._verdict(sides[0], [])
    assert "step 4: step has taken 0 s, and rank 2 did not arrive. Last seen: rank 2 (process 7 on elsewhere)" in line
    assert "ranks 0, 1, 3 wait for it" in line
    assert silent == []


def test_error_that_a_rank_has_reported_is_shown_and_is_the_verdict(tmp_path, clock):
    failed, waits = channels(2, tmp_path)
    failed.send(beat(1, collective=""))
    failed.tell_first_error("rank 1: ValueError: bad", 1)
    watchdog, shown = Watchdog(10, waits), []
    watchdog.show = shown.append
    watchdog._watch_others(waits, False)
    assert shown == []  # ranks that fail end soon, and show it themselves
    clock.now += 7
    for _ in range(2):
        watchdog._watch_others(waits, False)
    assert shown == ["rank 1: ValueError: bad; waiting for what the ranks have begun, such as a checkpoint"]
    assert watchdog._verdict(waits, [1]) == ("rank 1: ValueError: bad", [1])


def test_rank_that_was_never_heard_of_is_named(tmp_path):
    sides = channels(3, tmp_path)
    for rank in (0, 1):
        sides[rank].send(beat(rank))
    line, silent = Watchdog(10, sides[1])._verdict(sides[1], [2])
    assert "rank 2 has not been heard of since the ranks met" in line
    assert silent == [2]


def test_each_rank_watches_the_next_one_that_is_not_done(tmp_path, clock):
    sides = channels(3, tmp_path)
    sides[1].leave(beat(1))
    sides[2].send(beat(2))
    watchdog = Watchdog(10, sides[0])
    assert watchdog._silent_rank(sides[0]) is None
    clock.now += 7
    assert watchdog._silent_rank(sides[0]) is None
    clock.now += 1
    assert watchdog._silent_rank(sides[0]) == 2
    sides[2].send(Beat(2, Process.own(), 6))
    assert watchdog._silent_rank(sides[0]) is None


def test_rank_that_was_not_heard_of_may_still_start(tmp_path, clock):
    first, second = channels(2, tmp_path)
    watchdog = Watchdog(10, first)
    assert watchdog._silent_rank(first) is None
    clock.now += 44
    assert watchdog._silent_rank(first) is None
    clock.now += 2
    assert watchdog._silent_rank(first) == 1
    second.send(beat(1))
    assert watchdog._silent_rank(first) is None
    clock.now += 8
    assert watchdog._silent_rank(first) == 1


def test_first_verdict_and_first_error_hold_for_all(tmp_path):
    first, second = channels(2, tmp_path)
    assert first.judge("rank 1 is late", [1]) == second.judge("rank 0 is late", [0])
    assert second.tell_first_error("another", 1)["line"] == "rank 1 is late"
    assert in_one_line("rank 0 failed:\nTraceback\n  a line\nKeyError: 3\n") == "rank 0 failed: KeyError: 3"
    assert in_one_line("one line") == "one line"
    assert (tmp_path / "errors.log").read_text().count("\n") == 1


def test_failed_collective_is_blamed_on_the_rank_that_has_failed_or_is_gone(tmp_path):
    failed, victim = channels(2, tmp_path)
    failed.tell_first_error("rank 0: ValueError: bad", 0)
    assert str(victim.explain(3)) == "rank 0: ValueError: bad"

    gone, victim = channels(2, tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone.send(Beat(0, Process(Process.own().host, ended.pid, "1")))
    line = str(victim.explain(3))
    assert line.startswith(f"rank 0 is gone: process {ended.pid} on ")
    assert line.endswith("has ended without a word in step 3 (killed?)")


def test_only_errors_of_collectives_are_blamed_on_others():
    assert is_communication_error(RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection reset by peer"))
    assert is_communication_error(RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:2094, unhandled system error"))
    assert is_communication_error(RuntimeError("oneCCL: ofi_comp_wait: communication failed"))
    assert not is_communication_error(RuntimeError("shapes differ"))
    assert not is_communication_error(ValueError("gloo"))


class Waits(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.go_on = threading.Event(), threading.Event()

    def forward(self):
        self.inside.set()
        self.go_on.wait()


def test_another_thread_can_tell_line_and_layer():
    model = nn.Sequential(Waits())
    thread = threading.Thread(target=model[0])
    thread.start()
    model[0].inside.wait()
    place = place_of(thread.ident, {id(model[0]): "layers.0"})
    model[0].go_on.set()
    thread.join()
    assert place.layer == "layers.0"
    assert place.collective == ""


STUCK = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from torch import nn
from spurline.train.guards import Guard
from spurline.train.progress import Progress
from spurline.train.run_folder import Claim
from spurline.train.watchdog import STEP
trainer = SimpleNamespace(model=nn.Module(), timer=SimpleNamespace(current=""))
def read_data():
    time.sleep(600)
guard, claim = Guard(1), Claim(Path(sys.argv[1]), job="a")
with guard.watching(None), guard.protecting(claim, Progress(2, enabled=False)):
    guard.own_folder(trainer)
    print(Path(sys.argv[1], "run.lock").read_text())
    guard.watchdog.mark(1, STEP)
    guard.watchdog.mark(2, STEP)
    read_data()
"""


def test_step_that_hangs_ends_the_process_with_its_stack_in_the_run_folder_which_it_releases(tmp_path):
    # The attempt before was on another machine, and has left its lock.
    earlier = {"host": "elsewhere/1", "pid": 7, "started": "1", "job": "a", "since": "today"}
    (tmp_path / "run.lock").write_text(json.dumps(earlier))
    done = subprocess.run([sys.executable, "-c", STUCK, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == ExitCode.WATCHDOG
    assert done.stderr.startswith("spurline train: step 2: step has taken ")
    assert done.stderr.count("\n") == 1
    assert "in read_data" in Path(tmp_path, "logs", "stacks_attempt_0_rank_0.txt").read_text()
    assert json.loads(done.stdout)["job"] == "a"
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


TAKEN_OVER = """
import json, sys, time
from pathlib import Path
from spurline.train.folder_lock import FolderLock
from spurline.train.watchdog import Watchdog
lock, watchdog = FolderLock(sys.argv[1]), Watchdog(seconds=20)
lock.take()
lock.path.write_text(json.dumps({"host": "elsewhere/1", "pid": 7, "started": "1", "since": "today"}))
watchdog.on_beat = lock.beat
watchdog.start()
time.sleep(600)
"""


def test_run_whose_folder_was_taken_over_ends_and_leaves_the_folder_alone(tmp_path):
    command = [sys.executable, "-c", TAKEN_OVER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == ExitCode.FOLDER_IN_USE
    assert done.stderr.startswith(f"spurline train: {tmp_path} was taken over by process 7 on elsewhere (since today)")
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]
