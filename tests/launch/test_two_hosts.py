"""Two hosts with addresses of their own, in network namespaces: one is lost, and comes back."""

import random
import re
from pathlib import Path

import pytest

from spurline.testing.run_result import run_result
from spurline.testing.tiny import write_words
from spurline.testing.two_hosts import STEPS, Hosts, launch, launch_with_own_disk, train, train_and_lose_a_host, why_not


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
    assert re.search(r"rank [23] (is gone|has been silent)", said)
    assert "restart 1, because rank " in said
    assert f"[rank0]:step {STEPS}/{STEPS}" in said
    assert run_result(tmp_path / "lost") == run_result(tmp_path / "undisturbed")


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
