"""Samples of a run's text: during training, and when it goes on."""

import json

from spurline.report.page import make_page
from spurline.report.read import read_runs
from spurline.testing.tiny import tiny_run, write_words
from spurline.train.run import train
from spurline.train.sample import append_sample, drop_samples_after


def run_with(folder, name, **metrics):
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    return tiny_run(
        write_words(texts),
        job={"dump_folder": str(folder / name)},
        metrics={"validation_batches": 0, "tensorboard": False, "sample_tokens": 8, **metrics},
    )


def samples_of(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_samples_come_at_each_interval_and_at_the_end_and_change_no_step(tmp_path, capsys):
    train("deepseek_v3", "tiny", run_with(tmp_path, "run", sample_interval=3))
    train("deepseek_v3", "tiny", run_with(tmp_path, "without"))
    samples = samples_of(tmp_path / "run")
    assert [sample["step"] for sample in samples] == [3, 6, 8]
    assert all(sample["text"].startswith("ten ") for sample in samples)
    assert samples[-1:] == samples_of(tmp_path / "without")
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sample of step")]
    assert [line.split(" (")[0] for line in shown] == [f"sample of step {step}" for step in (3, 6, 8, 8)]
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("run", "without")
    ]
    assert losses[0] == losses[1]


def test_the_report_shows_each_sample_with_its_step(tmp_path):
    train("deepseek_v3", "tiny", run_with(tmp_path, "run", sample_interval=4))
    assert [sample["step"] for sample in samples_of(tmp_path / "run")] == [4, 8]  # the last one once
    page = make_page(read_runs([str(tmp_path / "run")]))
    for sample in samples_of(tmp_path / "run"):
        assert f"<h3>step {sample['step']}</h3><pre tabindex=0>{sample['text'][:4]}" in page


def test_a_run_that_goes_on_after_a_step_drops_what_comes_later(tmp_path):
    for step in (3, 6, 9):
        append_sample(tmp_path, step, f"text of {step}\n")
    drop_samples_after(tmp_path, 6)
    assert [sample["step"] for sample in samples_of(tmp_path)] == [3, 6]
    drop_samples_after(tmp_path / "nothing there", 6)
