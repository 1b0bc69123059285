"""Two hosts with addresses and process ids of their own, in namespaces: one is lost, and may come back."""

import random
import re
from pathlib import Path

import pytest

from spurline.testing.run_result import run_result
from spurline.testing.tiny import write_words
from spurline.testing.two_hosts import (
    STEPS,
    Hosts,
    launch,
    launch_with_own_disk,
    train,
    train_and_lose_a_host,
    train_and_lose_the_first_rank,
    why_not,
)


@pytest.mark.slow
def test_run_that_lost_a_host_in_a_random_step_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(f"two hosts can't be made here: {reason}")
    seed = random.randrange(10**6)
    step = random.Random(seed).randrange(2, STEPS)
    print(f"seed {seed}: host b is lost in step {step}")
    (tmp_path / "text").mkdir()
    text = write_words(tmp_path / "text")
    with Hosts() as hosts:
        train(hosts, text, tmp_path / "undisturbed")
        said = train_and_lose_a_host(hosts, text, tmp_path / "lost", step)
    assert re.search(r"restart 1, because step \d+: rank [23] has been silent for 8 s \(its machine may", said)
    assert f"[rank0]:step {STEPS}/{STEPS}" in said
    assert run_result(tmp_path / "lost") == run_result(tmp_path / "undisturbed")


@pytest.mark.slow
def test_spare_host_takes_the_run_folder_over_from_the_lost_first_rank_at_once(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(f"two hosts can't be made here: {reason}")
    (tmp_path / "text").mkdir()
    text = write_words(tmp_path / "text")
    with Hosts() as hosts:
        said = train_and_lose_the_first_rank(hosts, text, tmp_path / "run", step=5)
    assert "[rank0]:resuming from the checkpoint of step 4" in said
    assert f"[rank0]:step {STEPS}/{STEPS}" in said
    assert "belongs to process" not in said
    assert "waiting up to" not in said


@pytest.mark.slow
def test_hosts_that_do_not_share_the_run_folder_are_refused(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(f"two hosts can't be made here: {reason}")
    (tmp_path / "text").mkdir()
    (tmp_path / "runs").mkdir()
    text = write_words(tmp_path / "text")
    folder = tmp_path / "runs" / "run"
    with Hosts() as hosts:
        first = launch(hosts, "a", text, folder)
        second = launch_with_own_disk(hosts, "b", text, folder)
        said = [process.communicate() for process in (first, second)]
    assert (first.returncode, second.returncode) == (2, 2), said
    line = rf"spurline launch: node 1 \(on \S+\) can't see the run folder {folder} that node 0 .*"
    for _, err in said:
        assert re.fullmatch(line, err.strip()), "one line on each host"
    assert not folder.exists(), "no rank was started"
