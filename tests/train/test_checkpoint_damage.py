"""Checkpoints that are damaged, can't be written, or are of another model."""

import errno
import json
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from spurline.cli import main
from spurline.train.checkpoint.folder import CheckpointFolder
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.checkpoint.writer import ChecksummedStream


def make(value):
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    return model, torch.optim.AdamW(model.parameters())


@pytest.fixture
def said():
    return []


@pytest.fixture
def checkpoints(tmp_path, said):
    """Those of steps 1 and 2, whose weights are the number of the step."""
    checkpoints = CheckpointManager(tmp_path, 1, 0, say=said.append)
    for step in (1, 2):
        checkpoints.save(step, *make(float(step)), {"step": step})
    return checkpoints


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


def remove(path):
    path.unlink()


@pytest.mark.parametrize("damage", [flip_a_bit, cut_short, empty, remove])
@pytest.mark.parametrize("name", ["rank-00000-00000.tensors", "metadata.json", "checkpoint.json"])
def test_damage_is_named_and_the_one_before_is_loaded(checkpoints, said, damage, name):
    damage(checkpoints.folder / "step-00000002" / name)
    model, optimizer = make(0.0)
    assert checkpoints.load_newest(model, optimizer) == (1, {"step": 1})
    assert torch.equal(model.weight, torch.ones(2, 3))
    line, aside = said
    assert aside == f"set aside, as the run goes on without it: {checkpoints.folder}/.step-00000002.passed"
    assert line.startswith("falling back to the checkpoint of step 1: that of step 2 is damaged, ")
    assert f"step-00000002/{name}'" in line
    assert "\n" not in line


def test_a_record_that_still_reads_well_is_found_by_its_checksum(checkpoints, said):
    path = checkpoints.folder / "step-00000002" / "checkpoint.json"
    text = path.read_text()
    assert text.count('"num_ranks": 1') == 1
    path.write_text(text.replace('"num_ranks": 1', '"num_ranks": 3'))
    assert checkpoints.load_newest(*make(0.0)) == (1, {"step": 1})
    assert "checkpoint.json' is damaged: its checksum is not that of its content" in said[0]


def test_a_step_that_was_asked_for_is_refused_when_damaged_and_nothing_changes(checkpoints):
    flip_a_bit(checkpoints.folder / "step-00000002" / "rank-00000-00000.tensors")
    model, optimizer = make(0.0)
    with pytest.raises(ValueError, match=r"of step 2 is damaged: .*rank-00000-00000\.tensors' is damaged"):
        checkpoints.load(2, model, optimizer)
    assert torch.equal(model.weight, torch.zeros(2, 3))
    assert checkpoints.load(1, model, optimizer) == {"step": 1}


def test_without_a_whole_one_the_error_names_what_is_wrong_with_each(checkpoints):
    cut_short(checkpoints.folder / "step-00000001" / "metadata.json")
    remove(checkpoints.folder / "step-00000002" / "checkpoint.json")
    with pytest.raises(ValueError, match="is intact") as refused:
        checkpoints.load_newest(*make(0.0))
    message = str(refused.value)
    assert message.startswith(
        f"no checkpoint in {checkpoints.folder} is intact: that of step 2 is damaged, can't read "
    )
    assert "step-00000002/checkpoint.json': No such file or directory; that of step 1 is damaged, " in message
    assert "step-00000001/metadata.json' has " in message


def test_a_damaged_step_is_replaced_when_the_run_comes_by_again(checkpoints, said):
    flip_a_bit(checkpoints.folder / "step-00000002" / "rank-00000-00000.tensors")
    checkpoints.load_newest(*make(0.0))
    checkpoints.save(2, *make(2.0), {"step": 2})
    said.clear()
    assert checkpoints.load_newest(*make(0.0)) == (2, {"step": 2})
    assert said == []


def test_what_was_passed_over_is_not_resumed_from_later(tmp_path, checkpoints, said):
    """Not when damage is found again, and not when the run comes by its step."""
    checkpoints.save(3, *make(3.0), {"step": 3})
    flip_a_bit(checkpoints.folder / "step-00000003" / "metadata.json")
    assert checkpoints.load_newest(*make(0.0), pass_over=1) == (2, {"step": 2})
    assert CheckpointFolder(tmp_path).named_steps() == [1, 2]
    assert CheckpointFolder(tmp_path).passed_steps() == [3]
    checkpoints.save(4, *make(4.0), {"step": 4})
    flip_a_bit(checkpoints.folder / "step-00000004" / "metadata.json")
    said.clear()
    assert checkpoints.load_newest(*make(0.0)) == (2, {"step": 2})
    assert CheckpointFolder(tmp_path).passed_steps() == [3, 4]
    checkpoints.save(4, *make(4.5), {"step": 4})
    assert checkpoints.load_newest(*make(0.0)) == (4, {"step": 4})
    assert len(said) == 2


