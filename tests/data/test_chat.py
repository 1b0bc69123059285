"""Chat data: masks against `transformers`, packing, splits, and what is refused or left out.

B windows of L tokens.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from chats import CHATS, FORGETFUL, MARKED, TOOLS, UNMARKED, assistant, tokenizer_folder, user, write_chats

from spurline.config import Data
from spurline.data import check_data, open_data
from spurline.data.batch import IGNORE_INDEX
from spurline.data.chat_builtin import BUILT_IN
from spurline.data.chat_samples import ChatFormat, chat_format, encode
from spurline.data.chat_template import ChatTemplate
from spurline.data.conversations import read_conversation
from spurline.data.tokenizer import ByteTokenizer
from spurline.train.validation import count_text_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tokenizer_folder(tmp_path / "tokenizer")


def samples_of(chat: ChatFormat, record: dict[str, Any]) -> list[Any]:
    return chat.samples(read_conversation(record, "name"))


@pytest.mark.parametrize("template", ["", *BUILT_IN])
def test_tokens_and_mask_are_those_of_transformers(folder: Path, template: str) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    if template:
        theirs.chat_template = BUILT_IN[template]
    ours = chat_format(Data(tokenizer=str(folder), chat_template=template, kind="chat"))
    for record in CHATS:
        expected = theirs.apply_chat_template(
            record["messages"], record.get("tools"), return_dict=True, return_assistant_tokens_mask=True
        )
        (sample,) = samples_of(ours, record)
        assert sample.tokens_N.tolist() == expected["input_ids"]
        assert sample.is_learned_N.tolist() == [bool(bit) for bit in expected["assistant_masks"]]
        assert 0 < sample.is_learned_N.sum() < len(sample.tokens_N) or template == "plain"
        *before, _ = record["messages"]
        prompt = theirs.apply_chat_template(before, record.get("tools"), add_generation_prompt=True)["input_ids"]
        assert ours.prompt(before, record.get("tools")).tolist() == prompt


def test_answers_are_derived_where_the_template_marks_none(folder: Path) -> None:
    marked = chat_format(Data(tokenizer=str(folder)))
    (folder / "chat_template.jinja").write_text(UNMARKED)  # comes before that of tokenizer_config.json
    derived = chat_format(Data(tokenizer=str(folder)))
    assert not derived.template.marks_generation
    newline = encode(derived.tokenizer, "\n", []).tokens_N[0]
    for record in CHATS:
        (expected,), (found,) = samples_of(marked, record), samples_of(derived, record)
        assert found.tokens_N.tolist() == expected.tokens_N.tolist()
        # What is derived has the line break behind the turn too.
        more = np.flatnonzero(found.is_learned_N & ~expected.is_learned_N)
        assert (found.is_learned_N >= expected.is_learned_N).all()
        assert set(found.tokens_N[more].tolist()) <= {newline}
        assert len(more) == sum(message["role"] == "assistant" for message in record["messages"])


def test_each_answer_is_a_sample_where_earlier_turns_change(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(FORGETFUL)
    chat = chat_format(Data(tokenizer=str(folder)))
    record = {"messages": [user("a"), assistant("b", reasoning="hm"), user("c"), assistant("d", thinking="so")]}
    first, second = samples_of(chat, record)

    def learned(sample: Any) -> str:
        return chat.tokenizer._tokenizer.decode(
            sample.tokens_N[sample.is_learned_N].tolist(), skip_special_tokens=False
        )

    assert learned(first) == "<think>hm</think>b<|im_end|>\n"
    assert learned(second) == "<think>so</think>d<|im_end|>\n"
    whole = chat.tokenizer._tokenizer.decode(second.tokens_N.tolist(), skip_special_tokens=False)
    assert whole.startswith("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n")
    assert chat.num_split == 1


def test_loss_on_all_and_pairs_without_a_template(folder: Path) -> None:
    record = {"prompt": "2+2=", "completion": "4"}
    everything = chat_format(Data(tokenizer=str(folder), loss_on="all"))
    assert samples_of(everything, record)[0].is_learned_N.all()

    plain = chat_format(Data(tokenizer=str(folder), chat_template="none"))
    (sample,) = samples_of(plain, record)
    boundary = plain.tokenizer.boundary_id
    assert sample.tokens_N.tolist() == [
        boundary,
        *plain.tokenizer.encode("2+2="),
        *plain.tokenizer.encode("4"),
        boundary,
    ]
    assert sample.is_learned_N.tolist() == [False] * (len(sample.tokens_N) - 2) + [True] * 2
    with pytest.raises(ValueError, match="is for 'prompt' and 'completion'"):
        samples_of(plain, CHATS[0])


def test_answers_of_a_prompt_are_not_learned(folder: Path) -> None:
    chat = chat_format(Data(tokenizer=str(folder)))
    (sample,) = samples_of(
        chat, {"prompt": [user("a"), assistant("given"), user("b")], "completion": [assistant("written")]}
    )
    text = chat.tokenizer._tokenizer.decode(sample.tokens_N[sample.is_learned_N].tolist(), skip_special_tokens=False)
    assert text.strip() == "written<|im_end|>"


def test_bytes_with_a_built_in_template() -> None:
    chat = chat_format(Data(chat_template="chatml"))
    (sample,) = samples_of(chat, {"messages": [user("a \N{SNOWMAN}"), assistant("b \N{SNOWMAN}")]})
    assert bytes(sample.tokens_N[sample.is_learned_N].astype(np.uint8)).decode() == "b \N{SNOWMAN}<|im_end|>"
    assert chat.cut("b<|im_end|>\n<|im_start|>user") == "b"


def test_a_template_whose_ends_of_turns_are_no_tokens_is_mentioned(folder: Path, tmp_path: Path) -> None:
    told = "chat: answers end with the text '<|eot_id|>', for which the tokenizer has no token"
    assert told in open_data(data_of(tmp_path, chats(5), chat_template="llama3"), 256, seed=0).notes
    assert not any("answers end" in line for line in open_data(data_of(tmp_path, chats(5)), 64, seed=0).notes)


def test_a_boundary_ends_what_the_template_does_not_end() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}", {}, "t")
    (sample,) = samples_of(ChatFormat(ByteTokenizer(), template), {"messages": [user("a"), assistant("b")]})
    assert sample.tokens_N[-1] == ByteTokenizer.boundary_id
    assert sample.is_learned_N[-1]


def chats(count: int) -> list[dict[str, Any]]:
    return [{"messages": [user(f"question {i}"), assistant("answer " * (i % 7) + f"{i}")]} for i in range(count)]


def data_of(tmp_path: Path, records: list[dict[str, Any]], **options: Any) -> Data:
    path = write_chats(tmp_path / "chats.jsonl", records)
    return Data(**{"path": str(path), "kind": "chat", "tokenizer": str(tmp_path / "tokenizer"), **options})


def test_windows_hold_every_sample_once_and_apart(folder: Path, tmp_path: Path) -> None:
    data = data_of(tmp_path, chats(40), validation_fraction=0.2)
    opened = open_data(data, 64, seed=3)
    chat = chat_format(data)
    expected = sorted(tuple(samples_of(chat, record)[0].tokens_N.tolist()) for record in chats(40))
    assert opened.validation is not None
    found = []
    for windows in (opened.train.windows, opened.validation.windows):
        batch = windows.batch(range(len(windows)))
        for token_L, label_L, document_L in zip(batch.tokens_BL, batch.labels_BL, batch.documents_BL, strict=True):
            assert (document_L.diff() >= 0).all()
            for number in document_L.unique().tolist():
                inside = document_L == number
                labels = label_L[inside]
                if (labels == IGNORE_INDEX).all():  # padding
                    assert number == document_L.max()
                    continue
                found.append((*token_L[inside].tolist(), labels[-1].item() if labels[-1] >= 0 else None))
    # The line break behind the last turn is not learned, so it is no label.
    assert sorted(tokens[:-1] for tokens in found) == [tokens[:-1] for tokens in expected]
    assert opened.num_tokens == sum(map(len, expected))
    assert opened.num_documents == 40


def test_labels_are_the_next_tokens_of_answers(folder: Path, tmp_path: Path) -> None:
    data = data_of(tmp_path, chats(1), validation_fraction=0.0)
    opened = open_data(data, 48, seed=0)
    (sample,) = samples_of(chat_format(data), chats(1)[0])
    batch = opened.train.windows.batch([0])
    expected = np.where(sample.is_learned_N[1:], sample.tokens_N[1:].astype(np.int64), IGNORE_INDEX)
    size = len(sample.tokens_N) - 1
    assert batch.tokens_BL[0, :size].tolist() == sample.tokens_N[:-1].tolist()
    assert batch.labels_BL[0, :size].tolist() == expected.tolist()
    assert (batch.labels_BL[0, size:] == IGNORE_INDEX).all()
    assert opened.validation is None


def test_batches_do_not_depend_on_how_they_are_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(one) + "\n" for one in chats(60)[40:]))
    data = data_of(tmp_path, chats(40))
    mixed = Data(**{**vars(data), "path": f"{data.path},{tmp_path / 'more.jsonl'}", "weights": "1,3"})
    first, again = open_data(mixed, 64, seed=3).train, open_data(mixed, 64, seed=3).train
    whole = first.batch(0, 8)
    parts = [again.batch(start, 2) for start in (6, 0, 4, 2)]  # as other ranks, or a run that resumes, read them
    assert whole.tokens_BL[6:].tolist() == parts[0].tokens_BL.tolist()
    assert whole.labels_BL[:2].tolist() == parts[1].labels_BL.tolist()
    assert whole.documents_BL[4:6].tolist() == parts[2].documents_BL.tolist()
    sizes = first.windows.part_sizes
    from_second = sum(i >= sizes[0] for i in first.sample_ids(0, 400))
    assert abs(from_second - 300) <= 2


def test_held_out_questions_come_with_their_answers(folder: Path, tmp_path: Path) -> None:
    opened = open_data(data_of(tmp_path, chats(40), validation_fraction=0.2), 64, seed=0)
    assert opened.questions is not None
    assert 1 <= len(opened.questions.questions) <= 4
    for question in opened.questions.questions:
        number = int(question.text.removeprefix("question "))
        assert question.answer == chats(40)[number]["messages"][1]["content"]
        assert question.prompt == opened.questions.chat.prompt([user(question.text)]).tolist()


def test_long_samples_are_cut_or_skipped_and_counted(folder: Path, tmp_path: Path) -> None:
    long = {"messages": [user("short"), assistant("word " * 200)]}
    hopeless = {"messages": [user("word " * 200), assistant("short")]}
    records = [*chats(10), long, hopeless]
    cut = open_data(data_of(tmp_path, records), 64, seed=0)
    assert "chat: 1 samples were cut to training.seq_len 64" in cut.notes
    assert "chat: left out 1 longer than training.seq_len" in cut.notes
    assert cut.num_documents == 11
    skipped = open_data(data_of(tmp_path, records, long_samples="skip"), 64, seed=0)
    assert "chat: left out 2 longer than training.seq_len" in skipped.notes
    assert skipped.num_documents == 10


BAD = [
    ({"messages": [assistant("b")]}, "roles out of order: message 0, 'assistant', is the first"),
    ({"messages": [user("a"), user("b"), assistant("c")]}, "roles out of order: message 1, 'user', follows 'user'"),
    ({"messages": [user("a")]}, "roles out of order: the last message is of 'user', and nobody answers"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0] has the role 'robot', which is none of system, "),
    ({"messages": [{"role": "user"}]}, "messages[0] has no 'content'"),
    ({"messages": []}, "'messages' is not a list of messages"),
    ({"messages": "text"}, "'messages' is not a list of messages"),
    ({"text": "hello"}, "neither 'messages' nor 'prompt' and 'completion' (it has 'text')"),
    ({"prompt": "a", "completion": 7}, "'completion' is not a list of messages"),
    ({"messages": [user("a"), assistant("b")], "tools": "{"}, "'tools' is text, but not JSON"),
    ({"messages": [user("a"), assistant("b")], "tools": {}}, "'tools' is not a list"),
    ([1, 2], "not a JSON object with a field 'messages'"),
]


@pytest.mark.parametrize(("record", "message"), BAD)
def test_a_record_that_is_no_conversation_is_one_line_or_counted(
    folder: Path, tmp_path: Path, record: Any, message: str
) -> None:
    records = [*chats(5), record]
    with pytest.raises(ValueError, match=r"chats\.jsonl', line 6: ") as error:
        open_data(data_of(tmp_path, records), 64, seed=0)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    opened = open_data(data_of(tmp_path, records, invalid_samples="skip"), 64, seed=0)
    assert opened.num_documents == 5
    assert opened.notes[-1].startswith("chat: left out 1 because ")


def test_a_template_that_raises_is_one_line_or_counted(folder: Path, tmp_path: Path) -> None:
    picky = "{% if messages[0].content == 'question 3' %}{{ raise_exception('not three') }}{% endif %}" + MARKED
    (folder / "chat_template.jinja").write_text(picky)
    with pytest.raises(ValueError, match=r"line 4: the chat template of .* raised: not three") as error:
        open_data(data_of(tmp_path, chats(5)), 64, seed=0)
    assert "\n" not in str(error.value)
    opened = open_data(data_of(tmp_path, chats(5), invalid_samples="skip"), 64, seed=0)
    assert opened.num_documents == 4
    assert "left out 1 because the chat template of" in opened.notes[-1]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ ''.__class__.__mro__ }}", "raised"),
        ("{{ messages.append(1) }}", "raised"),
        ("{{ 'a' * 1000000000 }}", "raised: operator \\* of large values"),
        ("{{ 9 ** 999999 }}", "raised: operator \\*\\* of large values"),
        ("{{ messages[0].nothing.nothing }}", "raised"),
        ("{% for m in messages %}", "is not valid"),
    ],
)
def test_templates_are_sandboxed_and_say_what_is_wrong(template: str, message: str) -> None:
    with pytest.raises(
        ValueError, match=f"the chat template of t .*{message}|the chat template of t {message}"
    ) as error:
        ChatTemplate(template, {}, "t").render([user("a")])
    assert "\n" not in str(error.value)


def test_loop_controls_dates_and_json_are_there() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content | tojson }}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ tools | tojson(indent=1) | length }}"
    )
    text, spans = ChatTemplate(source, {}, "t").render([user("<a> \N{SNOWMAN}"), user("b")], TOOLS)
    assert text == f'"<a> \N{SNOWMAN}"4{len(json.dumps(TOOLS, indent=1))}'
    assert spans == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has no chat template: choose one with data.chat_template (chatml, llama3, plain, none or a file)"),
        ({"tokenizer": ""}, "the byte tokenizer has no chat template: choose one"),
        ({"chat_template": "chatlm"}, "data.chat_template 'chatlm' is not a file, nor one of chatml"),
    ],
)
def test_a_missing_template_is_found_before_the_data_is_read(
    folder: Path, tmp_path: Path, options: dict[str, str], message: str
) -> None:
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    (problem,) = check_data(data_of(tmp_path, chats(2), **options))
    assert message in problem


def test_rows_of_tables_are_conversations_too(folder: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(chats(12)), tmp_path / "chats.parquet")
    of_table = open_data(data_of(tmp_path, [], path=str(tmp_path / "chats.parquet")), 64, seed=0)
    of_lines = open_data(data_of(tmp_path, chats(12)), 64, seed=0)
    assert (of_table.num_documents, of_table.num_tokens) == (of_lines.num_documents, of_lines.num_tokens)


def test_files_without_records_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match="is neither JSONL nor Parquet"):
        open_data(data_of(tmp_path, [], path=str(tmp_path / "notes.txt")), 64, seed=0)
    with pytest.raises(ValueError, match="has no conversation to learn from"):
        open_data(data_of(tmp_path, [{"text": "a"}], invalid_samples="skip"), 64, seed=0)


def test_conversations_as_text_are_refused_with_the_option_for_them(folder: Path, tmp_path: Path) -> None:
    data = data_of(tmp_path, chats(2), kind="text")
    with pytest.raises(ValueError, match=r"conversations are read with --data\.kind chat, and are not prepared"):
        open_data(data, 64, seed=0)


def test_only_answers_count_as_text_of_held_out_conversations(tmp_path: Path, folder: Path) -> None:
    answers = [f"answer \N{SNOWMAN} number {i}" for i in range(40)]
    chats = [{"messages": [user(f"question {i}?"), assistant(answer)]} for i, answer in enumerate(answers)]
    path = write_chats(tmp_path / "chats.jsonl", chats)
    data = open_data(Data(path=str(path), kind="chat", tokenizer=str(folder), validation_fraction=0.2), 64, seed=0)
    assert data.validation is not None
    token_bytes_V = torch.from_numpy(data.tokenizer.token_bytes)
    (batch,) = data.validation.batches(10**6, 1)
    learned = batch.labels_BL[batch.labels_BL != IGNORE_INDEX]
    text = data.tokenizer.decode(learned)  # without <|im_end|>, which ends each answer
    assert set(text.split("answer")) <= {"", *(answer.removeprefix("answer") for answer in answers)}
    assert count_text_bytes(batch.labels_BL, token_bytes_V) == len(text.encode()) > 0
