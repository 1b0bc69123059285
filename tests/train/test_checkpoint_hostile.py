"""Checkpoints that a stranger has made: nothing of them runs, and what is wrong is one line."""

import json
import os
import pickle
import random
import struct

import numpy as np
import pytest
import torch
import version1_checkpoints as version1
from torch import nn
from two_linears import make, trained

from spurline.train.base_model import check_base
from spurline.train.checkpoint.folder import CheckpointFolder
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.checkpoint.plain_pickle import read_pickle
from spurline.train.checkpoint.random_state import random_state, restore_random_state, seed_random


def draw():
    return random.random(), np.random.rand(), torch.rand(2).tolist()


class Payload:
    """What runs when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "it ran"


# Version 1 through the safe reader.


def test_a_checkpoint_of_version_1_is_loaded_bit_for_bit(tmp_path):
    model, optimizer = trained()
    version1.save(tmp_path, 3, model, optimizer, {"tokens_seen": 7, "validation_loss": None})
    expected = draw()
    other, other_optimizer = make(seed=1)
    checkpoints = CheckpointManager(tmp_path, 1, 0)
    extra = {"tokens_seen": 7, "validation_loss": None}
    assert checkpoints.load_newest(other, other_optimizer) == (3, extra)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[mine].items():
            assert torch.equal(other_optimizer.state[theirs][key], value), key
    checkpoints.restore_random(3, seed=0)
    assert draw() == expected
    checkpoints.replace_extra(3, extra | {"tokens_seen": 8})
    assert checkpoints.load(3, other, other_optimizer) == extra | {"tokens_seen": 8}


def test_the_same_tensors_are_read_by_our_reader_and_by_theirs(tmp_path):
    folder = version1.save(tmp_path, 1, *trained(), {})
    stored = CheckpointManager(tmp_path, 1, 0).open(1)
    state = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in stored.layout.tensors.items()}
    torch.distributed.checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    for name, tensor in state.items():
        assert torch.equal(stored.read_tensor(name), tensor), name


# What was made to run.


def hostile_metadata(tmp_path, marker):
    folder = version1.save(tmp_path / "run", 1, *trained(), {"tokens_seen": 7})
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = Payload(marker)
    path.write_bytes(pickle.dumps(metadata))
    version1.seal(folder, 1)


def hostile_extra(tmp_path, marker):
    version1.save(tmp_path / "run", 1, *trained(), {}, lambda state: {**state, "extra": (Payload(marker),)})


@pytest.mark.parametrize("craft", [hostile_metadata, hostile_extra])
def test_what_a_hostile_checkpoint_wants_to_run_does_not(tmp_path, marker, craft):
    craft(tmp_path, marker)
    model, optimizer = make()
    checkpoints = CheckpointManager(tmp_path / "run", 1, 0)
    with pytest.raises(ValueError, match=r"names 'posix\.mkdir', which is not allowed") as refused:
        checkpoints.load_newest(model, optimizer)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=r"names 'posix\.mkdir'"):
        checkpoints.load(1, model, None)
    assert not marker.exists()


def test_the_payload_does_run_in_the_unpickler_of_python(marker):
    pickle.loads(pickle.dumps(Payload(marker)))
    assert marker.exists()


def test_a_hostile_random_state_is_refused(tmp_path, marker):
    version1.save(tmp_path, 1, *trained(), {}, lambda state: {**state, "random.0": (Payload(marker),)})
    with pytest.raises(ValueError, match="not allowed"):
        CheckpointManager(tmp_path, 1, 0).restore_random(1, seed=0)
    assert not marker.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
        b"\x80\x02cbuiltins\ngetattr\n.",
        b"(ios\nsystem\n.",
        b"\x80\x02}(\x88\x88\x86\x88u.",
        b"\x80\x04" + b"(" * 100_000,
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x80\x04X\xff\xff\xff\x7f",
        b"",
    ],
)
def test_pickles_of_other_kinds_are_one_line(content):
    with pytest.raises(ValueError, match=r"not allowed|outside|keys|pickle|frame size") as refused:
        read_pickle(content, {})
    assert "\n" not in str(refused.value)


def test_a_key_whose_hash_would_overflow_the_stack_is_refused():
    deep = b"\x80\x04})" + b"\x85" * 200_000 + b"K\x01s."
    with pytest.raises(ValueError, match="keys are not plain"):
        read_pickle(deep, {})


def shared_tuple():
    """Written out, it would have 2**16 entries; with 2**64 of them, this test would not end if it failed."""
    shared = (1,)
    for _ in range(16):
        shared = (shared, shared)
    return shared


def repeated():
    """A tensor of stride 0: 8 GB of one number."""
    return torch.zeros(1).expand(2**31)


def shared():
    """200 tensors of the same 40 KB."""
    storage = torch.zeros(10_000)
    return [storage.view(-1) for _ in range(200)]


@pytest.mark.parametrize("craft", [repeated, shared])
def test_a_pickle_can_not_multiply_its_data(tmp_path, craft):
    version1.save(tmp_path, 1, *trained(), {}, lambda state: {**state, "random.0": ({"torch": craft()},)})
    with pytest.raises(ValueError, match="larger than their data"):
        CheckpointManager(tmp_path, 1, 0).restore_random(1, seed=0)


def test_a_list_that_a_pickle_shares_with_itself_is_refused(tmp_path):
    """Written out, it would have 2**64 entries."""
    shared = [1]
    for _ in range(64):
        shared = [shared, shared]
    version1.save(tmp_path, 1, *trained(), {}, lambda state: {**state, "extra": ({"run": {"a": shared}},)})
    with pytest.raises(ValueError, match="its extra is not a dict of numbers"):
        CheckpointManager(tmp_path, 1, 0).load_newest(*make())


@pytest.mark.parametrize("entry", [("python", (shared_tuple(), (1,), None)), ("torch", shared_tuple())])
def test_a_random_state_of_more_than_numbers_is_not_written_out(tmp_path, entry):
    version1.save(tmp_path, 1, *trained(), {}, lambda state: {**state, "random.0": (dict([entry]),)})
    with pytest.raises(ValueError, match="it has more than numbers and arrays"):
        CheckpointManager(tmp_path, 1, 0).restore_random(1, seed=0)


# Files that point elsewhere.


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"relative_path": "../../secret"}, "which checkpoint.json does not list"),
        ({"offset": 10**9}, "lies outside of the file"),
        ({"length": -1}, "lies outside of the file"),
        ({"length": 10**12}, "lies outside of the file"),
    ],
)
def test_metadata_of_version_1_stays_inside_of_its_files(tmp_path, changes, told):
    folder = version1.save(tmp_path, 1, *trained(), {"tokens_seen": 7})
    version1.rewrite_metadata(folder, 1, lambda metadata: version1.with_place(metadata, "model.0.weight", **changes))
    with pytest.raises(ValueError, match=told):
        CheckpointManager(tmp_path, 1, 0).load(1, *make())


def rewrite(folder, change):
    """Change metadata.json, and make checkpoint.json fit, as anybody can."""
    path = folder / "metadata.json"
    content = json.loads(path.read_text())
    change(content["tensors"])
    path.write_text(json.dumps(content))
    record = json.loads((folder / "checkpoint.json").read_text())["checkpoint"]
    version1.seal(folder, record["step"])
    files = json.loads((folder / "checkpoint.json").read_text())["checkpoint"]["files"]
    version1.reseal(folder, {**record, "files": files})


def set_chunk(place, value):
    def change(tensors):
        tensors["model.0.weight"]["chunks"][0][place] = value

    return change


def leave_a_hole(tensors):
    """As many elements as the tensor has, in two boxes that overlap."""
    entry = tensors["model.0.weight"]
    file = entry["chunks"][0][2]
    entry["chunks"] = [[[0, 0], [3, 3], file, 0], [[1, 0], [1, 3], file, 0]]


def overlap_in_two_dims(tensors):
    entry = tensors["model.0.weight"]
    file = entry["chunks"][0][2]
    boxes = [([0, 0], [2, 2]), ([1, 1], [2, 2]), ([3, 0], [1, 3]), ([0, 2], [1, 1])]
    entry["chunks"] = [[*box, file, 0] for box in boxes]


def list_a_file_many_times(tensors):
    """Each tensor is valid, and verifying, inspecting or loading them would read the file a hundred times."""
    tensors.update({f"model.{number}.more": tensors["random.0"] for number in range(100)})


def set_shape(tensors):
    tensors["optimizer.exp_avg.0.weight"]["shape"] = [2**40, 2**20]


def add_an_empty_tensor_of_impossible_size(tensors):
    """Its number of elements is 0, but overflows before the 0 is multiplied."""
    file = tensors["model.0.weight"]["chunks"][0][2]
    sizes = [2**61, 2**61, 0]
    tensors["model.0.other"] = {"dtype": "float32", "shape": sizes, "chunks": [[[0, 0, 0], sizes, file, 0]]}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (set_chunk(2, "/etc/passwd"), "which checkpoint.json does not list"),
        (set_chunk(2, "../checkpoint.json"), "which checkpoint.json does not list"),
        (set_chunk(3, 10**9), "lies outside of the file"),
        (set_chunk(3, -1), "lies outside of the file"),
        (set_chunk(1, [2**40, 3]), "is not inside of it"),
        (set_chunk(1, [1, 3]), "do not fill it"),
        (set_chunk(0, ["a"]), "is not valid"),
        (set_shape, "do not fill it"),
        (add_an_empty_tensor_of_impossible_size, "the shape of tensor 'model.0.other' is not valid"),
        (lambda tensors: tensors["model.0.weight"].update(dtype="object"), "is not valid"),
        (lambda tensors: tensors["model.0.weight"].update(chunks=[]), "do not fill it"),
        (leave_a_hole, "do not fill it"),
        (lambda tensors: tensors.update({"optimizer.step.0.weight": tensors.pop("random.0")}), "with the shape"),
        (list_a_file_many_times, r"its chunks in 'rank-00000-00000\.tensors' have [0-9,]+ bytes, and the file [0-9,]+"),
        (overlap_in_two_dims, "do not fill it"),
        (lambda tensors: tensors.update({"model.\ud800": tensors["model.0.bias"]}), "has invisible characters"),
        (lambda tensors: tensors.update({"model.\x1b[2J": tensors["model.0.bias"]}), "has invisible characters"),
    ],
)
def test_metadata_stays_inside_of_its_files(tmp_path, change, told):
    CheckpointManager(tmp_path, 1, 0).save(1, *trained(), {})
    rewrite(tmp_path / "checkpoints" / "step-00000001", change)
    with pytest.raises(ValueError, match=told) as refused:
        CheckpointManager(tmp_path, 1, 0).load_newest(*make())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("entry", [{"dtype": "float32", "shape": []}, {"shape": [0, 2], "chunks": []}])
def test_a_random_state_that_is_not_bytes_is_one_line(tmp_path, entry):
    def change(tensors):
        file = tensors["random.0"]["chunks"][0][2]
        tensors["random.0"] |= {"chunks": [[[], [], file, 0]]} | entry

    CheckpointManager(tmp_path, 1, 0).save(1, *trained(), {})
    rewrite(tmp_path / "checkpoints" / "step-00000001", change)
    with pytest.raises(ValueError, match=r"has no random\.0 of bytes"):
        CheckpointManager(tmp_path, 1, 0).restore_random(1, seed=0)


def set_numpy_position(position):
    return lambda state: state["numpy"].__setitem__(2, position)


def set_torch_words(left, position):
    def change(state):
        content = bytearray.fromhex(state["torch"])
        struct.pack_into("=8xi4xQ", content, 0, left, position)
        struct.pack_into("=i", content, 12, 1)  # it was seeded
        state["torch"] = content.hex()

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (set_numpy_position(10**8), "NumPy's position is not"),
        (set_numpy_position(-1), "NumPy's position is not"),
        (set_numpy_position(0.5), "NumPy's position is not"),
        (lambda state: state.update(numpy=state["numpy"][:2]), "not enough values"),
        (set_torch_words(600, 600), "torch's position is not"),
        (set_torch_words(1, 2**32), "torch's position is not"),
        (lambda state: state.update(torch="00"), "unpack_from requires"),
        (lambda state: state["python"].__setitem__(2, "x"), "Python's next normal number is not"),
    ],
)
def test_a_random_state_that_points_outside_of_its_words_is_refused(change, told):
    """Drawing from it would read other memory, or end the process with a segmentation fault."""
    state = json.loads(bytes(random_state().numpy()))
    change(state)
    seed_random(0, 1, 0)
    expected = draw()
    seed_random(0, 1, 0)
    with pytest.raises(ValueError, match=f"the random state in the checkpoint is damaged: .*{told}") as refused:
        restore_random_state(json.dumps(state).encode())
    assert "\n" not in str(refused.value)
    assert draw() == expected


@pytest.mark.parametrize("num_drawn", [0, 1, 623, 624, 625])
def test_a_random_state_is_restored_wherever_it_stands(num_drawn):
    seed_random(0, 1, 0)
    np.random.rand(num_drawn // 2)
    torch.randint(2, (num_drawn,))
    state = bytes(random_state().numpy())
    expected = draw()
    restore_random_state(state)
    assert draw() == expected


def test_an_empty_chunk_does_not_take_the_place_of_another(tmp_path):
    """With the offsets of the first half, and its data in the second: verifying would read one, loading the other."""
    rows = nn.Linear(4, 4, bias=False)
    CheckpointManager(tmp_path, 1, 0).save(1, rows, torch.optim.AdamW(rows.parameters()), {})

    def change(tensors):
        entry = tensors["model.weight"]
        ((_, _, file, begin),) = entry["chunks"]
        half, other = ([[row, 0], [2, 4], file, begin + row * 16] for row in (0, 2))
        entry["chunks"] = [half, other, [[0, 0], [0, 4], file, begin + 32]]

    rewrite(tmp_path / "checkpoints" / "step-00000001", change)
    checkpoints, loaded = CheckpointManager(tmp_path, 1, 0), nn.Linear(4, 4, bias=False)
    checkpoints.load(1, loaded, None)
    assert torch.equal(checkpoints.open(1).read_tensor("model.weight"), rows.weight)
    assert torch.equal(loaded.weight, rows.weight)


def test_options_of_a_stranger_are_told_in_printable_text(tmp_path):
    stranger = {"dim": 3, "\x1b[2J\x1b]0;owned\x07": 1, "long" * 1000: ["\x1b[31m"] * 1000}
    CheckpointManager(tmp_path, 1, 0, model_config=stranger).save(1, *trained(), {})
    said = []
    CheckpointManager(tmp_path, 1, 0, model_config={"dim": 4}, say=said.append).load(1, *make())
    (line,) = said
    assert "model.dim 3 -> 4; model.·[2J·]0;owned· 1 -> " in line
    assert line.isprintable()
    assert len(line) < 500
    theirs, mine = {"folder": "\x1b[2Jbase", "step": "\x1b[2J"}, {"folder": "mine", "fingerprint": "1"}
    with pytest.raises(ValueError, match=r"other weights, step ·\[2J of ·\[2Jbase, than those of mine") as refused:
        check_base({"base": theirs}, {"base": mine}, "run")
    assert str(refused.value).isprintable()


def test_a_renamed_folder_is_not_taken_for_another_step(tmp_path):
    checkpoints = CheckpointManager(tmp_path, 1, 0)
    checkpoints.save(10, *trained(), {})
    (checkpoints.folder / "step-00000010").rename(checkpoints.folder / "step-00000030")
    with pytest.raises(ValueError, match="holds the checkpoint of step 10: was the folder renamed"):
        checkpoints.load_newest(*make())


# Signatures.

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


def test_only_what_was_signed_with_the_key_is_loaded(tmp_path):
    CheckpointManager(tmp_path, 1, 0, sign_key=KEY).save(1, *trained(), {"tokens_seen": 1})
    assert CheckpointManager(tmp_path, 1, 0, sign_key=KEY).load_newest(*make()) == (1, {"tokens_seen": 1})
    assert CheckpointManager(tmp_path, 1, 0).load_newest(*make()) == (1, {"tokens_seen": 1})
    with pytest.raises(ValueError, match="was signed with another key, or changed since"):
        CheckpointManager(tmp_path, 1, 0, sign_key=OTHER_KEY).load_newest(*make())


def test_what_is_not_signed_is_passed_over_for_what_is(tmp_path):
    CheckpointManager(tmp_path, 1, 0, sign_key=KEY).save(1, *trained(), {})
    CheckpointManager(tmp_path, 1, 0).save(2, *trained(), {})
    said = []
    assert CheckpointManager(tmp_path, 1, 0, sign_key=KEY, say=said.append).load_newest(*make())[0] == 1
    assert "it is not signed, and a signature is required" in said[0]


def test_a_change_behind_a_new_checksum_is_found_by_the_signature(tmp_path):
    CheckpointManager(tmp_path, 1, 0, sign_key=KEY).save(1, *trained(), {})
    path = tmp_path / "checkpoints" / "step-00000001" / "checkpoint.json"
    stored = json.loads(path.read_text())
    version1.reseal(path.parent, {**stored["checkpoint"], "tokens_seen": 9})
    changed = json.loads(path.read_text())
    path.write_text(json.dumps({**changed, "hmac_sha256": stored["hmac_sha256"]}))
    assert CheckpointFolder(tmp_path).record(1).tokens_seen == 9
    with pytest.raises(ValueError, match="or changed since"):
        CheckpointFolder(tmp_path, KEY).record(1)
