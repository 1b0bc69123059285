import os
import signal
import subprocess
import sys
import threading

import pytest

from spurline.train.stop_signal import STOP_SIGNALS, StopSignal


def test_first_sigterm_is_only_noted_and_the_handler_is_given_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    assert signal.getsignal(signal.SIGTERM) is before


def test_rank_of_several_ends_by_its_launcher_and_not_by_a_second_signal(monkeypatch):
    """Slurm sends a signal to all processes of a job, and the launcher passes its own on."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.received == signal.SIGUSR1
        os.kill(os.getpid(), signal.SIGTERM)  # to the ranks that still write, when the first one has ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_each_signal_is_noted_by_its_number(number):
    with StopSignal() as stop:
        os.kill(os.getpid(), number)
        assert stop.received == number


def test_signal_that_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_signal_as_the_second_ends_the_process_too():
    code = (
        "import os, signal; from spurline.train.stop_signal import StopSignal\n"
        "with StopSignal() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGUSR1); print(stop.requested, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT); print('still here', flush=True)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (-signal.SIGINT, "True\n")


def test_second_sigterm_ends_the_process_at_once():
    code = (
        "import os, signal; from spurline.train.stop_signal import StopSignal\n"
        "with StopSignal() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM); print(stop.requested, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM); print('still here', flush=True)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "True\n")


def test_in_another_thread_signals_are_left_alone():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def enter():
        with StopSignal() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(False, before)]
