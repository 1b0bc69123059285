import errno
import os
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from spurline.config import Data
from spurline.data import check_data, open_data
from spurline.data import prepare as module
from spurline.data.formats import Document
from spurline.data.prepare import prepare
from spurline.data.prepared_index import INDEX_FILE, Index, content_problem, load_index
from spurline.data.sources import read_documents
from spurline.data.tokenizer import ByteTokenizer, tokenizer_for
from spurline.data.tokenizer_train import save_tokenizer, train_bpe

FILES = {f"{i % 3}/{i}.txt": f"Document {i} für 🚂. " * (5 + i) + "\n" for i in range(40)}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Some documents, in a folder of their own."""
    for name, text in FILES.items():
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(tmp_path / "text")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several batches and shards in a few kilobytes."""
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 1000)
    monkeypatch.setattr(module, "SHARD_TOKENS", 5000)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def same_batches(ours: Data, theirs: Data, seq_len: int = 32) -> bool:
    opened = [open_data(data, seq_len, seed=5) for data in (ours, theirs)]
    trains = [[data.train.batch(start, 8) for start in (0, 100, 555)] for data in opened]
    validations = [list(data.validation.batches(4, 3)) if data.validation else [] for data in opened]
    return len(validations[0]) == len(validations[1]) and all(
        torch.equal(a.tokens_BL, b.tokens_BL) and torch.equal(a.labels_BL, b.labels_BL)
        for a, b in zip(trains[0] + validations[0], trains[1] + validations[1], strict=True)
    )


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("fraction", [0.0, 0.02, 0.2, 0.9])
def test_training_on_prepared_data_reads_what_training_on_the_text_reads(folder, tmp_path, fraction):
    index = prepare([Data(folder)], str(tmp_path / "out"), ByteTokenizer())
    assert len(index.sources[0].shards) > 2
    assert same_batches(
        Data(folder, validation_fraction=fraction), Data(str(tmp_path / "out"), validation_fraction=fraction)
    )


@pytest.mark.usefixtures("small")
def test_the_same_with_a_tokenizer_which_comes_along(folder, tmp_path):
    tokenizer = train_bpe(read_documents(Data(folder)), 300)
    save_tokenizer(tokenizer, str(tmp_path / "t.json"))
    prepare([Data(folder)], str(tmp_path / "out"), tokenizer)
    (tmp_path / "t.json").rename(tmp_path / "moved.json")
    prepared = Data(str(tmp_path / "out"))
    assert tokenizer_for(prepared).fingerprint == tokenizer.fingerprint
    assert same_batches(Data(folder, tokenizer=str(tmp_path / "moved.json")), prepared)


@pytest.mark.usefixtures("small")
def test_files_hold_the_documents_each_after_a_boundary(folder, tmp_path):
    out = tmp_path / "out"
    index = prepare([Data(folder)], str(out), ByteTokenizer())
    (source,) = index.sources
    shards = [np.fromfile(out / shard.name, "<u2") for shard in source.shards]
    expected = [token for document in read_documents(Data(folder)) for token in (256, *document.text.encode())]
    assert np.concatenate(shards).tolist() == expected
    assert all(5000 <= len(shard) < 8000 for shard in shards[:-1])
    start_D = np.fromfile(out / source.documents.name, "<i8").reshape(-1, 2)[:, 0]
    assert start_D.tolist() == [i for i, token in enumerate(expected) if token == 256]
    assert (source.num_documents, source.num_tokens) == (len(FILES), len(expected))
    assert load_index(str(out)) == index


@pytest.mark.usefixtures("small")
def test_number_of_workers_changes_no_byte(folder, tmp_path):
    for workers in (1, 2):
        prepare([Data(folder)], str(tmp_path / f"{workers}"), ByteTokenizer(), num_workers=workers)
    assert content(tmp_path / "1") == content(tmp_path / "2")


