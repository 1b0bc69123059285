"""The line that a report opens with."""

import json
import os
import re
from pathlib import Path

import pytest

from spurline.report.page import make_page
from spurline.report.read import read_run
from spurline.train.folder_lock import STALE_SECONDS, FolderLock, is_owned


def write_run(folder: Path, *records: dict[str, float], steps: int = 40) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"step": number, **record}) for number, record in enumerate(records, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "config.json").write_text(json.dumps({"module": "m", "config": "c", "training": {"steps": steps}}))
    os.utime(folder / "metrics.jsonl", (1_800_000_000, 1_800_000_000))
    return folder


def summary_of(folder: Path) -> str:
    (found,) = re.findall(r'<p class="summary">(.*?)</p>', make_page([read_run(folder, "run")]))
    return re.sub("<[^>]*>", "", found)


def test_the_layout_of_ranks_is_above_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"loss": 1.0})
    config = json.loads((run / "config.json").read_text())
    degrees = {"pipeline_parallel_degree": 2, "context_parallel_degree": 2, "tensor_parallel_degree": 1}
    config |= {"environment": {"ranks": 8}, "parallelism": {**degrees, "data_parallel_shard_degree": -1}}
    for parallelism, told in ((config["parallelism"], " (pp 2, cp 2)"), ({}, ""), ("hostile", "")):
        (run / "config.json").write_text(json.dumps(config | {"parallelism": parallelism}))
        assert f'<p class="soft">m, c · 8 ranks{told}</p>' in make_page([read_run(run, "run")])
    for environment in ({"ranks": 1}, {"ranks": "8"}, {}, 3):
        (run / "config.json").write_text(json.dumps(config | {"environment": environment}))
        assert '<p class="soft">m, c</p>' in make_page([read_run(run, "run")])


def test_a_run_that_ended_early_is_stopped(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", {"loss": 5.5}, {"loss": 1.25, "bits_per_byte": 1.8034, "tokens_per_second": 12345.0}
    )
    expected = "stopped · step 2 of 40 · loss 1.250 · 1.803 bits per byte · 12.3k tokens/s · 2027-01-15 08:00 UTC"
    assert summary_of(run) == expected


def test_a_run_that_took_all_steps_is_finished(tmp_path: Path) -> None:
    assert summary_of(write_run(tmp_path / "run", {"loss": 1.0}, steps=1)).startswith("finished · 1 step · loss 1.000")


def test_a_run_with_a_live_owner_is_running(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"loss": 1.0})
    lock = FolderLock(run)
    lock.take()
    assert summary_of(run).startswith("running · step 1 of 40")
    lock.release()
    assert summary_of(run).startswith("stopped")


@pytest.mark.parametrize(("age", "expected"), [(0.0, True), (2 * STALE_SECONDS, False)])
def test_an_owner_on_another_machine_is_known_by_its_heartbeat(tmp_path: Path, age: float, expected: bool) -> None:
    lock = tmp_path / "run.lock"
    lock.write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": "", "since": "now"}))
    os.utime(lock, (lock.stat().st_mtime - age,) * 2)
    assert is_owned(tmp_path) is expected


@pytest.mark.parametrize("content", ["", "[]", "{", '{"host": 1}', "\0" * 20_000])
def test_a_damaged_lock_is_nobodys(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.lock").write_text(content)
    assert is_owned(tmp_path) is False
