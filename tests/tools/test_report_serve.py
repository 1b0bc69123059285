"""`spurline report --serve`: a page on this machine alone, which follows a run."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import CHROMIUM, open_tab
from made_up_runs import make_run, record_of_step

from spurline.report.serve import ReportServer

TINY = """
    train --module deepseek_v3 --config deepseek_v3_debugmodel --training.steps 1000000 --training.seq_len 16
    --training.local_batch_size 1 --model.dim 16 --model.num_layers 2 --data.path text --metrics.sample_tokens 0
    --metrics.validation_batches 0 --job.dump_folder run
"""


@contextmanager
def serving(*folders: Path) -> Iterator[ReportServer]:
    with ReportServer([str(folder) for folder in folders], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: ReportServer, path: str, host: str | None = None, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1])
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_address[1]}")
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def add_step(folder: Path, step: int) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(record_of_step(step, 40)) + "\n")


def test_page_and_version_follow_the_files(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=10, total_steps=40)
    before = sorted(tmp_path.rglob("*"))
    with serving(run) as server:
        server.follower._seconds = 0.0
        code, page = ask(server, "/")
        _, version = ask(server, "/version")
        assert (code, "step 10 of 40" in page, f'content="{version}"' in page) == (200, True, True)
        assert ask(server, "/version")[1] == version
        add_step(run, 11)
        server.follower._seconds = 0.0  # of a page that is slow to make, fewer are made
        assert ask(server, "/version")[1] != version
        assert "step 11 of 40" in ask(server, "/")[1]
    assert sorted(tmp_path.rglob("*")) == before


def test_pages_that_are_slow_to_make_are_made_less_often(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=10, total_steps=40)
    with serving(run) as server:
        ask(server, "/")
        server.follower._seconds = 1e6
        add_step(run, 11)
        assert "step 10 of 40" in ask(server, "/")[1]


def test_no_path_leads_to_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    run = make_run(tmp_path / "run", steps=2)
    paths = "/config.json /../secret /..%2fsecret /%2e%2e/secret //etc/passwd /?x /./ /version/.. secret ../secret"
    with serving(run) as server:
        for path in paths.split():
            assert ask(server, path) == (404, "There is / and nothing else.\n"), path


def test_only_requests_to_this_machine_by_name_are_answered(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    with serving(run) as server:
        port = server.server_address[1]
        assert server.server_address[0] == "127.0.0.1"
        assert ask(server, "/", host=f"localhost:{port}")[0] == 200
        for host in ("attacker.example", f"attacker.example:{port}", "127.0.0.1", "localhost"):
            assert ask(server, "/", host=host)[0] == 403, host
        assert ask(server, "/", method="POST")[0] == 501


def test_a_run_without_a_step_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with serving(tmp_path / "run") as server:
        assert "Waiting for the first step" in ask(server, "/")[1]
        make_run(tmp_path / "run", steps=3)
        server.follower._seconds = 0.0
        assert "3 steps" in ask(server, "/")[1]


def test_a_folder_of_numbered_runs_is_the_latest_of_them(spurline, monkeypatch, tmp_path: Path) -> None:
    for number in ("0001", "0002"):
        make_run(tmp_path / "runs" / number, steps=2)
    served = []
    monkeypatch.setattr("spurline.tools.report._serve", lambda folders, port: served.append(folders) or 0)
    assert spurline("report", "runs", "--serve").code == 0
    assert served == [[str(Path("runs/0002"))]]


def test_what_cannot_be_served_is_one_line(spurline, tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, out, err = spurline("report", "run", "--serve", "--port", port)
    assert (code, out) == (2, "")
    assert err.startswith(f"spurline report: --port {port} can't be used (Address already in use): give another one")
    for options, words in {
        ("nowhere", "--serve"): "nowhere: there is no such run folder",
        ("run", "--serve", "--out", "x.html"): "--out writes a file and --serve does not",
        ("run", "--serve", "--port", "70000"): "--port must be between 0 and 65535",
    }.items():
        code, out, err = spurline("report", *options)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert words in err


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_page_in_a_browser_follows_a_job(tmp_path: Path) -> None:
    """A real job and a real server: the step in the page rises without a reload, and the page sees both end."""
    (tmp_path / "text").write_text("All work and no play makes a dull model. " * 100)
    (tmp_path / "run").mkdir()
    spurline = [sys.executable, "-m", "spurline"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    how = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE, "text": True}
    serve = subprocess.Popen([*spurline, "report", "run", "--serve", "--port", "0"], **how)
    job = None
    try:
        address = serve.stdout.readline().split()[1]
        with open_tab(tmp_path / "profile") as tab:
            tab.open(address)
            tab.wait_for("document.querySelector('h1').textContent == 'Waiting for the first step'")
            job = subprocess.Popen([*spurline, *TINY.split()], **(how | {"stdout": subprocess.DEVNULL}))
            step = "Number(document.querySelector('.step').textContent.replace(/,/g, '').match(/\\d+/)[0])"
            first = tab.wait_for(step)
            tab.read("window.sameDocument = true, document.getElementById('log').click()")
            tab.wait_for(f"{step} > {first}")
            second = tab.wait_for(step)
            tab.wait_for(f"{step} > {second}")
            assert tab.read("window.sameDocument") is True
            assert tab.read("document.getElementById('log').checked") is True
            assert tab.read("document.querySelector('.state').textContent") == "running"
            points = "document.querySelector('[data-chart=loss] .curve').getAttribute('d').split(/[ML]/).length - 1"
            assert tab.read(points) > 1
            job.send_signal(signal.SIGTERM)
            job.wait()
            tab.wait_for("document.querySelector('.state').textContent == 'stopped'")
            serve.send_signal(signal.SIGINT)
            assert serve.wait() == 0
            tab.wait_for("document.getElementById('follows').textContent.startsWith('No longer followed')")
    finally:
        for process in filter(None, (serve, job)):
            process.kill()
            process.wait()