def test_large_document_in_pieces_is_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr("spurline.data.formats.PIECE_BYTES", 100)
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 250)
    monkeypatch.setattr(module, "SHARD_TOKENS", 1000)
    text = "".join(f"line {i}\n" for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    index = prepare([Data(str(tmp_path / "a.txt"))], str(tmp_path / "out"), ByteTokenizer())
    assert index.sources[0].num_documents == 1
    assert index.sources[0].num_tokens == len(text) + 1
    assert len(index.sources[0].shards) > 5
    assert same_batches(Data(str(tmp_path / "a.txt")), Data(str(tmp_path / "out")))


def test_wide_ids_are_kept(tmp_path, folder):
    class Wide(ByteTokenizer):
        vocab_size = 100_000
        boundary_id = 99_999

        def encode(self, text: str) -> np.ndarray:
            return super().encode(text).astype(np.uint32) + 70_000

    out = tmp_path / "out"
    index = prepare([Data(folder)], str(out), Wide())
    assert index.dtype == "uint32"
    tokens_N = np.fromfile(out / index.sources[0].shards[0].name, "<u4")
    assert set(tokens_N[tokens_N != 99_999] - 70_000) == set("".join(FILES.values()).encode())
    assert (tokens_N == 99_999).sum() == len(FILES)


def test_weights_of_the_folder_are_those_of_training(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 10_000)
    sources = [Data(str(tmp_path / f"{name}.txt")) for name in "ab"]
    prepare(sources, str(tmp_path / "out"), ByteTokenizer(), weights=[Fraction(3), Fraction("0.5")])
    data = open_data(Data(str(tmp_path / "out")), seq_len=16, seed=0)
    letters = data.train.batch(0, 70).tokens_BL[:, -1].tolist()
    assert letters.count(ord("a")) == 60
    assert letters.count(ord("b")) == 10


def test_folder_that_is_not_empty_is_refused(folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    prepare([Data(folder)], str(out), ByteTokenizer())
    before = content(out)
    with pytest.raises(ValueError, match="out' is not empty: choose another folder"):
        prepare([Data(folder)], str(out), ByteTokenizer())
    assert content(out) == before
    with pytest.raises(ValueError, match=r"can't write .*: Not a directory"):
        prepare([Data(folder)], str(out / INDEX_FILE), ByteTokenizer())


@pytest.mark.usefixtures("small")
def test_folder_within_the_source_is_no_part_of_it(folder, tmp_path):
    prepare([Data(folder)], str(tmp_path / "out"), ByteTokenizer())
    prepare([Data(folder)], str(Path(folder, "within")), ByteTokenizer())
    assert content(Path(folder, "within")) == content(tmp_path / "out")


def assert_nothing_is_left(tmp_path: Path) -> None:
    assert [path.name for path in tmp_path.iterdir() if path.name != "text"] == []


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("workers", [1, 2])
def test_full_disk_leaves_nothing_behind(folder, tmp_path, monkeypatch, workers):
    real_write, num_written = module.HashedFile.write, []

    def write(self, content: bytes) -> None:
        num_written.append(len(content))
        if sum(num_written) > 8000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_write(self, content)

    monkeypatch.setattr(module.HashedFile, "write", write)
    with pytest.raises(ValueError, match=r"^can't write '.*out': No space left on device\. Nothing was written$"):
        prepare([Data(folder)], str(tmp_path / "out"), ByteTokenizer(), num_workers=workers)
    assert_nothing_is_left(tmp_path)


def test_disk_that_is_full_at_the_end_leaves_nothing_behind(folder, tmp_path, monkeypatch):
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(ValueError, match="No space left on device"):
        prepare([Data(folder)], str(tmp_path / "out"), ByteTokenizer())
    assert_nothing_is_left(tmp_path)


def test_missing_permission_is_told(folder, tmp_path, monkeypatch):
    def makedirs(path: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "makedirs", makedirs)
    with pytest.raises(ValueError, match=r"can't write .*: Permission denied"):
        prepare([Data(folder)], str(tmp_path / "out"), ByteTokenizer())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("workers", [1, 2])
def test_bad_file_at_the_end_leaves_nothing_behind(folder, tmp_path, workers):
    last = [document.name for document in read_documents(Data(folder))][-1]
    Path(folder, last).write_bytes(b"latin-1: caf\xe9")
    with pytest.raises(ValueError, match=rf"{last}' is not UTF-8 text \(byte 0xe9 at offset 12\)"):
        prepare([Data(folder)], str(tmp_path / "out"), ByteTokenizer(), num_workers=workers)
    assert_nothing_is_left(tmp_path)


@pytest.fixture
def prepared(folder: str, tmp_path: Path) -> tuple[Path, Index]:
    return tmp_path / "out", prepare([Data(folder)], str(tmp_path / "out"), ByteTokenizer())


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [(lambda c: b"", "is empty"), (lambda c: c[:-2], "bytes instead of"), (lambda c: c + b"\0\0", "bytes instead of")],
)
@pytest.mark.parametrize("suffix", ["-00000.tokens", ".documents"])
def test_shard_of_the_wrong_size_is_refused_by_name(prepared, suffix, damage, complaint):
    path = prepared[0] / f"source0{suffix}"
    path.write_bytes(damage(path.read_bytes()))
    (problem,) = check_data(Data(str(prepared[0])))
    assert f"source0{suffix}' {'has' if 'bytes' in complaint else ''}".rstrip() in problem
    assert complaint in problem
    with pytest.raises(ValueError, match=f"source0{suffix}.*prepare the data again$"):
        open_data(Data(str(prepared[0])), seq_len=16, seed=0)


def test_flipped_bit_is_found_by_name(prepared):
    folder, index = prepared
    amounts: list[int] = []
    assert [content_problem(str(folder), stored, amounts.append) for stored in index.files] == ["", ""]
    assert sum(amounts) == sum(stored.num_bytes for stored in index.files)
    shard = folder / index.sources[0].shards[0].name
    damaged = bytearray(shard.read_bytes())
    damaged[1234] ^= 4
    shard.write_bytes(damaged)
    problems = [content_problem(str(folder), stored, amounts.append) for stored in index.files]
    assert [bool(problem) for problem in problems] == [stored.name == shard.name for stored in index.files]
    assert f"{shard.name}' is damaged" in "".join(problems)


def test_missing_shard_and_damaged_index_are_refused(prepared):
    folder, index = prepared
    shard = folder / index.sources[0].shards[0].name
    shard.rename(folder / "away")
    (problem,) = check_data(Data(str(folder)))
    assert f"{shard.name}': No such file" in problem
    (folder / "away").rename(shard)
    text = (folder / INDEX_FILE).read_text()
    for wrong in (text[:100], "[]", "{}", text.replace('"shards"', '"shrds"'), text.replace("uint16", "float99")):
        (folder / INDEX_FILE).write_text(wrong)
        (problem,) = check_data(Data(str(folder)))
        assert INDEX_FILE in problem
        assert "\n" not in problem
    (folder / INDEX_FILE).write_text(text.replace('"version": 1', '"version": 9'))
    assert "has version 9, not 1" in check_data(Data(str(folder)))[0]


def test_another_tokenizer_than_that_of_the_folder_is_refused(prepared, tmp_path):
    save_tokenizer(train_bpe([Document("a", "some text " * 9)], 260), str(tmp_path / "t.json"))
    with pytest.raises(ValueError, match=r"was prepared with a different tokenizer than data\.tokenizer '.*t\.json'"):
        open_data(Data(str(prepared[0]), tokenizer=str(tmp_path / "t.json")), seq_len=16, seed=0)
