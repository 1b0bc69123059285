"""A run never changes the folder of another one."""

import json
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest

import spurline.train.run as train_run
from spurline import shared_folder
from spurline.config import Job
from spurline.testing import RankPool
from spurline.testing.tiny import tiny_run, write_words
from spurline.train import folder_lock
from spurline.train.folder_lock import FolderLock
from spurline.train.run import train
from spurline.train.run_folder import claimed_folder, how_to_resume


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Trains two steps, by default in the folder `run`; returns what it says."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    write_words(tmp_path / "text")
    quick = {"sample_tokens": 4, "validation_batches": 0, "tensorboard": True}

    def run(job=Job("run"), steps=2, seed=0, **checkpoint):  # noqa: B008 (immutable)
        config = tiny_run(
            tmp_path / "text", job=job, checkpoint={"enable": False, "interval": 2, **checkpoint}, metrics=quick
        )
        config = replace(config, training=replace(config.training, steps=steps, seed=seed))
        capsys.readouterr()
        train("deepseek_v3", "deepseek_v3_debugmodel", config)
        return capsys.readouterr().out

    return run


def steps_in(folder):
    return [json.loads(line)["step"] for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def content(folder):
    return {path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def test_by_default_every_run_has_a_folder_of_its_own(run):
    numbered = Job(runs_folder="outputs")
    run(numbered, steps=3)
    before = content("outputs/0001")
    assert f"run folder: {Path('outputs/0002')}" in run(numbered, seed=1)
    assert content("outputs/0001") == before
    assert (steps_in("outputs/0001"), steps_in("outputs/0002")) == ([1, 2, 3], [1, 2])
    for name in ("samples.jsonl", "tensorboard"):
        assert Path("outputs/0002", name).exists()
    assert len(Path("outputs/0002/samples.jsonl").read_text().splitlines()) == 1
    assert Path("outputs/latest").resolve() == Path("outputs/0002").resolve()


def test_a_folder_that_holds_another_run_is_refused_with_two_ways_out(run):
    run()
    before = content("run")
    ways_out = r"choose another --job.dump_folder, or replace it with --job.overwrite"
    with pytest.raises(ValueError, match=rf"dump_folder run holds another run \(up to step 2\): {ways_out}"):
        run(seed=1)
    with pytest.raises(ValueError, match="holds another run"):
        run(enable=True)
    assert content("run") == before
    run(Job("run", overwrite=True), seed=1, steps=3)
    assert steps_in("run") == [1, 2, 3]
    assert len(Path("run/samples.jsonl").read_text().splitlines()) == 1
    assert len(list(Path("run/tensorboard").iterdir())) == 1
    assert json.loads(Path("run/config.json").read_text())["training"]["seed"] == 1


def test_a_run_that_has_ended_while_this_one_was_built_is_kept(run, monkeypatch):
    make_trainer, kept = train_run.make_trainer, {}

    def make_late(*args, **options):
        monkeypatch.setattr(train_run, "make_trainer", make_trainer)
        run(seed=1)
        kept.update(content("run"))
        return make_trainer(*args, **options)

    monkeypatch.setattr(train_run, "make_trainer", make_late)
    with pytest.raises(ValueError, match="dump_folder run holds another run"):
        run()
    assert {path: content("run").get(path) for path in kept} == kept


def test_with_checkpoints_there_a_run_without_them_is_refused(run):
    run(enable=True)
    before = content("run")
    with pytest.raises(ValueError, match=r"checkpoints up to step 2, and checkpoint\.enable is off: resume it with"):
        run()
    assert content("run") == before


def test_folder_of_numbered_runs_is_no_folder_of_one(run):
    run(Job(runs_folder="outputs"))
    with pytest.raises(ValueError, match="outputs has numbered runs in it: choose a folder of its own, or omit"):
        run(Job("outputs", overwrite=True))


def test_overwrite_replaces_the_run_and_its_checkpoints(run, monkeypatch):
    replaced = Job("run", overwrite=True)
    run(enable=True, steps=4)
    run(replaced)
    assert not Path("run/checkpoints").exists()
    assert steps_in("run") == [1, 2]
    assert "step 1/2" in run(replaced, enable=True)
    # What torchrun starts again after a failure is the same command: it resumes.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert "resuming from the checkpoint of step 2" in run(replaced, enable=True)


def write_foreign(*names):
    for name in names:
        Path("mine", name).parent.mkdir(parents=True, exist_ok=True)
        Path("mine", name).write_text(f"my own {name}")


def test_overwrite_keeps_folders_with_the_names_of_ours_where_no_run_is(run):
    write_foreign("logs/mylog", "profile/trace.json", "tensorboard/events", "wandb/notes")
    before = content("mine")
    run(Job("mine", overwrite=True), enable=True)
    assert steps_in("mine") == [1, 2]
    assert {path: content("mine").get(path) for path in before} == before


@pytest.mark.parametrize("name", ["checkpoints/step-100/model.pt", "config.json", "metrics.jsonl"])
def test_overwrite_refuses_what_another_program_has_written(run, name):
    write_foreign(name, "logs/mylog")
    if name == "config.json":
        Path("mine", name).write_text('{"architectures": ["DeepseekV3ForCausalLM"]}')
    before = content("mine")
    for job in (Job("mine"), Job("mine", overwrite=True)):
        has = rf"dump_folder mine has {name.partition('/')[0]}, but no run of Spurline: choose another folder"
        with pytest.raises(ValueError, match=has):
            run(job)
        assert content("mine") == before


def test_resuming_a_run_that_replaced_another_does_not_replace_it(tmp_path):
    config = tiny_run(tmp_path, job=Job("run", overwrite=True))
    assert how_to_resume(config) == "run the same command without --job.overwrite to resume"
    numbered = replace(config, job=Job("runs/0001", "runs", overwrite=True))
    assert how_to_resume(numbered) == (
        f"resume it by the same command without --job.overwrite and --job.resume {Path('runs/0001')}"
    )


def test_same_command_goes_on_and_starts_again_if_there_is_no_checkpoint_yet(run):
    run(enable=True, steps=3)
    shutil.rmtree("run/checkpoints")
    lines = Path("run/metrics.jsonl").read_text().splitlines(keepends=True)
    Path("run/metrics.jsonl").write_text("".join(lines[:1]))  # as it was when it was killed in step 2
    with pytest.raises(ValueError, match=r"holds another run \(up to step 1\)"):
        run(enable=True, steps=3, seed=1)
    run(enable=True, steps=3)
    assert steps_in("run") == [1, 2, 3]
    assert len(Path("run/samples.jsonl").read_text().splitlines()) == 1
    before = content("run")
    assert "all 3 steps have been taken" in run(enable=True, steps=3)
    assert content("run").keys() == before.keys()
    assert Path("run/samples.jsonl").read_bytes() == before[Path("run/samples.jsonl")]


def test_run_that_can_not_start_leaves_no_folder(run, monkeypatch):
    def fail(*arguments, **options):
        raise ValueError("no such data")

    monkeypatch.setattr("spurline.train.run.make_trainer", fail)
    for job in (Job("a/b/run"), Job(runs_folder="outputs/of/it")):
        with pytest.raises(ValueError, match="no such data"):
            run(job)
    assert sorted(path.name for path in Path().iterdir()) == ["text"]


def test_restart_goes_on_in_the_folder_of_the_first_attempt(tmp_path, monkeypatch):
    config = tiny_run(tmp_path, job=Job(runs_folder=str(tmp_path / "runs")))
    monkeypatch.setenv("SPURLINE_JOB", "mine")  # as `spurline launch` sets it
    with claimed_folder(config) as first:
        (first.folder / "config.json").write_text("{}")
    monkeypatch.setenv("SPURLINE_JOB", "another")
    with claimed_folder(config) as other:
        (other.folder / "config.json").write_text("{}")
    monkeypatch.setenv("SPURLINE_JOB", "mine")
    for job in (config.job, replace(config.job, dump_folder=str(other.folder), resume="latest")):
        with claimed_folder(replace(config, job=job)) as again:  # `latest` names another run since
            assert (again.folder, again.job, again.is_restart) == (first.folder, "mine", True)
    monkeypatch.delenv("SPURLINE_JOB")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    refused = pytest.raises(ValueError, match=r"does not know the folder of the run.* give --job\.dump_folder")
    with refused, claimed_folder(config):
        pass
    assert [path.name for path in sorted((tmp_path / "runs").iterdir())] == ["0001", "0002"]


def test_job_that_ends_before_its_run_starts_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPURLINE_JOB", "mine")
    with claimed_folder(tiny_run(tmp_path, job=Job(runs_folder=str(tmp_path / "runs")))) as claim:
        assert claim.folder.is_dir()
    assert list(tmp_path.iterdir()) == []


def claim_with_an_owner_of_unknown_state(rank: int, folder: str) -> tuple[str, list[float]]:
    turns: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FolderLock, "wait", lambda lock, seconds, say: turns.append(seconds) or len(turns) < 3)
        with claimed_folder(tiny_run("text", job=Job(folder))) as claim:
            return str(claim.folder), turns


def test_ranks_wait_for_an_owner_in_turns_shorter_than_any_timeout(ranks: RankPool, tmp_path):
    folder = str(tmp_path / "run")
    (first, turns), other = ranks.run(claim_with_an_owner_of_unknown_state, 2, folder)
    assert other == (first, []) == (folder, [])
    assert len(turns) == 3
    assert max(turns) <= 5


def test_folder_of_a_job_that_died_elsewhere_is_claimed_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "STALE_SECONDS", 0.3)
    lock = tmp_path / "run" / "run.lock"
    lock.parent.mkdir()
    lock.write_text('{"host": "elsewhere/1", "pid": 7, "started": "1", "since": "today"}')
    with claimed_folder(tiny_run(tmp_path, job=Job(str(lock.parent)))) as claim:
        assert claim.folder == lock.parent