def test_reading_sets_nothing_aside(tmp_path, checkpoints):
    flip_a_bit(checkpoints.folder / "step-00000002" / "metadata.json")
    assert checkpoints.load(1, *make(0.0)) == {"step": 1}
    with pytest.raises(ValueError, match="is damaged"):
        checkpoints.open(2)
    for command in ("ls", "verify"):
        main(["checkpoint", command, str(tmp_path)])
    assert CheckpointFolder(tmp_path).named_steps() == [1, 2]


@pytest.mark.parametrize(("keep_latest_k", "passed"), [(0, [2, 3]), (1, [3])])
def test_what_was_passed_over_is_removed_like_other_old_ones(tmp_path, checkpoints, keep_latest_k, passed):
    checkpoints.save(3, *make(3.0), {})
    checkpoints.load_newest(*make(0.0), pass_over=2)
    checkpoints = CheckpointManager(tmp_path, 1, keep_latest_k)
    checkpoints.save(2, *make(2.5), {})
    assert CheckpointFolder(tmp_path).passed_steps() == passed


def test_no_checkpoint_at_all_is_a_new_run(tmp_path):
    assert CheckpointManager(tmp_path, 1, 0).load_newest(*make(0.0)) is None


def test_a_folder_that_can_not_be_read_is_not_one_without_checkpoints(tmp_path, checkpoints, monkeypatch):
    def stale(path):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr("spurline.train.checkpoint.folder.os.listdir", stale)
    with pytest.raises(ValueError, match=r"/checkpoints: Stale file handle"):
        checkpoints.load_newest(*make(0.0))


def test_a_link_in_place_of_a_checkpoint_is_read_and_removed_without_what_it_points_to(tmp_path, checkpoints):
    other = CheckpointManager(tmp_path / "other", 1, keep_latest_k=1)
    other.folder.mkdir(parents=True)
    (other.folder / "step-00000002").symlink_to(checkpoints.folder / "step-00000002")
    assert other.load_newest(*make(0.0)) == (2, {"step": 2})
    other.save(3, *make(3.0), {})
    assert [path.name for path in other.folder.iterdir()] == ["step-00000003"]
    (other.folder / ".step-00000002.removed.tmp").symlink_to(checkpoints.folder)  # left by a killed run
    (other.folder / "step-00000004").symlink_to("gone")
    other.save(4, *make(4.0), {})
    assert [path.name for path in other.folder.iterdir()] == ["step-00000004"]
    assert other.load_newest(*make(0.0))[0] == 4
    assert checkpoints.load_newest(*make(0.0)) == (2, {"step": 2})


def fail_after(monkeypatch, num_writes):
    write, count = ChecksummedStream.write, iter(range(10_000))

    def failing(self, data):
        if next(count) >= num_writes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(ChecksummedStream, "write", failing)


def save_and_wait(checkpoints, step):
    checkpoints.save(step, *make(float(step)), {})
    checkpoints.wait()


@pytest.mark.parametrize("num_writes", [0, 2, 3, 100_000], ids=["first", "third", "metadata", "record"])
@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_is_told_and_the_older_ones_stay(tmp_path, checkpoints, monkeypatch, num_writes, in_background):
    fail_after(monkeypatch, num_writes)
    if num_writes == 100_000:

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("spurline.train.checkpoint.folder.write_record", full)
    checkpoints = CheckpointManager(tmp_path, 1, 1, in_background=in_background)
    with pytest.raises(
        ValueError,
        match=r"^can't write the checkpoint of step 3: No space left on device\. Older checkpoints are unchanged",
    ):
        save_and_wait(checkpoints, 3)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step-00000001", "step-00000002"]
    monkeypatch.undo()
    assert checkpoints.load_newest(*make(0.0))[0] == 2
    checkpoints.save(3, *make(3.0), {})
    checkpoints.close()
    assert checkpoints.latest() == 3


