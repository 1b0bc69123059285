"""A rank and its launcher: neither outlives the other, and errors are told."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spurline.train.launcher import LAUNCHER_VARIABLE, record_error

PARENT = """
import os, subprocess, sys
os.environ["TORCHELASTIC_RUN_ID"] = "x"
child = "import time; from spurline.train.launcher import die_with_launcher as d; d(); print('ready', flush=True)"
child += "; time.sleep(600)"
process = subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
print(process.pid, flush=True)
input()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG")
def test_rank_is_gone_when_its_launcher_was_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    assert parent.stdout.readline() == "ready\n"
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    try:
        while is_running(pid):
            assert time.monotonic() < deadline, "the rank lives on without its launcher"
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG")
def test_rank_ends_if_its_launcher_was_gone_before_it_could_ask():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    ask = "from spurline.train.launcher import die_with_launcher as d; d(); print('lives on')"
    variables = {**os.environ, "TORCHELASTIC_RUN_ID": "x", LAUNCHER_VARIABLE: str(gone.pid)}
    rank = subprocess.run([sys.executable, "-c", ask], env=variables, capture_output=True, text=True)
    assert (rank.returncode, rank.stdout) == (-signal.SIGKILL, "")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_first_error_is_the_one_that_the_launcher_shows(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    record_error("the cause", "Traceback ...")
    record_error("a consequence")
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    failure = ProcessFailure(0, 1, 1, str(tmp_path / "error.json"))
    assert failure.message["message"] == "the cause"
    assert failure.message["extraInfo"]["py_callstack"] == "Traceback ..."
    assert json.loads((tmp_path / "error.json").read_text())


END = """
import threading, time, atexit, sys
from spurline.train.launcher import end_process
atexit.register(lambda: print("at exit", flush=True))
threading.Thread(target=time.sleep, args=(600,)).start()  # the interpreter would wait for it
print("last words", end="")
end_process({code})
"""


@pytest.mark.parametrize(("code", "out"), [(0, "last wordsat exit\n"), (6, "last words")])
def test_process_ends_with_its_code_and_all_it_has_written(code, out):
    done = subprocess.run([sys.executable, "-c", END.format(code=code)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, "")
