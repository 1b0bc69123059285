"""Prepared data and files that somebody else may have changed."""

import gzip
import json
import resource
import subprocess
import sys

import numpy as np
import pytest

from spurline.config import Data
from spurline.data.prepare import prepare
from spurline.data.prepared_index import load_index
from spurline.data.text import open_text
from spurline.data.tokenizer import ByteTokenizer


@pytest.fixture
def folder(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(8):
        (texts / f"{number}.txt").write_text(f"text number {number}. " * 30)
    prepare([Data(path=str(texts))], str(tmp_path / "prepared"), ByteTokenizer())
    return tmp_path / "prepared"


def read_all(folder):
    data = open_text(Data(path=str(folder)), seq_len=16, seed=0)
    for window in range(len(data.train)):
        data.train.take([window])


def change_index(folder, change):
    path = folder / "spurline-data.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["../secret.bin", "/etc/passwd", "a/b", "..", "", "a\\b", "a\nb"])
def test_a_shard_in_another_folder_is_refused(folder, name):
    (folder.parent / "secret.bin").write_bytes(bytes((folder / "source0-00000.tokens").stat().st_size))
    change_index(folder, lambda content: content["sources"][0]["shards"][0].update(name=name))
    with pytest.raises(ValueError, match="is not the name of a file in the same folder"):
        load_index(str(folder))


def test_ids_outside_of_the_vocabulary_are_refused_when_they_are_read(folder):
    shard = folder / "source0-00000.tokens"
    tokens = np.fromfile(shard, "<u2")
    tokens[len(tokens) // 2] = 60_000
    tokens.tofile(shard)
    with pytest.raises(ValueError, match=r"source0-00000\.tokens' is damaged: it has token 60000, "):
        read_all(folder)


def test_legal_ids_in_place_of_others_are_found_by_verify(folder, capsys):
    from spurline.cli import main

    shard = folder / "source0-00000.tokens"
    np.zeros(shard.stat().st_size // 2, "<u2").tofile(shard)
    assert main(["data", "verify", str(folder)]) == 1
    assert "source0-00000.tokens' is damaged: its checksum differs" in capsys.readouterr().out


def test_documents_that_were_changed_are_refused_before_training(folder):
    path = folder / "source0.documents"
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"source0\.documents' is damaged: its checksum differs"):
        read_all(folder)


def test_a_line_without_end_is_refused_while_it_is_decompressed(tmp_path):
    path = tmp_path / "bomb.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=9) as file:
        file.write(b'{"text": "')
        for _ in range(80):
            file.write(bytes(2**20))
    assert path.stat().st_size < 100_000
    assert "line 1 is longer than 67,108,864 bytes" in peak_of(path)["error"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_of_many_lines_has_a_limit_in_total(tmp_path, monkeypatch, suffix):
    """What stays small is read, and so is what expands by a usual factor."""
    from spurline.data import formats

    pyarrow = pytest.importorskip("pyarrow")
    monkeypatch.setattr(formats, "MAX_EXPANDED_BYTES", 10**6)
    texts = {"bomb": b"a b\n" * 300_000, "small": b"a b\n" * 200_000, "usual": np.random.bytes(10**6).hex().encode()}
    for name, text in texts.items():
        path = tmp_path / f"{name}.txt{suffix}"
        path.write_bytes(pyarrow.compress(text, "gzip" if suffix == ".gz" else "zstd", asbytes=True))
        assert (len(text) > 200 * path.stat().st_size) == (name != "usual")
        read = (len(document.text) for document in formats.read_file(str(path), path.name, "text", lambda amount: None))
        if name == "bomb":
            with pytest.raises(
                ValueError, match=r"can't read '.*': it expands to more than 1,000,000 bytes: decompress"
            ):
                sum(read)
        else:
            assert sum(read) == len(text)


def write_bomb(path, column):
    """Without Arrow's schema, which would say that values are dictionaries."""
    from pyarrow import parquet, table

    parquet.write_table(table(column), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 100_000


def repeated(text, times):
    import pyarrow

    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * times), pyarrow.array([text]))


def test_a_small_parquet_file_does_not_take_gigabytes(tmp_path):
    """One value of 8 MB, 256 times: a batch of strings takes 3.8 GB."""
    pytest.importorskip("pyarrow")
    write_bomb(tmp_path / "bomb.parquet", {"text": repeated("a" * 2**23, 256)})
    outcome = peak_of(tmp_path / "bomb.parquet")
    assert outcome["documents"] == 256
    assert outcome["peak"] < 4e8


def test_repeats_in_small_parquet_files_of_conversations_share_one_text(tmp_path):
    """2 GB each, if every repeat had its own: 1,000 messages in one row, or a prompt in 256 rows."""
    pyarrow = pytest.importorskip("pyarrow")
    content = pyarrow.StructArray.from_arrays(
        [repeated("user", 1000), repeated("a" * 2**21, 1000)], ["role", "content"]
    )
    messages = pyarrow.ListArray.from_arrays([0, 1000], content)
    for name, column in (("a.parquet", {"messages": messages}), ("b.parquet", {"prompt": repeated("a" * 2**23, 256)})):
        write_bomb(tmp_path / name, column)
    outcome = peak_of(tmp_path, reader="spurline.data.chat_files.read_records")
    assert outcome == {"documents": 257, "error": "", "peak": outcome["peak"]}
    assert outcome["peak"] < 4e8


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda pa: pa.array([b"a" * 65] * 2, pa.binary(65)), "'messages' has values of 65 bytes, not text"),
        (
            lambda pa: pa.array([[("a", "b")]], pa.map_(pa.string(), pa.string())),
            r"a column is a map<.*> .*: write it as",
        ),
    ],
)
def test_columns_whose_repeats_would_be_copied_are_refused(tmp_path, make, told):
    pyarrow = pytest.importorskip("pyarrow")
    from spurline.data.parquet_files import parquet_rows

    write_bomb(tmp_path / "bomb.parquet", {"messages": make(pyarrow)})
    with pytest.raises(ValueError, match=told):
        list(parquet_rows(str(tmp_path / "bomb.parquet"), ["messages"]))


def test_a_row_group_that_would_take_gigabytes_is_refused(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    from spurline.data import parquet_files
    from spurline.data.sources import read_documents

    monkeypatch.setattr(parquet_files, "MAX_ROW_GROUP_BYTES", 10**6)
    texts = [str(number) * 1000 for number in range(1000)]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "bomb.parquet", compression="zstd")
    with pytest.raises(ValueError, match=r"row group 0 has [0-9,]+ bytes of 'text' in [0-9,]+ bytes of the file"):
        list(read_documents(Data(path=str(tmp_path / "bomb.parquet"))))


SCRIPT = """
import json, pkgutil, re, sys
from pathlib import Path
from spurline.config import Data

documents, error = 0, ""
try:
    for _ in pkgutil.resolve_name(sys.argv[2])(Data(path=sys.argv[1])):
        documents += 1
except ValueError as refused:
    error = str(refused)
# Not ru_maxrss, which a process inherits from the one that started it.
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
print(json.dumps({"documents": documents, "error": error, "peak": peak}))
"""


def peak_of(path, reader="spurline.data.sources.read_documents"):
    """What reading a file in a process of its own comes to."""

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30, 6 * 2**30))

    command = [sys.executable, "-c", SCRIPT, str(path), reader]
    process = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=limit)
    return json.loads(process.stdout)
