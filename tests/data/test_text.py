"""Several paths as one data set."""

import json
from collections import Counter

import pytest
import torch

from spurline.config import Data
from spurline.data import check_data, open_data, text
from spurline.data.formats import Document
from spurline.data.packing import document_ids
from spurline.data.prepare import prepare
from spurline.data.tokenizer import ByteTokenizer
from spurline.data.tokenizer_train import save_tokenizer, train_bpe

SEQ_LEN = 16


@pytest.fixture
def paths(tmp_path):
    """Three sources of one letter each: a file, a JSONL file and prepared data."""
    (tmp_path / "a.txt").write_text("a" * 4000)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": "b" * 40}) + "\n" for _ in range(50)))
    (tmp_path / "c.txt").write_text("c" * 1000)
    prepare([Data(str(tmp_path / "c.txt"))], str(tmp_path / "c"), ByteTokenizer())
    return [str(tmp_path / name) for name in ("a.txt", "b.jsonl", "c")]


def letters(data: Data, start: int, count: int, seed: int = 0) -> Counter:
    train = open_data(data, SEQ_LEN, seed).train
    return Counter(chr(token) for token in train.batch(start, count).tokens_BL[:, -1].tolist() if token < 256)


def test_weights_decide_how_often_each_path_is_read(paths):
    data = Data(",".join(paths), weights="1, 2.5,0.5", validation_fraction=0)
    for start in (0, 1234, 10**9):
        found = letters(data, start, 400)
        assert found["a"] == pytest.approx(100, abs=2)
        assert found["c"] == pytest.approx(50, abs=2)


def test_without_weights_an_epoch_has_every_window_of_every_path_once(paths):
    data = open_data(Data(",".join(paths), validation_fraction=0), SEQ_LEN, seed=0)
    sizes = [len(open_data(Data(path, validation_fraction=0), SEQ_LEN, seed=0).train.windows) for path in paths]
    num_windows = len(data.train.windows)
    assert num_windows == sum(sizes)
    assert sorted(data.train.sample_ids(num_windows, num_windows)) == list(range(num_windows))
    half = Counter(
        next(i for i in range(3) if sample_id < sum(sizes[: i + 1]))
        for sample_id in data.train.sample_ids(0, num_windows // 2)
    )
    assert [half[i] for i in range(3)] == pytest.approx([size / 2 for size in sizes], abs=2)


def test_totals_and_validation_are_of_all_paths(paths):
    data = open_data(Data(",".join(paths), validation_fraction=0.1), SEQ_LEN, seed=0)
    assert data.num_documents == 1 + 50 + 1
    assert data.num_tokens == 4001 + 50 * 41 + 1001
    assert data.validation is not None
    held_out = torch.cat([batch.tokens_BL for batch in data.validation.batches(4, 1000)])
    assert {chr(token) for token in held_out.unique().tolist() if token < 256} == {"a", "b", "c"}
    assert len(held_out) == pytest.approx(0.1 * (len(held_out) + len(data.train.windows)), rel=0.1)


def test_weight_of_a_path_is_shared_as_its_sources_were_weighted(paths, tmp_path):
    sources = [Data(str(tmp_path / name)) for name in ("a.txt", "c.txt")]
    prepare(sources, str(tmp_path / "mix"), ByteTokenizer(), weights=[1, 3])
    found = letters(Data(f"{paths[1]},{tmp_path}/mix", weights="1,1", validation_fraction=0), 0, 800)
    assert found["a"] == pytest.approx(100, abs=2)
    assert found["c"] == pytest.approx(300, abs=2)


def test_window_never_goes_from_one_source_to_another(paths):
    data = open_data(Data(",".join(paths), validation_fraction=0), SEQ_LEN, seed=0)
    batch = data.train.batch(0, len(data.train.windows))
    for row in torch.cat([batch.tokens_BL, batch.labels_BL[:, -1:]], dim=1):
        assert len({token for token in row.tolist() if token < 256}) == 1


def test_path_with_a_comma_that_exists_is_one_path(tmp_path):
    (tmp_path / "a,b.txt").write_text("text " * 100)
    data = Data(str(tmp_path / "a,b.txt"))
    assert check_data(data) == []
    assert open_data(data, SEQ_LEN, seed=0).num_documents == 1


def test_problems_of_all_paths_are_told_at_once(paths, tmp_path):
    data = Data(f"{tmp_path}/no1,{paths[0]},{tmp_path}/no2", weights="1,2", tokenizer=f"{tmp_path}/no3")
    first, second, weights, tokenizer = check_data(data)
    assert "no1' does not exist" in first
    assert "no2' does not exist" in second
    assert weights == "data.weights has 2 numbers, but data.path has 3 paths"
    assert "no3' does not exist" in tokenizer
    (problem,) = check_data(Data(f"{paths[0]},,{paths[1]}"))
    assert "empty path between commas" in problem
    with pytest.raises(ValueError, match=r"data\.weights has 1 numbers"):
        open_data(Data(f"{paths[0]},{paths[1]}", weights="1"), SEQ_LEN, seed=0)


@pytest.mark.parametrize("weights", ["0,1", "-1,2", "a,b", "1,,2", "1/0", "nan"])
def test_wrong_weights_are_refused(weights):
    (problem,) = Data(weights=weights).problems()
    assert problem.startswith("weights must be comma-separated positive numbers")


def test_path_too_short_for_a_window_is_named(paths, tmp_path):
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(ValueError, match=r"^data\.path .*short\.txt has 6 tokens, .* needs 17"):
        open_data(Data(f"{paths[0]},{tmp_path}/short.txt"), SEQ_LEN, seed=0)


def test_text_is_tokenized_as_the_prepared_data_beside_it(paths, tmp_path):
    tokenizer = train_bpe([Document("x", "some other words " * 9)], 300)
    save_tokenizer(tokenizer, str(tmp_path / "t.json"))
    prepare([Data(paths[0])], str(tmp_path / "bpe"), tokenizer)
    data = open_data(Data(f"{paths[1]},{tmp_path}/bpe"), SEQ_LEN, seed=0)
    assert data.tokenizer.fingerprint == tokenizer.fingerprint
    with pytest.raises(ValueError, match="was prepared with a different tokenizer than that of the other data"):
        open_data(Data(f"{tmp_path}/bpe,{paths[2]}"), SEQ_LEN, seed=0)


def test_large_text_is_mentioned_on_the_first_rank_only(paths, monkeypatch, capsys):
    open_data(Data(paths[0]), SEQ_LEN, seed=0)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(text, "LARGE_BYTES", 3000)
    open_data(Data(",".join(paths)), SEQ_LEN, seed=0)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"`spurline data prepare {paths[0]} --out FOLDER`" in line
    monkeypatch.setenv("RANK", "1")
    open_data(Data(paths[0]), SEQ_LEN, seed=0)
    assert capsys.readouterr().err == ""


def test_document_ids_say_which_tokens_may_attend_to_each_other(paths):
    data = open_data(Data(paths[1], validation_fraction=0), SEQ_LEN, seed=0)
    tokens_BL = data.train.batch(0, 100).tokens_BL
    ids_BL = document_ids(tokens_BL, data.tokenizer.boundary_id)
    assert ids_BL.shape == tokens_BL.shape
    for tokens_L, ids_L in zip(tokens_BL.tolist(), ids_BL.tolist(), strict=True):
        document = 0
        for token, document_id in zip(tokens_L, ids_L, strict=True):
            document += token == 256
            assert document_id == document
    assert ids_BL.max() == 1
    assert (document_ids(tokens_BL.numpy(), 256) == ids_BL.numpy()).all()