def claim_in_own_working_directory(rank: int, places: list[str], runs: str) -> tuple[str, list[str]]:
    shared_folder.SECONDS_TO_SEE = 0.3
    os.chdir(places[rank])
    try:
        with claimed_folder(tiny_run("text", job=Job(runs_folder=runs))) as claim:
            there = [path.name for path in claim.folder.iterdir()]
            (claim.folder / f"of_rank_{rank}").touch()
            return str(claim.folder), there
    except ValueError as error:
        return str(error), []


def test_ranks_agree_on_one_number_and_see_it(ranks: RankPool, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "0001").mkdir()
    found = ranks.run(claim_in_own_working_directory, 2, [str(tmp_path)] * 2, str(tmp_path / "runs"))
    assert [folder for folder, _ in found] == [str(tmp_path / "runs" / "0002")] * 2
    assert sorted(path.name for path in (tmp_path / "runs" / "0002").iterdir()) == ["of_rank_0", "of_rank_1"]


def test_ranks_without_a_common_folder_are_refused_together(ranks: RankPool, tmp_path):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    (elsewhere / "runs" / "0001").mkdir(parents=True)  # one that looks the same
    here.mkdir()
    told = ranks.run(claim_in_own_working_directory, 3, [str(here), str(here), str(elsewhere)], "runs")
    assert {line for line, _ in told} == {told[0][0]}
    assert told[0][0].startswith(f"rank 2 (on {socket.gethostname()}) can't see the run folder {here}/runs/0001 that")
    assert "choose a --job.dump_folder on a disk that all nodes share" in told[0][0]
    assert sorted(path.name for path in here.iterdir()) == [], "nothing is left of the run that did not start"
