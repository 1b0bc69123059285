"""A run that starts in the folder of an earlier one loses nothing of it without a word."""

import json
from dataclasses import replace

import pytest

from spurline.config import Job
from spurline.testing.tiny import tiny_run, write_words
from spurline.train.run import train


@pytest.fixture
def run(tmp_path, capsys):
    """Trains two steps in one folder, with options of sections; returns what it says."""
    (tmp_path / "text").mkdir()
    write_words(tmp_path / "text")
    quick = {"sample_tokens": 4, "validation_batches": 0, "tensorboard": True}

    def run(overwrite=False, steps=2, seed=0, **checkpoint):
        config = tiny_run(
            tmp_path / "text",
            job=Job(str(tmp_path / "run"), overwrite=overwrite),
            checkpoint={"interval": 2, **checkpoint},
            metrics=quick,
        )
        config = replace(config, training=replace(config.training, steps=steps, seed=seed))
        capsys.readouterr()
        train("deepseek_v3", "deepseek_v3_debugmodel", config)
        return capsys.readouterr().out

    return run


def steps_in(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_without_checkpoints_the_earlier_run_is_moved_whole_and_told(run, tmp_path):
    assert "earlier run" not in run(steps=3)
    assert f"the earlier run in this folder is now in {tmp_path / 'run' / 'previous'}" in run(seed=1)
    assert steps_in(tmp_path / "run") == [1, 2]
    assert steps_in(tmp_path / "run" / "previous") == [1, 2, 3]
    configs = [json.loads((tmp_path / "run" / path).read_text()) for path in ("config.json", "previous/config.json")]
    assert [config["training"]["seed"] for config in configs] == [1, 0]
    for name in ("samples.jsonl", "tensorboard"):
        assert (tmp_path / "run" / "previous" / name).exists()
    assert len((tmp_path / "run" / "samples.jsonl").read_text().splitlines()) == 1
    run()
    assert steps_in(tmp_path / "run" / "previous") == [1, 2], "only one earlier run is kept"


def test_with_checkpoints_there_a_run_without_them_is_refused(run, tmp_path):
    run(enable=True)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"checkpoints up to step 2, and checkpoint\.enable is off: resume it with"):
        run()
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_overwrite_replaces_the_run_and_its_checkpoints(run, tmp_path, monkeypatch):
    run(enable=True, steps=4)
    assert "earlier run" in run(overwrite=True)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert steps_in(tmp_path / "run") == [1, 2]
    assert "step 1/2" in run(overwrite=True, enable=True)
    # What torchrun starts again after a failure is the same command: it resumes.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert "resuming from the checkpoint of step 2" in run(overwrite=True, enable=True)
