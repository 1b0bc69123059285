"""Tokenizers that come with the package, and what they were trained on."""

import inspect
import json

from spurline.config import Data
from spurline.data import check_data, open_data, shipped
from spurline.data.formats import Document
from spurline.data.packing import pack
from spurline.data.shipped import shipped_tokenizers, tokenizer_path
from spurline.data.tokenizer import ByteTokenizer, load_tokenizer
from spurline.data.tokenizer_train import without_held_out


def test_the_tokenizer_of_python_source_is_known_by_its_name_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shipped_tokenizers() == ["python_2048"]
    tokenizer = load_tokenizer("python_2048")
    assert (tokenizer.vocab_size, tokenizer.boundary_id) == (2048, 0)
    source = inspect.getsource(shipped) + "# \N{SNOWMAN}\n"
    assert tokenizer.decode(tokenizer.encode(source)) == source
    assert len(source) / len(tokenizer.encode(source)) > 2.5
    (tmp_path / "text.txt").write_text(source)
    data = Data(path="text.txt", tokenizer="python_2048", validation_fraction=0.0)
    assert check_data(data) == []
    assert open_data(data, 16, seed=0).tokenizer.fingerprint == tokenizer.fingerprint


def test_any_other_name_is_a_path(tmp_path):
    assert tokenizer_path("./python_2048") == "./python_2048"
    assert not tokenizer_path("~/t.json").startswith("~")
    (problem,) = check_data(Data(path=str(tmp_path), tokenizer="python_2047"))[-1:]
    assert "'python_2047' does not exist" in problem
    assert "(python_2048)" in problem


def test_held_out_documents_do_not_train_a_tokenizer():
    documents = [Document(f"{number}.txt", f"{number} " * 300) for number in range(50)]
    documents += [Document("50.txt", "one "), Document("50.txt", "document", is_rest=True)]
    kept = without_held_out(documents, 0.1)
    packed = pack(documents, ByteTokenizer(), 8, 0.1)
    held_out = ByteTokenizer().decode(packed.validation._stream_N[:])
    assert 0 < len(held_out) <= 0.1 * sum(len(document.text) for document in documents)
    assert "".join(document.text for document in documents if document not in kept) == held_out


def test_the_shipped_file_is_byte_level_and_has_one_special_token():
    content = json.loads(load_tokenizer("python_2048").content)
    assert content["pre_tokenizer"]["type"] == content["decoder"]["type"] == "ByteLevel"
    assert [token["content"] for token in content["added_tokens"]] == ["<|endoftext|>"]
