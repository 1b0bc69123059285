"""Our reader and writer of safetensors files against the safetensors package, and files that are not whole."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from spurline.hf import safetensors_file
from spurline.hf.quantized import read_whole
from spurline.hf.safetensors_file import Entry, read_header, read_into, write_file

TENSORS = {
    "b.matrix": torch.arange(12, dtype=torch.float32).view(3, 4),
    "a.half": torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16),
    "c.other_half": torch.tensor([[1.0], [3.0]], dtype=torch.float16),
    "d.scalar": torch.tensor(7.0),
    "e.empty": torch.empty(0, 5),
}


def changed_header(path, change):
    """Rewrite the header of a file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def test_reads_what_the_package_writes(tmp_path):
    save_file(TENSORS, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert header.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(read_whole(header[name]), tensor)
        assert read_whole(header[name]).dtype == tensor.dtype


def test_the_package_reads_what_is_written(tmp_path):
    entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()]
    write_file(tmp_path / "x.safetensors", entries, iter(TENSORS.values()))
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype


def test_reads_a_run_of_elements_and_converts_it(tmp_path):
    save_file(TENSORS, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    target = torch.empty(2, 2, dtype=torch.bfloat16)
    read_into(target, header["b.matrix"], start=5)
    assert target.tolist() == [[5, 6], [7, 8]]


def test_a_few_columns_of_a_wide_matrix_are_read_a_few_rows_at_a_time(tmp_path, monkeypatch):
    """Or a rank that holds a narrow part of a large matrix would need the memory of all of it."""
    matrix = torch.arange(300 * 70, dtype=torch.float32).view(300, 70)
    save_file({"matrix": matrix}, tmp_path / "model.safetensors")
    stored = read_header(tmp_path / "model.safetensors")["matrix"]
    largest, read_at = [0], safetensors_file._read_at

    def noting(file, position, target):
        largest[0] = max(largest[0], target.numel())
        read_at(file, position, target)

    monkeypatch.setattr(safetensors_file, "_read_at", noting)
    monkeypatch.setattr(safetensors_file, "_LARGEST_DETOUR", 1000)
    box = stored.read_box(0, 70, range(10, 290), range(3, 8))
    assert torch.equal(box, matrix[10:290, 3:8])
    assert 0 < largest[0] <= 1000


@pytest.mark.parametrize("length", [0, 5, 8, 60, -1])
def test_a_file_that_is_cut_off_is_refused_by_name(tmp_path, length):
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} is truncated"):
        read_header(path)


def test_a_file_that_is_too_long_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ValueError, match=r"is damaged: it has .* bytes"):
        read_header(path)


@pytest.mark.parametrize("garbage", [b"x" * 40, b'{"a": ' + b"1" * 34, b"\xff" * 40, b"[" + b"1," * 19 + b"]"])
def test_a_header_that_is_garbage_is_refused(tmp_path, garbage):
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(garbage).to_bytes(8, "little") + garbage + b"\0" * 100)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} is .*not a safetensors file"):
        read_header(path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [4, 4], "data_offsets": [6, 54]}, "tensor b.matrix .* invalid offset or size"),
        ({"dtype": "F32", "shape": [3, 4], "data_offsets": [10, 58]}, "invalid offset or size"),
        ({"dtype": "F32", "shape": [-3, -4], "data_offsets": [6, 54]}, "invalid header entry of tensor b.matrix"),
        ({"dtype": "F32", "shape": [3, 4]}, "invalid header entry of tensor b.matrix"),
        ({"dtype": "Q4", "shape": [3, 4], "data_offsets": [6, 54]}, "b.matrix has unknown dtype Q4"),
        ("hello", "invalid header entry of tensor b.matrix"),
    ],
)
def test_a_header_that_lies_is_refused_with_the_tensors_name(tmp_path, entry, message):
    path = tmp_path / "x.safetensors"
    save_file({name: TENSORS[name] for name in ("a.half", "b.matrix")}, path)
    changed_header(path, lambda header: header.update({"b.matrix": entry}))
    with pytest.raises(ValueError, match=message):
        read_header(path)


def test_a_name_that_stands_twice_is_refused(tmp_path):
    entry = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = b"{" + entry + b"," + entry + b"}"
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(ValueError, match="duplicate key"):
        read_header(tmp_path / "x.safetensors")
