import json

import datasets
import pytest

from spurline.config import Data
from spurline.data import check_data
from spurline.data.sources import read_documents, source_size

ROWS = {"text": ["one", "", "three", None], "body": ["a", "b", "c", "d"], "id": [1, 2, 3, 4]}


def texts(path: object, text_field: str = "text") -> dict[str, str]:
    return {document.name: document.text for document in read_documents(Data(str(path), text_field=text_field))}


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict(ROWS).save_to_disk(folder)
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder that `load_dataset` takes, as it takes a name on the hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "hub"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps({"text": f"{split} {i}"}) + "\n" for i in range(3)))
    return folder


def test_saved_folder_gives_a_document_a_row(saved):
    assert texts(saved) == {"0": "one", "2": "three"}
    assert texts(saved, "body") == {"0": "a", "1": "b", "2": "c", "3": "d"}
    assert check_data(Data(str(saved))) == []


def test_progress_counts_rows(saved):
    amounts: list[int] = []
    list(read_documents(Data(str(saved)), amounts.append))
    assert sum(amounts) == source_size(Data(str(saved))) == 4


def test_saved_splits_are_chosen_by_name(tmp_path):
    splits = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    assert texts(tmp_path / "splits") == {"0": "train"}
    assert texts(f"hf://{tmp_path}/splits?split=test") == {"0": "test"}
    with pytest.raises(ValueError, match=r"no split 'validation': choose with hf://.*\?split=, of train, test$"):
        texts(f"hf://{tmp_path}/splits?split=validation")


@pytest.mark.parametrize("streaming", ["", "&streaming=1"])
def test_named_data_set_is_loaded_or_streamed(hub, streaming):
    assert texts(f"hf://{hub}?split=test{streaming}") == {"0": "test 0", "1": "test 1", "2": "test 2"}
    size = source_size(Data(f"hf://{hub}?split=test{streaming}"))
    assert size == (None if streaming else 3)


@pytest.mark.parametrize("streaming", ["", "?streaming=1"])
def test_wrong_column_is_refused(hub, streaming):
    with pytest.raises(ValueError, match=r"no column 'body'.*data\.text_field"):
        texts(f"hf://{hub}{streaming}", "body")


def test_column_that_is_not_text_is_refused(saved):
    with pytest.raises(ValueError, match="row 0: 'id' is int, not text"):
        texts(saved, "id")


def test_data_set_that_cannot_be_loaded_is_refused_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"^data\.path 'hf://.*nowhere': can't read this dataset: [^\n]+$"):
        texts(f"hf://{tmp_path}/nowhere")


@pytest.mark.parametrize("path", ["hf://", "hf://name?splt=train", "hf://name?streaming=yes", "hf://name?split="])
def test_wrong_name_is_found_before_anything_is_loaded(path):
    (problem,) = check_data(Data(path))
    assert problem.startswith(f"data.path '{path}': not a valid dataset name")
    with pytest.raises(ValueError, match="not a valid dataset name"):
        texts(path)
    assert check_data(Data("hf://owner/name?config=en&split=train&streaming=1")) == []


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("spurline.data.hf_datasets.find_spec", lambda name: None)
    assert check_data(Data("hf://name")) == [
        "data.path: Hugging Face datasets need the package datasets: pip install 'spurline[data]'"
    ]
