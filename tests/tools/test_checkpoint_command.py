import json
from pathlib import Path

import pytest
import torch
import version1_checkpoints as version1
from torch import nn

from spurline import config_io
from spurline.models.deepseek_v3.configs import deepseek_v3_debugmodel
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.checkpoint.signature import read_key
from spurline.train.folder_lock import FolderLock


@pytest.fixture
def run(tmp_path):
    """A run with the checkpoints of steps 1 to 4, the second of which is the best."""
    checkpoints = CheckpointManager(tmp_path / "run", 1, 0, model_config={"dim": 3})
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for step, loss in enumerate([3.0, 1.0, 2.0, None], 1):
        checkpoints.save(step, model, optimizer, {"tokens_seen": 1000 * step, "validation_loss": loss})
    return checkpoints.folder


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_ls_tells_what_there_is_and_which_is_the_best(spurline, run):
    code, out, err = spurline("checkpoint", "ls", "run")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["step", "tokens", "validation", "loss", "ranks", "files", "bytes"]
    assert [row[:5] for row in rows[1:]] == [
        ["1", "1,000", "3.0000", "1", "2"],
        ["2", "2,000", "1.0000", "1", "2"],
        ["3", "3,000", "2.0000", "1", "2"],
        ["4", "4,000", "-", "1", "2"],
    ]
    assert [row[-1] == "best" for row in rows[1:]] == [False, True, False, False]


def test_ls_as_json_and_with_one_that_is_damaged(spurline, run):
    (run / "step-00000003" / "checkpoint.json").unlink()
    entries = [json.loads(line) for line in spurline("checkpoint", "ls", "run", "--json").out.splitlines()]
    assert [(entry["step"], entry["best"]) for entry in entries] == [(1, False), (2, True), (3, False), (4, False)]
    files = list((run / "step-00000001").iterdir())
    assert entries[0]["num_bytes"] == sum(file.stat().st_size for file in files if file.name != "checkpoint.json")
    assert entries[2]["problem"].endswith("step-00000003/checkpoint.json': No such file or directory")
    assert "No such file or directory" in spurline("checkpoint", "ls", "run").out.splitlines()[3]


def test_verify_reads_all_or_one_and_names_what_is_damaged(spurline, run):
    code, out, _ = spurline("checkpoint", "verify", "run")
    assert (code, len(out.splitlines())) == (0, 4)
    assert out.startswith("step 1: 2 files intact, ")
    flip_a_bit(run / "step-00000002" / "rank-00000-00000.tensors")
    assert spurline("checkpoint", "verify", "run", "--step", "3").code == 0
    code, out, err = spurline("checkpoint", "verify", "run")
    assert (code, err) == (1, "")
    assert "step 2: 'run/checkpoints/step-00000002/rank-00000-00000.tensors' is damaged: " in out
    assert out.splitlines()[-1].startswith("1 of 4 checkpoints are damaged: ")


def test_inspect_shows_the_tensors_of_the_newest_or_of_a_step(spurline, run):
    code, out, _ = spurline("checkpoint", "inspect", "run")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].endswith("step-00000004: step 4, 4,000 tokens, validation loss not measured, written by 1 rank")
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:-1]}
    assert rows["model.weight"] == ["2x3", "float32", "24", "whole"]
    assert rows["optimizer.exp_avg.bias"] == ["2", "float32", "8", "whole"]
    assert rows["optimizer.step.bias"][0] == "scalar"
    told = json.loads(spurline("checkpoint", "inspect", "run", "--step", "2", "--json").out)
    assert (told["step"], told["model"], told["validation_loss"]) == (2, {"dim": 3}, 1.0)
    assert {tensor["name"] for tensor in told["tensors"]} == rows.keys()


def test_nothing_of_a_hostile_checkpoint_runs_in_any_command(spurline, tmp_path):
    folder = tmp_path / "run" / "checkpoints" / "step-00000001"
    model = nn.Linear(3, 2)
    version1.save(tmp_path / "run", 1, model, torch.optim.AdamW(model.parameters()), {"tokens_seen": 1})
    marker = tmp_path / "it ran"

    class Payload:
        def __reduce__(self):
            return Path.mkdir, (marker,)

    def add_payload(metadata):
        metadata.planner_data = Payload()
        return metadata

    version1.rewrite_metadata(folder, 1, add_payload)
    config = deepseek_v3_debugmodel()
    config_io.save(tmp_path / "run" / "config.json", "deepseek_v3", "deepseek_v3_debugmodel", config)
    for command in (
        "checkpoint inspect run",
        "checkpoint verify run",
        "generate run --prompt a",
        "convert to-hf run out",
    ):
        code, out, err = spurline(*command.split())
        assert code in (1, 2)
        assert "which is not allowed in a checkpoint: nothing was run" in out + err, command
        assert "Traceback" not in err
        assert not marker.exists(), command


