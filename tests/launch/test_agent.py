"""The ranks of a node under `spurline launch`, with small scripts in the place of training."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from spurline.launch.agent import LaunchError, first_failure, run_ranks
from spurline.launch.options import Options

Run = Callable[..., int]
PRELUDE = """
import os, signal, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["SPURLINE_ATTEMPT"])
def note(word):
    with open(f"{os.environ['NOTES']}/{rank}", "a") as file: file.write(f"{word}\\n")
"""


@pytest.fixture(autouse=True)
def _leave_the_environment_as_it_was() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a script on two ranks; what they note is in a file of each."""
    monkeypatch.setenv("NOTES", str(tmp_path))

    def run(script: str, **options: object) -> int:
        return run_ranks(Options(ranks=2, **options), [sys.executable, "-c", PRELUDE + script])

    return run


def notes(folder: Path, rank: int) -> list[str]:
    path = folder / str(rank)
    return path.read_text().split() if path.exists() else []


def both_noted(folder: Path, word: str) -> Callable[[], bool]:
    return lambda: all(word in notes(folder, rank) for rank in (0, 1))


def send_signal() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def when(happened: Callable[[], bool], act: Callable[[], None]) -> None:
    """Acts as soon as it has happened; in the tests below, ranks wait for that."""

    def wait() -> None:
        while not happened():
            time.sleep(0.01)
        act()

    threading.Thread(target=wait, daemon=True).start()


def test_ranks_that_finish_are_a_run_that_finished(run: Run, tmp_path: Path, capfd) -> None:
    assert run("print('hello'); note(os.environ['WORLD_SIZE'])") == 0
    assert [notes(tmp_path, rank) for rank in (0, 1)] == [["2"], ["2"]]
    assert capfd.readouterr() == ("[rank0]:hello\n", "")


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("sys.exit(3)", 3, "rank 1 ended with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was killed by SIGKILL"),
    ],
)
def test_exit_code_of_the_rank_that_failed_is_kept(run: Run, capfd, end: str, code: int, told: str) -> None:
    assert run(f"if rank == 1: {end}\ntime.sleep(600)") == code
    assert capfd.readouterr() == ("", f"spurline launch: {told}\n")


def test_cause_counts_and_not_the_ranks_that_lost_another() -> None:
    def failure(code: int, second: int) -> ProcessFailure:
        found = ProcessFailure(0, 1, code, "")
        found.timestamp = second
        return found

    failures = {0: failure(5, 100), 1: failure(6, 101), 2: failure(3, 102), 3: failure(-15, 99)}
    assert first_failure(failures) == (1, failures[1])
    assert first_failure({0: failures[0]}) == (0, failures[0])


def test_failed_ranks_are_started_again(run: Run, tmp_path: Path) -> None:
    assert run("note(attempt)\nif attempt == 0: sys.exit(1)", restarts=2) == 0
    assert notes(tmp_path, 0)[-1] == notes(tmp_path, 1)[-1] == "1"
    assert {*notes(tmp_path, 0), *notes(tmp_path, 1)} == {"0", "1"}


def test_ranks_that_are_started_again_find_the_store_of_those_before(run: Run, tmp_path: Path) -> None:
    """The folder of the run is in it."""
    assert run("note(os.environ['MASTER_PORT'])\nif attempt < 2: time.sleep(0.1); sys.exit(1)", restarts=2) == 0
    assert len({*notes(tmp_path, 0), *notes(tmp_path, 1)}) == 1


def test_ranks_that_were_asked_to_stop_are_not_started_again(run: Run, tmp_path: Path, capfd) -> None:
    # The agent ends the other ranks as soon as one has ended: one of these by its signal, in the middle of its work.
    assert run("note(attempt)\nif rank == 0: sys.exit(75)\ntime.sleep(600)", restarts=2) == 75
    assert {*notes(tmp_path, 0), *notes(tmp_path, 1)} == {"0"}
    assert capfd.readouterr().err == ""


REFUSES = """
from spurline.train.launcher import record_error
note(attempt)
record_error("no shared disk", is_final=True)
sys.exit(2)
"""


def test_ranks_that_refused_to_start_are_not_started_again(run: Run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    assert run(REFUSES, restarts=2) == 2
    assert {*notes(tmp_path, 0), *notes(tmp_path, 1)} == {"0"}


SAVES = """
def stop(*_):
    time.sleep(0.5)
    note("saved")
    sys.exit(75)
signal.signal(signal.SIGUSR1, stop)
note("ready")
time.sleep(600)
"""


def test_signal_reaches_all_ranks_and_they_may_finish(run: Run, tmp_path: Path, capfd) -> None:
    when(both_noted(tmp_path, "ready"), send_signal)
    assert run(SAVES, restarts=2) == 75
    assert [notes(tmp_path, rank) for rank in (0, 1)] == [["ready", "saved"]] * 2
    assert capfd.readouterr().err == ""


STUBBORN = """
signal.signal(signal.SIGUSR1, lambda *_: note("asked"))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
note("ready")
end = time.monotonic() + 20
while time.monotonic() < end: time.sleep(0.1)
sys.exit(75)
"""


def test_second_signal_ends_the_ranks_at_once(run: Run, tmp_path: Path) -> None:
    when(both_noted(tmp_path, "ready"), send_signal)
    when(both_noted(tmp_path, "asked"), send_signal)
    assert run(STUBBORN) == 128 + signal.SIGUSR1


def test_ranks_that_do_not_end_in_time_are_killed(run: Run, tmp_path: Path) -> None:
    when(both_noted(tmp_path, "ready"), send_signal)
    assert run(STUBBORN, grace=1) == 128 + signal.SIGKILL


def test_nobody_at_the_endpoint_is_one_line() -> None:
    with pytest.raises(LaunchError, match=r"no connection to 192\.0\.2\.1:29500: is the job running on that node\?"):
        run_ranks(Options(ranks=1, nnodes="2", rdzv_endpoint="192.0.2.1:29500", join_timeout=1), [sys.executable])


def test_missing_nodes_are_one_line() -> None:
    options = Options(ranks=1, nnodes="2", rdzv_endpoint="127.0.0.1:29471", join_timeout=1)
    with pytest.raises(LaunchError, match=r"there were not 2 nodes at 127\.0\.0\.1:29471 within 1 s"):
        run_ranks(options, [sys.executable])
