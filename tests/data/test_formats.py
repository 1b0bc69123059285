import gzip
import json
import random
import re
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spurline.config import Data
from spurline.data import formats
from spurline.data.parquet_files import parquet_rows
from spurline.data.sources import read_documents, source_size


def read(path: Path, text_field: str = "text") -> dict[str, str]:
    """Name -> text of all documents, with the pieces of one joined."""
    found: dict[str, str] = {}
    for document in read_documents(Data(str(path), text_field=text_field)):
        assert (document.name in found) == document.is_rest
        found[document.name] = found.get(document.name, "") + document.text
    return found


def write_jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_parquet(path: Path, **columns: list) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


def compress(path: Path, suffix: str) -> Path:
    packed = path.with_name(path.name + suffix)
    if suffix == ".gz":
        packed.write_bytes(gzip.compress(path.read_bytes()))
    else:
        with pyarrow.output_stream(packed, compression="zstd") as file:
            file.write(path.read_bytes())
    path.unlink()
    return packed


@given(st.text(st.sampled_from("ab \né🚂\r")), st.integers(4, 20))
def test_pieces_join_to_the_text_and_end_with_a_line_where_there_is_one(tmp_path_factory, text, size):
    path = tmp_path_factory.mktemp("pieces") / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "PIECE_BYTES", size)
        pieces = list(formats.read_file(str(path), "a.txt", "text", lambda amount: None))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.is_rest for piece in pieces] == [i > 0 for i in range(len(pieces))]
    for piece in pieces[:-1]:
        assert len(piece.text.encode()) < 4 * size
        assert piece.text.endswith("\n") or "\n" not in piece.text


def test_large_file_is_never_read_at_once(make_files, monkeypatch):
    path = make_files({"a.txt": "line\n" * 100_000}) / "a.txt"
    monkeypatch.setattr(formats, "PIECE_BYTES", 1000)
    amounts: list[int] = []
    documents = formats.read_file(str(path), "a.txt", "text", amounts.append)
    next(documents)
    assert sum(amounts) < 50_000
    list(documents)
    assert sum(amounts) == 500_000 == source_size(Data(str(path)))


def test_broken_byte_in_a_later_piece_is_named_with_its_offset_in_the_file(make_files, monkeypatch):
    content = b"good line\n" * 300 + b"ends in latin-1: " + b"\xe9t\xe9\n"
    path = make_files({"mixed.txt": content}) / "mixed.txt"
    monkeypatch.setattr(formats, "PIECE_BYTES", 1000)
    with pytest.raises(ValueError, match=r"mixed\.txt' is not UTF-8 text \(byte 0xe9 at offset 3017\)"):
        read(path)


@pytest.mark.parametrize("content", [b"\x80" * 50, b"ab\xf0\x9f" * 20])
def test_binary_without_a_line_end_is_refused_piece_by_piece(make_files, monkeypatch, content):
    monkeypatch.setattr(formats, "PIECE_BYTES", 8)
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read(make_files({"a.bin": content}) / "a.bin")


