"""Numbered run folders: each run has its own, and `latest` names the last."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spurline.run_folders import claim_number, find_run, is_run, latest_run, numbered_runs, set_latest


def test_numbers_go_up_and_other_names_are_left_alone(tmp_path: Path) -> None:
    assert claim_number(tmp_path / "runs").name == "0001"
    for name in ("0007", "mine", "12"):
        (tmp_path / "runs" / name).mkdir()
    (tmp_path / "runs" / "0009").write_text("a file")
    assert claim_number(tmp_path / "runs").name == "0008"
    assert claim_number(tmp_path / "runs").name == "0010", "the name of a file is taken too"
    assert [run.name for run in numbered_runs(tmp_path / "runs")] == ["0001", "0007", "0008", "0010"]


def test_runs_that_start_at_the_same_moment_have_different_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: claim_number(tmp_path / "runs"), range(40)))
    assert len({run.name for run in claimed}) == 40


def test_latest_names_the_run_that_was_started_or_resumed_last(tmp_path: Path) -> None:
    assert latest_run(tmp_path / "none") is None
    first, second = claim_number(tmp_path), claim_number(tmp_path)
    assert latest_run(tmp_path) == second, "without a link, the highest number"
    set_latest(first)
    assert latest_run(tmp_path) == first
    assert (tmp_path / "latest").readlink() == Path("0001"), "relative, so that the folder can be moved"
    set_latest(second)
    assert latest_run(tmp_path) == second
    second.rmdir()
    assert latest_run(tmp_path) == first, "a link to a run that was removed"
    set_latest(tmp_path / "mine")
    assert latest_run(tmp_path) == first, "a run with a name of its own is not one of them"


def test_a_path_names_a_run_or_the_latest_of_many(tmp_path: Path) -> None:
    run = claim_number(tmp_path / "runs")
    assert find_run(tmp_path / "runs") == find_run(run) == run
    assert find_run(tmp_path / "nowhere") == tmp_path / "nowhere"


def test_a_folder_is_that_of_a_run_once_one_has_written_to_it(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert not is_run(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert is_run(tmp_path)
