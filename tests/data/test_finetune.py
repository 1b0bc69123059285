"""Fine-tuning from end to end: a model of `transformers` learns a task from conversations and is given back.

The task: letters in reverse order and in upper case. Held-out questions are not in the data.
"""

import io
import json
import random
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import transformers
from chats import assistant, make_model, user, write_chats

from spurline.cli import main

NUM_HELD_OUT = 100


class Tuned(NamedTuple):
    run: Path
    out: str
    """What the run printed."""
    questions: list[str]
    """Held-out ones."""


def right_answer(question: str) -> str:
    return question[::-1].upper()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    root = tmp_path_factory.mktemp("finetune")
    make_model(root / "theirs")
    letters = random.Random(0)
    questions = sorted({" ".join(letters.choices("abcdefghij", k=4)) for _ in range(1200)})
    letters.shuffle(questions)
    chats = [{"messages": [user(text), assistant(right_answer(text))]} for text in questions[NUM_HELD_OUT:]]
    write_chats(root / "chats.jsonl", chats)
    options = {
        "checkpoint.initial_load_path": root / "theirs",
        "preset": "finetune",
        "data.kind": "chat",
        "data.path": root / "chats.jsonl",
        "job.dump_folder": root / "run",
        "training.steps": 200,
        "training.seq_len": 64,
        "training.local_batch_size": 8,
        "training.threads": 1,
        "optimizer.lr": 5e-3,
        "metrics.log_interval": 20,
        "metrics.sample_tokens": 8,
    }
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.stdout, "write", lambda text: printed.append(text) or len(text))
        assert main(["train", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]) == 0
    return Tuned(root / "run", "".join(printed), questions[:NUM_HELD_OUT])


def our_answers(run: Path, questions: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    (run.parent / "questions.txt").write_text("\n".join(questions))
    options = ["--prompts_file", str(run.parent / "questions.txt"), "--max_tokens", "16", "--batch_size", "50"]
    assert main(["generate", str(run), "--chat", "--json", "--temperature", "0", *options]) == 0
    return [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]


def their_answers(model: Any, folder: Path, questions: list[str]) -> list[str]:
    """Of a model in `transformers`; all questions have as many tokens, so that nothing is padded."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = tokenizer.apply_chat_template(
        [[user(text)] for text in questions], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = model.generate(**prompts, max_new_tokens=16, do_sample=False)[:, prompts["input_ids"].shape[1] :]
    answers: list[str] = tokenizer.batch_decode(written, skip_special_tokens=True)
    return answers


def test_held_out_questions_are_answered_exactly(tuned: Tuned, capsys: pytest.CaptureFixture[str]) -> None:
    answers = our_answers(tuned.run, tuned.questions, capsys)
    num_right = sum(answer == right_answer(text) for answer, text in zip(answers, tuned.questions, strict=True))
    assert num_right > 0.95 * NUM_HELD_OUT, f"{num_right} of {NUM_HELD_OUT}"


def test_the_export_answers_the_same_in_transformers(
    tuned: Tuned, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "to-hf", str(tuned.run), str(tmp_path / "back")]) == 0
    capsys.readouterr()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    questions = tuned.questions[:40]
    assert their_answers(model, tmp_path / "back", questions) == our_answers(tuned.run, questions, capsys)


@pytest.fixture(scope="module")
def adapted(tuned: Tuned) -> Tuned:
    """Adapters on the tuned model, exported: the letters in their own order now."""
    root = tuned.run.parent
    assert main(["convert", "to-hf", str(tuned.run), str(root / "base")]) == 0
    chats = [json.loads(line)["messages"][0]["content"] for line in (root / "chats.jsonl").read_text().splitlines()]
    write_chats(root / "same_order.jsonl", [{"messages": [user(text), assistant(text.upper())]} for text in chats])
    options = {
        "lora.base": root / "base",
        "lora.rank": 1,
        "preset": "finetune",
        "data.kind": "chat",
        "data.path": root / "same_order.jsonl",
        "job.dump_folder": root / "adapted",
        "training.steps": 300,
        "training.seq_len": 64,
        "training.local_batch_size": 8,
        "training.threads": 1,
        "optimizer.lr": 1e-2,
        "metrics.log_interval": 20,
        "metrics.sample_tokens": 8,
    }
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.stdout, "write", lambda text: printed.append(text) or len(text))
        assert main(["train", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]) == 0
    return Tuned(root / "adapted", "".join(printed), tuned.questions)


@pytest.mark.slow
def test_adapters_answer_another_kind_of_question_exactly(adapted: Tuned, capsys: pytest.CaptureFixture[str]) -> None:
    (share,) = re.findall(r"trained: [0-9.]+M parameters \(([0-9.]+)%\)", adapted.out)
    assert float(share) < 5
    answers = our_answers(adapted.run, adapted.questions, capsys)
    num_right = sum(answer == text.upper() for answer, text in zip(answers, adapted.questions, strict=True))
    assert num_right > 0.95 * NUM_HELD_OUT, f"{num_right} of {NUM_HELD_OUT}"


@pytest.mark.slow
def test_exported_adapters_answer_the_same_in_peft(
    adapted: Tuned, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "to-peft", str(adapted.run), str(tmp_path / "adapter")]) == 0
    capsys.readouterr()
    base = adapted.run.parent / "base"
    model = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter"
    )
    questions = adapted.questions[:40]
    assert their_answers(model, base, questions) == our_answers(adapted.run, questions, capsys)


def test_the_run_tells_what_became_of_the_data_and_shows_answers(tuned: Tuned) -> None:
    (sample,) = [json.loads(line) for line in (tuned.run / "samples.jsonl").read_text().splitlines()]
    turns = [line.partition(": ")[::2] for line in sample["text"].splitlines() if line]
    assert [who for who, _ in turns] == ["user", "assistant", "in the data"] * 4
    assert all(right_answer(turns[i][1]) == turns[i + 2][1] for i in range(0, 12, 3))
    assert sample["text"] in tuned.out
    assert "template" in tuned.out
    assert "which marks answers" in tuned.out
    assert "assistant: " in (tuned.run / "report.html").read_text()


def test_one_question_from_standard_input(
    tuned: Tuned, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a b c d\n"))
    assert main(["generate", str(tuned.run), "--chat", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "D C B A\n"


def test_a_conversation_on_a_terminal(
    tuned: Tuned, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = iter(["j i h g", "/new", "word " * 40, "a b c d"])

    def ask(prompt: str) -> str:
        try:
            return next(questions)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", ask)
    assert main(["generate", str(tuned.run), "--chat", "--temperature", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "G H I J"
    assert lines[2:4] == ["(the question is longer than the context of 64 tokens: shorten it)", "D C B A"]


def test_routing_of_plain_text_and_of_conversations(
    tuned: Tuned, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "words.txt").write_text("a b c d " * 20)
    page = ["--out", str(tmp_path / "page.html")]
    assert main(["routing", str(tuned.run), str(tuned.run.parent / "chats.jsonl"), "--tokens", "200", *page]) == 0
    assert main(["routing", str(tuned.run), str(tmp_path / "words.txt"), "--kind", "text", *page]) == 0
    capsys.readouterr()
    assert main(["routing", str(tuned.run), str(tmp_path / "words.txt"), *page]) == 2
    assert "is neither JSONL nor Parquet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompt", "a", "--system", "b"), "--system needs --chat"),
        ((), "give either --prompt or --prompts_file"),
    ],
)
def test_options_that_do_not_go_together(
    tuned: Tuned, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(tuned.run), *options]) == 2
    assert message in capsys.readouterr().err
