"""Parts that several machines prepare, joined, against the preparation on one machine."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from spurline.config import Data
from spurline.data import prepare as module
from spurline.data.parts import Part, read_part
from spurline.data.prepare import prepare
from spurline.data.prepare_parts import SUFFIX, join_parts, part_folder, prepare_part
from spurline.data.sources import read_documents
from spurline.data.tokenizer import ByteTokenizer, Tokenizer
from spurline.data.tokenizer_file import FileTokenizer
from spurline.data.tokenizer_train import save_tokenizer, train_bpe


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several batches and shards in a few kilobytes, and files in several pieces."""
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 1000)
    monkeypatch.setattr(module, "SHARD_TOKENS", 5000)
    monkeypatch.setattr("spurline.data.formats.PIECE_BYTES", 700)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Small text files, a large one, lines and compressed lines, with empty files between."""
    text = tmp_path / "text"
    text.mkdir()
    for i in range(20):
        (text / f"{i}.txt").write_text(f"Document {i} für 🚂. " * (i % 7) + "\n" * (i % 2))
    (text / "large.txt").write_text("\n".join(f"line {i} of a large file" for i in range(400)))
    lines = "".join(json.dumps({"text": f"page {i} " * (i % 30)}) + "\n" for i in range(120))
    (text / "lines.jsonl").write_text(lines)
    (text / "packed.jsonl.gz").write_bytes(gzip.compress(lines.replace("page", "packed").encode()))
    return text


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def sources_of(folder: Path) -> list[Data]:
    return [Data(path=str(folder)), Data(path=str(folder / "lines.jsonl"))]


def prepare_all(sources: list[Data], out: Path, total: int, tokenizer: Tokenizer) -> None:
    for number in range(total, 0, -1):
        prepare_part(sources, str(out), Part(number, total), tokenizer)


@pytest.mark.parametrize("total", [1, 2, 5, 16])
def test_every_document_is_in_one_part_and_parts_are_in_order(folder: Path, total: int) -> None:
    data = Data(path=str(folder))
    parts = [list(read_part(data, Part(number, total))) for number in range(1, total + 1)]
    assert [document for part in parts for document in part] == list(read_documents(data))


def test_one_large_file_is_shared_by_all_parts(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": f"page {i} " * 20}) + "\n" for i in range(20_000)))
    data = Data(path=str(path))
    sizes = [len(list(read_part(data, Part(number, 4)))) for number in range(1, 5)]
    assert sum(sizes) == 20_000
    assert min(sizes) > 0.8 * max(sizes)


@pytest.mark.parametrize(("total", "bpe"), [(1, False), (3, False), (50, False), (4, True)])
def test_joined_parts_are_the_bytes_of_one_machine(folder: Path, tmp_path: Path, total: int, bpe: bool) -> None:
    tokenizer: Tokenizer = ByteTokenizer()
    if bpe:
        trained = train_bpe(read_documents(Data(path=str(folder))), vocab_size=300)
        save_tokenizer(trained, str(tmp_path / "tokenizer"))
        tokenizer = FileTokenizer.load(str(tmp_path / "tokenizer"))
    sources = sources_of(folder)
    prepare_all(sources, tmp_path / "joined", total, tokenizer)
    index = join_parts(str(tmp_path / "joined"))
    assert index == prepare(sources, str(tmp_path / "whole"), tokenizer)
    assert content(tmp_path / "joined") == content(tmp_path / "whole")
    assert len(index.sources[0].shards) > 1


def test_workers_change_nothing(folder: Path, tmp_path: Path) -> None:
    for name, workers in (("one", 1), ("two", 2)):
        prepare_part(sources_of(folder), str(tmp_path / name), Part(2, 3), ByteTokenizer(), num_workers=workers)
    one, two = (Path(part_folder(str(tmp_path / name), Part(2, 3))) for name in ("one", "two"))
    assert content(one) == content(two)


@pytest.fixture
def parts(folder: Path, tmp_path: Path) -> Path:
    """Three parts, ready to be joined into the folder that is returned."""
    prepare_all(sources_of(folder), tmp_path / "out", 3, ByteTokenizer())
    return tmp_path / "out"


def refusal(out: Path) -> str:
    """Why parts can't be joined; nothing is written then."""
    with pytest.raises(ValueError, match=r"\w") as error:
        join_parts(str(out))
    assert not out.exists()
    assert "\n" not in str(error.value)
    return str(error.value).replace(f"{out}{SUFFIX}", "PARTS")


def test_missing_parts_are_named(parts: Path) -> None:
    shutil.rmtree(part_folder(str(parts), Part(2, 3)))
    assert refusal(parts) == "'PARTS': part 2 is missing of 3"
    shutil.rmtree(part_folder(str(parts), Part(1, 3)))
    assert refusal(parts) == "'PARTS': parts 1, 2 are missing of 3"
    shutil.rmtree(f"{parts}{SUFFIX}")
    assert refusal(parts).startswith("'PARTS' has no parts: run `spurline data prepare SOURCE --out ")


def test_parts_of_another_number_are_refused(parts: Path, folder: Path) -> None:
    prepare_part(sources_of(folder), str(parts), Part(1, 4), ByteTokenizer())
    assert refusal(parts) == "'PARTS' has parts of 3 and of 4: remove those of all but one"


def replaced(parts: Path, sources: list[Data]) -> None:
    shutil.rmtree(part_folder(str(parts), Part(2, 3)))
    prepare_part(sources, str(parts), Part(2, 3), ByteTokenizer())


def test_parts_with_other_options_are_refused(parts: Path, folder: Path) -> None:
    replaced(parts, [Data(path=str(folder), pattern="*.txt"), Data(path=str(folder / "lines.jsonl"), pattern="*.txt")])
    assert refusal(parts) == "part 2 was prepared with other --pattern than part 1: prepare it again"
    replaced(parts, sources_of(folder)[:1])
    assert refusal(parts) == "part 2 was prepared with other sources than part 1: prepare it again"


def test_parts_of_data_that_changed_are_refused(parts: Path, folder: Path) -> None:
    (folder / "new.txt").write_text("new")
    replaced(parts, sources_of(folder))
    told = f"{str(folder)!r} had other files when part 2 was prepared than when part 1 was: prepare all parts again"
    assert refusal(parts) == told


def test_damaged_and_renamed_parts_are_refused(parts: Path) -> None:
    folder = Path(part_folder(str(parts), Part(2, 3)))
    whole = (folder / "source0.tokens").read_bytes()
    (folder / "source0.tokens").write_bytes(whole[:-1] + b"\1")
    assert refusal(parts).endswith("is damaged: its checksum differs from the index: prepare this part again")
    (folder / "source0.tokens").write_bytes(whole)
    shutil.rmtree(part_folder(str(parts), Part(3, 3)))
    shutil.copytree(folder, part_folder(str(parts), Part(3, 3)))
    assert refusal(parts) == "'PARTS/000003-of-000003' is part 2 of 3: it was renamed"


@pytest.mark.parametrize("text", ["", "3", "a/b", "1/2/3", "-1/3"])
def test_part_is_two_numbers(text: str) -> None:
    with pytest.raises(ValueError, match="must be a part and the number of parts, such as 3/16"):
        Part.parse(text)


@pytest.mark.parametrize("text", ["0/3", "4/3", "1/0"])
def test_parts_count_from_one(text: str) -> None:
    with pytest.raises(ValueError, match="parts are counted from 1 to"):
        Part.parse(text)
