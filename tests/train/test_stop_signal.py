import os
import signal
import subprocess
import sys
import threading

from spurline.train.stop_signal import StopSignal


def test_first_sigterm_is_only_noted_and_the_handler_is_given_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    assert signal.getsignal(signal.SIGTERM) is before


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