@pytest.mark.parametrize("where", ["", "memory://damaged/run"])
def test_an_old_checkpoint_that_can_not_be_removed_is_a_warning(tmp_path, said, monkeypatch, where):
    if where:
        pytest.importorskip("fsspec").filesystem("memory").store.clear()

    def forbidden(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    checkpoints = CheckpointManager(tmp_path, 1, 1, say=said.append, elsewhere=where)
    checkpoints.save(1, *make(1.0), {"step": 1})
    monkeypatch.setattr("spurline.train.checkpoint.folder.remove_path", forbidden)
    monkeypatch.setattr("spurline.remote.RemotePath.remove_tree", forbidden)
    for step in (2, 3):
        checkpoints.save(step, *make(float(step)), {"step": step})
        assert said.pop() == f"warning: {checkpoints.folder}: older checkpoints were not removed: Permission denied"
        assert checkpoints.latest() == step
    monkeypatch.undo()
    checkpoints.save(4, *make(4.0), {"step": 4})
    assert (said, CheckpointFolder(tmp_path, elsewhere=where).named_steps()) == ([], [4])


def test_a_folder_that_may_not_be_written_is_named(tmp_path, monkeypatch):
    def forbidden(path, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.mkdir", forbidden)
    with pytest.raises(ValueError, match=r"can't write the checkpoint of step 1: .*/checkpoints: Permission denied"):
        CheckpointManager(tmp_path, 1, 0).save(1, *make(1.0), {})


def test_a_file_in_the_way_of_the_folder_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ValueError, match=r"can't write the checkpoint of step 1: .*/checkpoints: File exists"):
        CheckpointManager(tmp_path, 1, 0).save(1, *make(1.0), {})


@pytest.mark.parametrize("where", ["", "memory://damaged/run"])
def test_plain_data_is_replaced_and_all_else_stays(tmp_path, where):
    if where:
        pytest.importorskip("fsspec").filesystem("memory").store.clear()
    checkpoints = CheckpointManager(tmp_path, 1, 0, sign_key=b"k" * 32, elsewhere=where)
    checkpoints.save(1, *make(1.0), {"step": 1, "tokens_seen": 5})
    before = CheckpointFolder(tmp_path, b"k" * 32, where).record(1)
    checkpoints.replace_extra(1, {"step": 1, "tokens_seen": 5, "more": 2})
    model, optimizer = make(0.0)
    assert checkpoints.load_newest(model, optimizer) == (1, {"step": 1, "tokens_seen": 5, "more": 2})
    assert torch.equal(model.weight, torch.ones(2, 3))
    after = CheckpointFolder(tmp_path, b"k" * 32, where).record(1)
    assert replace(after, extra=before.extra) == before
    if not where:
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


# Other models.

CONFIG = {"dim": 3, "moe": {"top_k": 2, "groups": (1, 2)}, "old": 1}


def test_another_model_is_refused_with_the_options_that_differ(tmp_path):
    CheckpointManager(tmp_path, 1, 0, model_config=CONFIG).save(1, *make(1.0), {})
    other = {"dim": 4, "moe": {"top_k": 3, "groups": (1, 2)}, "new": "x"}
    model = nn.Linear(4, 2)
    before = model.weight.clone()
    with pytest.raises(ValueError, match="is of another model") as refused:
        CheckpointManager(tmp_path, 1, 0, model_config=other).load_newest(model, torch.optim.AdamW(model.parameters()))
    assert (
        'another model: model.dim 3 -> 4; model.moe.top_k 2 -> 3; model.old 1 -> "(none)"; model.new "(none)" -> "x". '
        in str(refused.value)
    )
    assert torch.equal(model.weight, before)


def test_options_that_leave_the_tensors_alone_are_told_and_accepted(tmp_path, said):
    CheckpointManager(tmp_path, 1, 0, model_config=CONFIG).save(1, *make(1.0), {})
    other = {**CONFIG, "moe": {"top_k": 1, "groups": (1, 2)}}
    assert CheckpointManager(tmp_path, 1, 0, model_config=other, say=said.append).load_newest(*make(0.0))[0] == 1
    assert said == ["the checkpoint was written with other model options: model.moe.top_k 2 -> 1"]
    said.clear()
    CheckpointManager(tmp_path, 1, 0, model_config=CONFIG, say=said.append).load_newest(*make(0.0))
    assert said == []


# What stays.


def steps_after(tmp_path, losses, **options):
    checkpoints = CheckpointManager(tmp_path, 1, **options)
    for step, loss in enumerate(losses, 1):
        checkpoints.save(step, *make(1.0), {"validation_loss": loss})
    return CheckpointFolder(tmp_path).steps()


def test_the_best_by_validation_loss_stays_with_the_newest(tmp_path):
    losses = [3.0, 1.0, 2.0, None, 1.5]
    assert steps_after(tmp_path / "best", losses, keep_latest_k=2, keep_best=True) == [2, 4, 5]
    assert steps_after(tmp_path / "newest", losses, keep_latest_k=2) == [4, 5]
    assert steps_after(tmp_path / "nan", [float("nan"), 1.0, 3.0, 2.0], keep_latest_k=1, keep_best=True) == [2, 4]
    assert steps_after(tmp_path / "none known", [None] * 3, keep_latest_k=1, keep_best=True) == [3]


def test_a_new_best_takes_the_place_of_the_old_one(tmp_path):
    assert steps_after(tmp_path, [2.0, 1.0, 3.0, 0.5, 0.6, 0.7], keep_latest_k=1, keep_best=True) == [4, 6]


def test_the_best_loss_so_far_is_known_also_after_a_restart(tmp_path):
    steps_after(tmp_path, [2.0, 1.0, 3.0], keep_latest_k=1)
    checkpoints = CheckpointManager(tmp_path, 1, 1)
    checkpoints.load_newest(*make(0.0))
    checkpoints.save(4, *make(1.0), {"validation_loss": 1.5})
    assert CheckpointFolder(tmp_path).record(4).best_validation_loss == 1.0


# Random numbers.


def draw():
    return random.random(), np.random.rand(), torch.rand(2).tolist()


def test_random_numbers_go_on_as_they_would_have(tmp_path):
    checkpoints = CheckpointManager(tmp_path, 1, 0)
    draw()
    checkpoints.save(1, *make(1.0), {})
    expected = draw()
    draw()
    checkpoints.restore_random(1, seed=0)
    assert draw() == expected


def test_random_numbers_are_new_where_the_number_of_ranks_was_another(tmp_path):
    checkpoints = CheckpointManager(tmp_path, 1, 0)
    model = make(1.0)[0]
    for step in (1, 2):
        checkpoints.write_tensors(step, {"weight": model.weight.to("meta")}, lambda name: model.weight, {})
    drawn = []
    for step, seed in ((1, 0), (1, 0), (2, 0), (1, 1)):
        checkpoints.restore_random(step, seed)
        drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert len({json.dumps(d) for d in drawn}) == 3


# In the background.


def test_in_the_background_the_state_is_that_of_its_step_while_training_goes_on(tmp_path, monkeypatch):

    may_write = threading.Event()
    write = ChecksummedStream.write

    def waiting(self, data):
        assert may_write.wait(20)
        return write(self, data)

    monkeypatch.setattr(ChecksummedStream, "write", waiting)
    checkpoints = CheckpointManager(tmp_path, 1, 0, in_background=True)
    model, optimizer = make(1.0)
    for step in (1, 2):
        checkpoints.wait()
        may_write.clear()
        nn.init.constant_(model.weight, float(step))
        checkpoints.save(step, model, optimizer, {"step": step})
        nn.init.constant_(model.weight, 7.0)  # the next step, before anything is written
        assert checkpoints.latest() == (step - 1 or None)
        may_write.set()
    checkpoints.close()
    for step in (1, 2):
        assert checkpoints.load(step, model, optimizer) == {"step": step}
        assert torch.equal(model.weight, torch.full((2, 3), float(step)))


def test_buffers_in_the_background_are_used_again(tmp_path):
    checkpoints = CheckpointManager(tmp_path, 1, 1, in_background=True)
    model, optimizer = make(1.0)
    addresses = []
    for step in (1, 2):
        checkpoints.save(step, model, optimizer, {})
        checkpoints.wait()
        addresses.append({name: buffer.data_ptr() for name, buffer in checkpoints._staging._buffers.items()})
    assert addresses[0] == addresses[1]
    checkpoints.close()


def test_an_error_in_the_background_is_known_before_the_next_save(tmp_path, monkeypatch):
    checkpoints = CheckpointManager(tmp_path, 1, 0, in_background=True)
    assert not checkpoints.failed
    fail_after(monkeypatch, 0)
    checkpoints.save(1, *make(1.0), {})
    assert checkpoints._pending is not None
    checkpoints._pending.exception(timeout=20)
    assert checkpoints.failed
    with pytest.raises(ValueError, match="step 1: No space left on device"):
        checkpoints.wait()
    assert not checkpoints.failed
    checkpoints.close()