def test_each_line_of_jsonl_is_a_document(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", {"text": "one\ntwo"}, {"text": ""}, {"text": None}, {"n": 1, "text": "🚂"})
    path.write_text("\ufeff" + path.read_text() + "\n  \n" + '{"text": "last, without a line end"}')
    assert read(path) == {"a.jsonl:1": "one\ntwo", "a.jsonl:4": "🚂", "a.jsonl:7": "last, without a line end"}


def test_text_field_chooses(tmp_path):
    assert read(write_jsonl(tmp_path / "a.jsonl", {"text": "no", "body": "yes"}), "body") == {"a.jsonl:1": "yes"}
    assert read(write_parquet(tmp_path / "a.parquet", text=["no"], body=["yes"]), "body") == {"a.parquet:0": "yes"}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"{'text': 'no'}", "line 3: not JSON (column 2: Expecting property name enclosed in double quotes)"),
        (b'{"text": "cut', "line 3: not JSON (column 10: Unterminated string starting)"),
        (b'["text"]', "line 3: not a JSON object with a field 'text'"),
        (b'{"body": "x", "id": 1}', "line 3: no field 'text' (it has 'body', 'id'): choose one with data.text_field"),
        (b"{}", "line 3: no field 'text' (it has no field)"),
        (b'{"text": 5}', "line 3: 'text' is int, not text"),
        (b'{"text": "\xff"}', "line 3: not UTF-8 (byte 0xff at offset 44)"),
        (b"[" * 100_000, "line 3: JSON is nested too deeply"),
    ],
)
def test_bad_line_of_jsonl_is_named(tmp_path, line, complaint):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' * 2 + line + b"\n")
    with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_each_row_of_parquet_is_a_document(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", id=list(range(5)), text=["a", "", "c", None, "e"])
    assert read(path) == {"a.parquet:0": "a", "a.parquet:2": "c", "a.parquet:4": "e"}


def test_progress_of_parquet_ends_at_its_size(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", text=["some text"] * 1001)
    amounts: list[int] = []
    list(read_documents(Data(str(path)), amounts.append))
    assert len(amounts) > 3
    assert sum(amounts) == path.stat().st_size


@pytest.mark.parametrize(
    "options",
    [{}, {"use_dictionary": False}, {"store_schema": False}, {"dictionary_pagesize_limit": 100, "data_page_size": 100}],
)
def test_nested_rows_of_parquet_are_those_of_pyarrow(tmp_path, options):
    """Over row groups of several batches, with dictionaries that are given up in the middle."""
    rng = random.Random(0)

    def message(number):
        content = rng.choice([None, "", "short", "é" * rng.randint(1, 300), f"own {number}"])
        calls = rng.choice([None, [], [{"name": "f", "arguments": [1, None, number]}]])
        return rng.choice([None, {"role": rng.choice(["user", "assistant"]), "content": content, "calls": calls}])

    rows = [
        {"n": n, "messages": rng.choice([None, [], [message(n) for _ in range(3)]]), "share": n / 7, "raw": b"x"}
        for n in range(1500)
    ]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=700, **options)
    found = list(parquet_rows(str(path), ["raw", "messages", "none", "share", "n"]))
    assert found == list(enumerate(pyarrow.parquet.read_table(path).to_pylist()))


def test_parquet_is_read_in_few_batches_for_a_row_group(tmp_path):
    """Each batch copies the texts of the row group so far."""
    path = tmp_path / "a.parquet"
    texts = [str(number) for number in range(20_000)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=10_000)
    amounts: list[int] = []
    assert [row["text"] for _, row in parquet_rows(str(path), ["text"], amounts.append)] == texts
    assert len(amounts) <= 2 * 17
    assert sum(amounts) == path.stat().st_size


def test_bad_parquet_is_refused(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", body=["a"], id=[1])
    with pytest.raises(ValueError, match=r"a\.parquet': no column 'text' \(it has 'body', 'id'\).*data\.text_field"):
        read(path)
    with pytest.raises(ValueError, match=r"a\.parquet', row 0: 'id' is int, not text"):
        read(path, "id")
    path.write_bytes(b"no parquet at all")
    with pytest.raises(ValueError, match=r"^data\.path: '.*a\.parquet': can't be read as Parquet after row 0: [^\n]+$"):
        read(path)
    path.unlink()
    with pytest.raises(ValueError, match="does not exist"):
        read(path)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files_read_as_the_plain_ones(tmp_path, suffix):
    text = "".join(f"line {i}, Zeile {i} für 🚂\n" for i in range(50_000))
    plain = tmp_path / "a.txt"
    plain.write_text(text)
    packed = compress(plain, suffix)
    amounts: list[int] = []
    pieces = list(read_documents(Data(str(packed)), amounts.append))
    assert "".join(piece.text for piece in pieces) == text
    assert len(pieces) > 1
    assert sum(amounts) == packed.stat().st_size
    records = compress(write_jsonl(tmp_path / "b.jsonl", {"text": "one"}, {"text": "two"}), suffix)
    assert list(read(records).values()) == ["one", "two"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", [lambda c: c[:-200], lambda c: b"nothing of the kind", lambda c: c[:40] + c[45:]])
def test_damaged_compressed_file_is_refused(tmp_path, suffix, damage):
    plain = tmp_path / "a.txt"
    plain.write_text("".join(str(i * i) for i in range(10_000)))
    packed = compress(plain, suffix)
    packed.write_bytes(damage(packed.read_bytes()))
    with pytest.raises(ValueError, match=rf"^data\.path: can't read '.*a\.txt{suffix}': [^\n]+$"):
        read(packed)


def test_folder_may_hold_files_of_every_kind(tmp_path):
    (tmp_path / "a.txt").write_text("plain")
    write_jsonl(tmp_path / "b.jsonl", {"text": "line"})
    write_parquet(tmp_path / "c.parquet", text=["row"])
    compress(write_jsonl(tmp_path / "d.ndjson", {"text": "packed line"}), ".gz")
    assert read(tmp_path) == {
        "a.txt": "plain",
        "b.jsonl:1": "line",
        "c.parquet:0": "row",
        "d.ndjson.gz:1": "packed line",
    }


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_source_of_empty_texts_is_refused(tmp_path, name):
    path = tmp_path / name
    if name == "a.jsonl":
        write_jsonl(path, {"text": ""})
    else:
        write_parquet(path, text=pyarrow.array([], pyarrow.string()))
    with pytest.raises(ValueError, match="has no text"):
        read(path)


@pytest.mark.parametrize("name", ["a.parquet", "a.txt.zst"])
def test_missing_package_is_named(make_files, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"need the package pyarrow: pip install 'spurline\[data\]'"):
        read(make_files({name: "x"}) / name)