def test_what_no_run_could_resume_from_is_not_called_intact(spurline, tmp_path):
    class Payload:
        def __reduce__(self):
            return Path.mkdir, (tmp_path / "it ran",)

    model = nn.Linear(3, 2)
    for step, name in enumerate(("extra", "random.0"), 1):
        optimizer = torch.optim.AdamW(model.parameters())
        version1.save(
            tmp_path / "run", step, model, optimizer, {}, lambda state, name=name: {**state, name: (Payload(),)}
        )
    code, out, err = spurline("checkpoint", "verify", "run")
    assert (code, err) == (1, "")
    assert out.count("which is not allowed in a checkpoint: nothing was run") == 2
    assert not (tmp_path / "it ran").exists()


def test_values_that_are_not_finite_are_found_by_verify(spurline, tmp_path):
    model = nn.Linear(3, 2)
    model.weight.data[1, 2] = float("inf")
    version1.save(tmp_path / "run", 1, model, torch.optim.AdamW(model.parameters()), {})
    code, out, _ = spurline("checkpoint", "verify", "run")
    assert code == 1
    assert "step 1: model.weight is not finite: the run had diverged" in out


def test_signatures_are_verified_with_the_key(spurline, run, tmp_path):
    (tmp_path / "key").write_text("0123456789abcdef0123456789abcdef\n")
    code, out, _ = spurline("checkpoint", "verify", "run", "--step", "4", "--sign_key_file", "key")
    assert code == 1
    assert "it is not signed, and a signature is required" in out
    checkpoints = CheckpointManager(tmp_path / "run", 1, 0, sign_key=read_key(str(tmp_path / "key")))
    model = nn.Linear(3, 2)
    checkpoints.save(5, model, torch.optim.AdamW(model.parameters()), {})
    assert spurline("checkpoint", "verify", "run", "--step", "5", "--sign_key_file", "key").code == 0
    (tmp_path / "short").write_text("secret")
    code, _, err = spurline("checkpoint", "inspect", "run", "--sign_key_file", "short")
    assert code == 2
    assert "sign_key_file short: a key needs at least 16 bytes" in err


def test_prune_keeps_the_newest_and_the_best_and_asks_first(spurline, run):
    code, out, _ = spurline("checkpoint", "prune", "run", "--keep", "1")
    assert (code, out) == (0, "would remove the checkpoints of steps 1, 3; pass --yes to remove them\n")
    assert len(names(run)) == 4
    assert spurline("checkpoint", "prune", "run", "--keep", "1", "--yes").out.startswith("removed ")
    assert names(run) == ["step-00000002", "step-00000004"]
    assert spurline("checkpoint", "prune", "run", "--keep", "1", "--yes").out.startswith("nothing to remove")


def test_prune_never_removes_the_last_one_that_is_whole(spurline, run):
    flip_a_bit(run / "step-00000004" / "metadata.json")
    spurline("checkpoint", "prune", "run", "--keep", "1", "--yes")
    assert names(run) == ["step-00000002", "step-00000003", "step-00000004"]


@pytest.mark.parametrize("place", ["run", "elsewhere"])
def test_prune_removes_nothing_of_a_run_that_is_training(spurline, run, tmp_path, place):
    (tmp_path / "run" / "config.json").write_text('{"checkpoint": {"folder": "elsewhere"}}')
    run.rename(tmp_path / "elsewhere")
    lock = FolderLock(tmp_path / place)
    lock.take()
    code, out, err = spurline("checkpoint", "prune", "run", "--keep", "1", "--yes")
    assert (code, out) == (2, "")
    assert err.startswith(f"spurline checkpoint prune: {place} belongs to process ")
    assert err.endswith(", which is still running. Let it remove old checkpoints, or end it first\n")
    assert len(names(tmp_path / "elsewhere")) == 4 + (place == "elsewhere")
    lock.release()
    assert spurline("checkpoint", "prune", "run", "--keep", "1", "--yes").code == 0
    assert names(tmp_path / "elsewhere") == ["step-00000002", "step-00000004"]
    assert names(tmp_path / "run") == ["config.json"]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("ls nowhere", "spurline checkpoint ls: nowhere: no such folder\n"),
        ("ls .", " has no checkpoints: the run has not saved one yet, or was started with --checkpoint.no_enable\n"),
        ("ls", "RUN is missing"),
        (
            "verify run --step 9",
            "there is no complete checkpoint run/checkpoints/step-00000009; steps in that folder: 1, ",
        ),
        ("inspect run --step 9", "there is no complete checkpoint"),
        ("prune run", "--keep is missing"),
        ("prune run --keep 0", "--keep must be at least 1, got 0"),
        ("list run", "there is no 'list'"),
    ],
)
def test_what_is_wrong_is_one_line(spurline, run, command, told):
    code, out, err = spurline("checkpoint", *command.split())
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert told in err


def test_inspect_does_not_read_a_damaged_index(spurline, run):
    flip_a_bit(run / "step-00000004" / "metadata.json")
    code, _, err = spurline("checkpoint", "inspect", "run")
    assert code == 2
    assert "step 4: 'run/checkpoints/step-00000004/metadata.json' is damaged" in err
