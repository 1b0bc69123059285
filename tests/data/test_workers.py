import os
import subprocess
import sys
import time
from collections.abc import Iterator
from operator import neg
from pathlib import Path

import pytest

from spurline.data.workers import map_in_order


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}


def test_results_come_in_order_and_few_are_in_flight():
    taken: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    results = map_in_order(neg, numbers(), num_workers=2)
    assert next(results) == 0
    assert len(taken) <= 6
    assert list(results) == list(range(-1, -100, -1))


def test_workers_end_with_the_results_and_when_nobody_wants_more():
    before = children()
    results = map_in_order(neg, range(1000), num_workers=2)
    next(results)
    workers = children() - before
    assert len(workers) >= 2
    results.close()
    # The process that tracks shared resources for Python stays.
    assert len(children() - before) <= 1


def test_worker_that_ends_is_told():
    with pytest.raises(ValueError, match=r"^a worker process died; .* fewer --workers$"):
        list(map_in_order(os._exit, range(100), num_workers=2))


ORPHANS = """
import sys, time
from spurline.data.workers import map_in_order
def numbers():
    yield from range(4)
    for pid in open(f"/proc/self/task/{__import__('os').getpid()}/children").read().split():
        print(pid, flush=True)
    print("done", flush=True)
    time.sleep(60)
if __name__ == "__main__":
    list(map_in_order(abs, numbers(), 2))
"""


def test_workers_end_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(line) for line in iter(parent.stdout.readline, "done\n")]
    assert len(pids) >= 2
    parent.kill()
    parent.wait()
    end = time.monotonic() + 20
    while any(is_running(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
