"""A conversion holds a tensor or two at a time, never the model; and it can be broken off."""

import weakref

import pytest
import torch
from their_models import make, save

from spurline.hf import importing
from spurline.hf.exporting import export_run
from spurline.hf.importing import import_folder
from spurline.hf.safetensors_file import Stored
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.checkpoint.reader import StoredCheckpoint


class Live:
    """Counts the bytes of the tensors that a function has returned and that somebody still holds."""

    def __init__(self):
        self.now = self.peak = self.total = self.largest = 0

    def counting(self, function):
        def counted(*args, **kwargs):
            tensor = function(*args, **kwargs)
            size = tensor.untyped_storage().nbytes()
            self.now, self.total = self.now + size, self.total + size
            self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
            weakref.finalize(tensor.untyped_storage(), self._free, size)
            return tensor

        return counted

    def _free(self, size):
        self.now -= size


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save(make("qwen3_moe", num_hidden_layers=8), tmp_path_factory.mktemp("model") / "theirs")


def test_no_more_than_two_tensors_are_in_memory(source, tmp_path, monkeypatch):
    reading, writing = Live(), Live()
    monkeypatch.setattr(importing, "read_slot", reading.counting(importing.read_slot))
    monkeypatch.setattr(StoredCheckpoint, "read_tensor", writing.counting(StoredCheckpoint.read_tensor))
    import_folder(source, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back")
    assert reading.total > 15 * reading.largest
    assert writing.total > 15 * writing.largest
    assert reading.peak <= 2 * reading.largest
    assert writing.peak == writing.largest


def test_experts_of_a_layer_are_one_tensor(source, tmp_path):
    """What the bound above rests on."""
    import_folder(source, tmp_path / "run")
    tensors = CheckpointManager(tmp_path / "run", 1, 0).open(0).layout.tensors
    assert tensors["model.layers.7.moe.experts.w1_EFD"].shape == (8, 24, 32)


def interrupted(function, call):
    """The function, with a user who presses Ctrl-C when it is called for the so-manieth time."""
    calls = iter(range(1, 1000))

    def interrupt(*args):
        if next(calls) == call:
            raise KeyboardInterrupt
        return function(*args)

    return interrupt


def test_an_interrupt_leaves_nothing(source, tmp_path, monkeypatch):
    read_into, read_tensor = Stored.read_into, StoredCheckpoint.read_tensor
    monkeypatch.setattr(Stored, "read_into", interrupted(read_into, call=3))
    with pytest.raises(KeyboardInterrupt):
        import_folder(source, tmp_path / "made" / "run")
    assert list(tmp_path.iterdir()) == []

    monkeypatch.setattr(Stored, "read_into", read_into)
    import_folder(source, tmp_path / "run")
    # First are the selection biases of eight layers, and then what goes into the file.
    monkeypatch.setattr(StoredCheckpoint, "read_tensor", interrupted(read_tensor, call=12))
    with pytest.raises(KeyboardInterrupt):
        export_run(tmp_path / "run", tmp_path / "made" / "back")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_error_of_reading_keeps_its_kind(source, tmp_path, monkeypatch):
    def fail(*args):
        raise ValueError("the disk is gone")

    monkeypatch.setattr(Stored, "read_into", fail)
    with pytest.raises(ValueError, match="the disk is gone"):
        import_folder(source, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_selection_bias_that_they_lack_must_be_zero(tmp_path):
    import_folder(save(make("deepseek_v2"), tmp_path / "theirs"), tmp_path / "run")
    checkpoints = CheckpointManager(tmp_path / "run", 1, 0)
    first = checkpoints.open(0)
    assert torch.equal(first.read_tensor("model.layers.2.moe.router.expert_bias_E"), torch.zeros(8))
    tensors = {
        name.removeprefix("model."): torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        for name, entry in first.layout.tensors.items()
    }

    def read(name):
        tensor = first.read_tensor(f"model.{name}")
        return tensor + 0.1 if name == "layers.2.moe.router.expert_bias_E" else tensor

    checkpoints.write_tensors(1, tensors, read, {"tokens_seen": 0})
    with pytest.raises(ValueError, match=r"layers\.2\.moe\.router\.expert_bias_E is not zero"):
        export_run(tmp_path / "run", tmp_path / "back")
    export_run(tmp_path / "run", tmp_path / "back", step=0)
