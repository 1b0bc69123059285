"""Runs on chat data through `spurline train`: resumed ones, and what is wrong before they start."""

import json
from pathlib import Path

import pytest
from chats import assistant, user, write_chats

from spurline.cli import main

MODEL = (
    "--config",
    "qwen3_debugmodel_moe",
    "--model.dim",
    "16",
    "--model.head_dim",
    "8",
    "--model.moe.hidden_dim",
    "8",
)
TRAINING = ("--training.seq_len", "96", "--training.local_batch_size", "2", "--training.threads", "1")
METRICS = ("--metrics.sample_tokens", "0", "--metrics.no_report", "--metrics.no_tensorboard")
CHAT = ("--data.kind", "chat", "--data.path", "chats.jsonl", "--data.chat_template", "plain")
COMMON = (*MODEL, *TRAINING, *METRICS, *CHAT, "--training.steps", "6", "--data.validation_fraction", "0.2")


@pytest.fixture(autouse=True)
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    records = [{"messages": [user(f"{i}?"), assistant("word " * (i % 5) + f"{i}")]} for i in range(60)]
    write_chats(tmp_path / "chats.jsonl", records)


def logged(run: str) -> list[tuple[object, ...]]:
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["tokens_seen"], line.get("validation_loss")) for line in lines]


def test_a_resumed_run_is_the_undisturbed_one() -> None:
    assert main(["train", *COMMON, "--job.dump_folder", "whole"]) == 0
    halves = ["train", *COMMON, "--job.dump_folder", "halves", "--checkpoint.enable"]
    assert main([*halves, "--debug.stop_after", "3", "--metrics.validation_interval", "6"]) == 0
    assert main(halves) == 0
    whole, resumed = logged("whole"), logged("halves")
    assert [line[:3] for line in whole] == [line[:3] for line in resumed]
    assert whole[-1] == resumed[-1]
    assert whole[-1][3] is not None


def test_other_masks_are_other_data_for_a_run_that_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["train", *COMMON, "--job.dump_folder", "run", "--checkpoint.enable"]
    assert main([*run, "--debug.stop_after", "3"]) == 0
    capsys.readouterr()
    assert main([*run, "--data.loss_on", "all"]) == 2
    assert 'data.loss_on: "assistant" -> "all"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--data.chat_template", ""), "the byte tokenizer has no chat template: choose one with data.chat_template"),
        (("--data.path", ""), "data.kind chat needs data.path: a JSONL file of conversations"),
        (("--data.path", "nothing.jsonl"), "data.path 'nothing.jsonl' does not exist"),
        (("--training.seq_len", "4"), "has no conversation to learn from: left out 60 longer than training.seq_len"),
    ],
)
def test_what_is_wrong_is_one_line(options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *COMMON, "--job.dump_folder", "run", *options]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1
    assert not Path("run", "metrics.jsonl").exists()
