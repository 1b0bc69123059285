"""Whole runs through `spurline train`: what they write, say and refuse, and that they can be repeated and resumed."""

import io
import json
import math
import os
import random
import signal
import sys
from dataclasses import asdict, replace
from typing import NamedTuple

import pytest
import torch

from spurline import config_io
from spurline.cli import main
from spurline.train import run as run_module
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.exit_codes import ExitCode
from spurline.train.processes import Process
from spurline.train.trainer import Trainer

PRESET = ["--module", "deepseek_v3", "--config", "deepseek_v3_debugmodel"]
# Two layers, one dense and one with four experts of which a token takes two; 4 x 16 tokens a step.
TINY = {
    "job.dump_folder": "run",
    "data.path": "text",
    "data.validation_fraction": "0.1",
    "training.threads": "1",
    "training.steps": "8",
    "training.seq_len": "16",
    "training.local_batch_size": "4",
    "optimizer.lr": "4e-3",
    "lr_scheduler.warmup_steps": "2",
    "lr_scheduler.decay_ratio": "0.5",
    "metrics.validation_batches": "2",
    "metrics.sample_tokens": "6",
    "metrics.sample_prompt": "ten",
    "model.vocab_size": "257",
    "model.dim": "16",
    "model.num_layers": "2",
    "model.dense_hidden_dim": "24",
    "model.num_heads": "2",
    "model.q_lora_rank": "8",
    "model.kv_lora_rank": "8",
    "model.qk_nope_head_dim": "4",
    "model.qk_rope_head_dim": "4",
    "model.v_head_dim": "4",
    "model.moe.hidden_dim": "16",
    "model.moe.num_experts": "4",
    "model.moe.top_k": "2",
    "model.moe.aux_loss": "sequence",
    "model.moe.bias_update_rate": "1e-3",
}
TINY_OPTIONS = [word for name, value in TINY.items() for word in (f"--{name}", value)] + ["--checkpoint.no_enable"]
ROWS_A_STEP = 4 * 16 * 2
# What a run repeats exactly; the others are time and memory.
REPEATABLE = ("step", "loss", "balance_loss", "grad_norm", "lr", "expert_load", "tokens_seen", "validation_loss")
HELD_OUT = {"validation_loss", "bits_per_byte"}


class Outcome(NamedTuple):
    code: int
    out: str
    err: str
    weights: dict[str, torch.Tensor]
    """What the model ended with; empty where none was built."""


@pytest.fixture(autouse=True)
def _leave_torch_as_it_was():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a folder `text` to train on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "text").mkdir()
    words = random.Random(0)
    for name in ("a", "b", "c"):
        text = " ".join("".join(words.choices("aeinrst", k=words.randint(1, 6))) for _ in range(500))
        (tmp_path / "text" / f"{name}.txt").write_text(text)
    return tmp_path


@pytest.fixture
def spurline(folder, monkeypatch, capsys):
    """Runs `spurline train` with these options in this process."""
    built = []

    make_trainer = run_module.make_trainer

    def noted(config, world, **options):
        built.append(make_trainer(config, world, **options))
        return built[-1]

    monkeypatch.setattr(run_module, "make_trainer", noted)

    def run(*options):
        built.clear()
        code = main(["train", *options])
        return Outcome(code, *capsys.readouterr(), built[0].model.state_dict() if built else {})

    return run


@pytest.fixture
def train(spurline):
    """Runs the tiny model with further options, which take precedence."""
    return lambda *options: spurline(*PRESET, *TINY_OPTIONS, *options)


def metrics_of(folder, keys=None):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: record[key] for key in keys if key in record} for record in records] if keys else records


def assert_same_run(actual, expected):
    assert metrics_of(actual[0], REPEATABLE) == metrics_of(expected[0], REPEATABLE)
    assert actual[1].weights.keys() == expected[1].weights.keys()
    assert all(torch.equal(weight, expected[1].weights[name]) for name, weight in actual[1].weights.items())


def test_run_folder_has_every_step_and_a_config_that_loads(train, folder):
    assert train("--metrics.validation_interval", "3").code == 0
    assert sorted(path.name for path in (folder / "run").iterdir()) == [
        *("config.json", "metrics.jsonl", "report.html", "samples.jsonl", "state.json", "tensorboard"),
    ]
    module, config_name, config = config_io.load(folder / "run" / "config.json")
    assert (module, config_name) == ("deepseek_v3", "deepseek_v3_debugmodel")
    assert (config.training.steps, config.model.moe.num_experts) == (8, 4)

    records = metrics_of(folder / "run")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [record["tokens_seen"] for record in records] == [64 * step for step in range(1, 9)]
    assert [record["step"] for record in records if HELD_OUT & record.keys()] == [3, 6, 8]
    for record in records:
        if "validation_loss" in record:  # a byte a token
            assert record["bits_per_byte"] == pytest.approx(record["validation_loss"] / math.log(2))
    for record in records:
        assert record.keys() - HELD_OUT == {
            *("step", "loss", "balance_loss", "grad_norm", "lr", "expert_load"),
            *("tokens_per_second", "tokens_seen", "peak_memory_bytes", "flops_per_second"),
            *("step_time", "data_wait", "step_time_parts", "routing"),
        }
        assert all(record[key] > 0 for key in ("loss", "balance_loss", "grad_norm", "tokens_per_second"))
        assert sum(record["expert_load"]["layers.1.moe"]) == ROWS_A_STEP
    assert records[-1]["loss"] < records[0]["loss"] - 0.2, "nothing was learned"


def test_plain_output_tells_how_it_went_and_where_it_is(train):
    code, out, err, _ = train()
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    lines = out.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 8
    assert all(" loss " in line and " tok/s" in line and " load " in line for line in steps)
    assert [" bpb " in line and " val " in line for line in steps] == [False] * 7 + [True]
    (sample,) = [i for i, line in enumerate(lines) if line.startswith("sample of step 8 (")]
    assert lines[sample + 1].startswith("ten")
    assert lines[-2:] == ["run folder: run", "report: run/report.html"]


def test_log_interval_thins_out_the_lines_but_not_the_tokens(train, folder):
    train("--metrics.log_interval", "3", "--metrics.validation_interval", "4", "--metrics.sample_tokens", "0")
    records = metrics_of(folder / "run")
    assert [record["step"] for record in records] == [3, 4, 6, 8]
    assert [record["tokens_seen"] for record in records] == [192, 256, 384, 512]


def test_same_command_gives_the_same_bits_and_another_seed_others(train, folder):
    first = train()
    again = train("--job.dump_folder", "again")
    assert_same_run((folder / "again", again), (folder / "run", first))
    assert again.out.split("sample")[1].split("\n")[1:3] == first.out.split("sample")[1].split("\n")[1:3]
    other = train("--job.dump_folder", "other", "--training.seed", "1")
    assert metrics_of(folder / "other")[0]["loss"] != metrics_of(folder / "run")[0]["loss"]
    assert not torch.equal(other.weights["output.weight"], first.weights["output.weight"])


def test_config_of_a_run_reproduces_it_bit_for_bit(spurline, train, folder):
    options = ["--training.global_batch_size", "8", "--training.seed", "3", "--debug.moe_force_load_balance"]
    first = train(*options, "--model.moe.z_loss_weight", "0.1", "--optimizer.lr", "0.0123")
    again = spurline("--config-file", "run/config.json", "--job.dump_folder", "elsewhere/again")
    assert again.code == 0
    assert_same_run((folder / "elsewhere" / "again", again), (folder / "run", first))


def test_forced_balance_gives_every_expert_the_same_load(train, folder):
    train("--debug.moe_force_load_balance")
    for record in metrics_of(folder / "run"):
        assert record["expert_load"] == {"layers.1.moe": [ROWS_A_STEP // 4] * 4}


def test_model_without_experts_trains(train, folder):
    assert train("--model.num_dense_layers", "2").code == 0
    last = metrics_of(folder / "run")[-1]
    assert last["expert_load"] == {}
    assert last["balance_loss"] is None


def test_stop_after_ends_early_with_the_schedule_of_the_full_run(train, folder):
    train()
    assert train("--job.dump_folder", "short", "--debug.stop_after", "5").code == 0
    short, full = (metrics_of(folder / name) for name in ("short", "run"))
    assert [record["step"] for record in short] == [1, 2, 3, 4, 5]
    assert "validation_loss" in short[-1]
    for record, expected in zip(short, full[:5], strict=True):
        assert (record["lr"], record["loss"]) == (expected["lr"], expected["loss"])
    assert full[4]["lr"] < full[3]["lr"], "the schedule has to have left its plateau for this test to mean something"
    assert train("--job.dump_folder", "past_the_end", "--debug.stop_after", "99").code == 0
    assert len(metrics_of(folder / "past_the_end")) == 8


CHECKPOINT = ["--checkpoint.enable", "--checkpoint.interval", "2", "--metrics.sample_tokens", "0"]


def assert_is_the_uninterrupted_run(train, folder, resumed):
    whole = train("--job.dump_folder", "whole", "--metrics.sample_tokens", "0")
    # A run that stops on purpose validates at its end, which the uninterrupted one does not.
    keys = [key for key in REPEATABLE if key != "validation_loss"]
    assert metrics_of(folder / "run", keys) == metrics_of(folder / "whole", keys)
    assert metrics_of(folder / "run")[-1]["validation_loss"] == metrics_of(folder / "whole")[-1]["validation_loss"]
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in whole.weights.items())


def test_stopped_run_goes_on_as_if_it_had_never_stopped(train, folder):
    assert "resuming" not in train(*CHECKPOINT, "--debug.stop_after", "4").out
    resumed = train(*CHECKPOINT)
    assert "resuming from the checkpoint of step 4" in resumed.out
    assert "step 4/8" not in resumed.out
    assert_is_the_uninterrupted_run(train, folder, resumed)
    before = (folder / "run" / "metrics.jsonl").read_text()
    assert train(*CHECKPOINT).code == 0, "a run that is complete has nothing left to do"
    assert (folder / "run" / "metrics.jsonl").read_text() == before


CAPACITY = ["--model.moe.dispatcher", "capacity", "--model.moe.capacity_factor", "0.5"]


def test_rows_that_are_dropped_are_in_metrics_warnings_and_report(train, folder):
    outcome = train(*CAPACITY)
    assert outcome.code == 0
    by_layer = [record["capacity"]["layers.1.moe"] for record in metrics_of(folder / "run")]
    assert all(layer["dropped_rows"] >= ROWS_A_STEP // 2 for layer in by_layer)
    assert all(layer["factor"] == 0.5 < layer["needed_factor"] for layer in by_layer)
    assert "warning: layers.1.moe:" in outcome.out
    assert "rows found no place at their expert and were dropped" in outcome.out
    page = (folder / "run" / "report.html").read_text()
    assert "<dt>Dropped rows</dt>" in page
    assert 'data-chart="capacity/dropped_rows"' in page


def test_capacity_grows_when_a_step_is_logged_and_goes_on_from_a_checkpoint(train, folder):
    grow = [*CHECKPOINT, *CAPACITY, "--model.moe.overflow", "grow", "--metrics.log_interval", "2"]
    first = train(*grow, "--debug.stop_after", "4")
    assert (first.code, "choose --model.moe.overflow grow" in first.out) == (0, False)
    assert "It grows at each logged step that needs more" in first.out
    resumed = train(*grow)
    assert "resuming from the checkpoint of step 4" in resumed.out
    by_layer = [record["capacity"]["layers.1.moe"] for record in metrics_of(folder / "run")]
    assert by_layer[0]["factor"] == 0.5
    assert by_layer[1]["factor"] >= by_layer[0]["needed_factor"]
    assert by_layer[2]["factor"] >= by_layer[1]["factor"]  # of the resumed run, whose config says 0.5

    whole = train(*grow, "--job.dump_folder", "whole")
    keys = [*(key for key in REPEATABLE if key != "validation_loss"), "capacity"]
    assert metrics_of(folder / "run", keys) == metrics_of(folder / "whole", keys)
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in whole.weights.items())


def test_dropped_rows_before_a_checkpoint_are_counted_in_a_run_that_was_killed(train, folder):
    seldom = [*CHECKPOINT, *CAPACITY, "--metrics.log_interval", "100"]
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, Trainer, "step", 5)
        assert train(*seldom).code == 130
    assert "resuming from the checkpoint of step 4" in train(*seldom).out
    train(*CAPACITY, "--job.dump_folder", "whole", "--metrics.sample_tokens", "0")
    lines, whole = metrics_of(folder / "run"), metrics_of(folder / "whole")
    assert [record["step"] for record in lines] == [2, 4, 6, 8]
    dropped, expected = (
        sum(line["capacity"]["layers.1.moe"]["dropped_rows"] for line in run) for run in (lines, whole)
    )
    assert dropped == expected > 0


def test_lines_of_checkpoints_let_no_capacity_grow(train, folder):
    grow = [*CAPACITY, "--model.moe.overflow", "grow", "--metrics.log_interval", "3", "--metrics.sample_tokens", "0"]
    saved = train(*grow, *CHECKPOINT)
    whole = train(*grow, "--job.dump_folder", "whole")
    factors, expected = (
        {line["step"]: line["capacity"]["layers.1.moe"]["factor"] for line in metrics_of(folder / name)}
        for name in ("run", "whole")
    )
    assert list(factors) == [2, 3, 4, 6, 8]
    assert factors[2] == factors[3] == 0.5 < factors[4]
    assert expected.items() <= factors.items()
    assert all(torch.equal(saved.weights[name], weight) for name, weight in whole.weights.items())


def interrupt_after(patch, owner, name, at_step):
    """The method `name`, which takes the step first, is interrupted at the end of step `at_step`."""
    method = getattr(owner, name)

    def interrupted(self, step, *arguments):
        result = method(self, step, *arguments)
        if step == at_step:
            raise KeyboardInterrupt
        return result

    patch.setattr(owner, name, interrupted)


@pytest.mark.parametrize(
    ("owner", "name", "at_step", "done"),
    [(Trainer, "step", 6, 4), (CheckpointManager, "save", 4, 4), (Trainer, "step", 2, None)],
)
def test_killed_run_goes_on_from_its_last_checkpoint_with_each_step_once(folder, train, owner, name, at_step, done):
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, owner, name, at_step)
        assert train(*CHECKPOINT).code == 130
    resumed = train(*CHECKPOINT)
    assert ("resuming" in resumed.out) == (done is not None)
    assert f"step {(done or 0) + 1}/8" in resumed.out
    assert_is_the_uninterrupted_run(train, folder, resumed)


@pytest.mark.slow
def test_compiled_run_goes_on_from_the_checkpoint_of_an_eager_one(train, folder):
    train(*CHECKPOINT, "--debug.stop_after", "4")
    resumed = train(*CHECKPOINT, "--compile.enable", "--compile.backend", "aot_eager")
    torch._dynamo.reset()
    assert "resuming from the checkpoint of step 4" in resumed.out
    train("--job.dump_folder", "eager")
    for actual, expected in zip(metrics_of(folder / "run"), metrics_of(folder / "eager"), strict=True):
        assert actual["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert actual["expert_load"] == expected["expert_load"]


def test_checkpoint_of_another_model_is_refused_and_the_run_stays_as_it_was(train, folder):
    train(*CHECKPOINT, "--debug.stop_after", "2")
    before = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
    code, _, err, _ = train(*CHECKPOINT, "--model.dim", "24")
    assert code == 2
    assert "is of another model" in err
    assert len(err.splitlines()) == 1
    assert {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()} == before


def test_run_without_checkpoints_does_not_touch_another_one(train, folder):
    train("--debug.stop_after", "5")
    code, _, err, _ = train("--debug.stop_after", "2")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "run holds another run (up to step 5): choose another --job.dump_folder, or replace it with" in err
    assert [record["step"] for record in metrics_of(folder / "run")] == [1, 2, 3, 4, 5]
    assert train("--debug.stop_after", "2", "--job.overwrite").code == 0
    assert [record["step"] for record in metrics_of(folder / "run")] == [1, 2]


def test_checkpoint_folder_of_a_living_run_is_refused_and_stays_as_it_was(train, folder):
    elsewhere = (*CHECKPOINT, "--checkpoint.folder", str(folder / "saved"))
    assert train(*elsewhere, "--debug.stop_after", "2").code == 0
    # This process's parent plays a run that lives and saves there.
    owner = replace(Process.own(), pid=os.getppid(), started="")
    (folder / "saved" / "run.lock").write_text(json.dumps({**asdict(owner), "since": "2026-01-01"}))
    before = {path: path.read_bytes() for path in (folder / "saved").rglob("*") if path.is_file()}
    code, _, err, _ = train(*elsewhere, "--job.dump_folder", "another")
    assert (code, len(err.splitlines())) == (4, 1)
    assert f"saved belongs to process {owner.pid} on " in err
    assert {path: path.read_bytes() for path in (folder / "saved").rglob("*") if path.is_file()} == before


def test_interrupt_is_one_line_and_keeps_what_was_written(train, folder, monkeypatch):
    interrupt_after(monkeypatch, Trainer, "step", 3)
    code, _, err, _ = train()
    assert (code, err) == (130, "spurline train: interrupted\n")
    assert [record["step"] for record in metrics_of(folder / "run")] == [1, 2]


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129), ("SIGUSR1", 138)])
def test_signal_ends_the_run_after_its_step_with_a_code_of_its_own(train, folder, monkeypatch, name, code):
    number, take_step = getattr(signal, name), Trainer.step

    def signalled(self, step):
        if step == 3:
            os.kill(os.getpid(), number)
        return take_step(self, step)

    monkeypatch.setattr(Trainer, "step", signalled)
    stopped = train("--metrics.sample_tokens", "0")
    assert (stopped.code, stopped.err) == (code, "")
    assert f"stopped after step 3 ({name} received); checkpoints are off, so it can't be resumed" in stopped.out

    stopped = train(*CHECKPOINT, "--checkpoint.interval", "100", "--job.dump_folder", "saved")
    assert stopped.code == ExitCode.STOPPED
    assert f"stopped after step 3 ({name} received); run the same command to resume" in stopped.out
    assert [path.name for path in (folder / "saved" / "checkpoints").iterdir()] == ["step-00000003"]


def test_step_that_is_not_finite_ends_the_run_in_one_line_and_keeps_the_metrics(train, folder):
    no_schedule = ["--lr_scheduler.warmup_steps", "0", "--lr_scheduler.decay_ratio", "0"]
    code, _, err, _ = train(*no_schedule, "--optimizer.lr", "1e38")
    assert code == ExitCode.DIVERGED
    assert len(err.splitlines()) == 1
    assert err.startswith("spurline train: step 2: the loss is nan")
    assert "Try a lower --optimizer.lr (now 1e+38)" in err
    assert [record["step"] for record in metrics_of(folder / "run")] == [1]


@pytest.mark.parametrize(
    ("options", "logged"),
    [(["--metrics.log_interval", "3"], []), (["--metrics.log_interval", "100", "--checkpoint.interval", "4"], [])],
    ids=["log", "save"],
)
def test_step_that_is_not_finite_is_told_with_the_next_reading_and_never_saved(train, folder, options, logged):
    no_schedule = ["--lr_scheduler.warmup_steps", "0", "--lr_scheduler.decay_ratio", "0"]
    no_validation = ["--metrics.validation_batches", "0"]
    code, _, err, _ = train(*no_schedule, *no_validation, *options, "--optimizer.lr", "1e38", "--checkpoint.enable")
    assert code == ExitCode.DIVERGED
    assert err.startswith("spurline train: step 2: the loss is nan")
    assert len(err.splitlines()) == 1
    assert [record["step"] for record in metrics_of(folder / "run")] == logged
    assert not list((folder / "run").glob("checkpoints/step-*"))


def test_validation_that_is_not_finite_ends_the_run_before_a_checkpoint_or_a_sample(train, folder):
    no_schedule = ["--lr_scheduler.warmup_steps", "0", "--lr_scheduler.decay_ratio", "0"]
    code, out, err, _ = train(*no_schedule, "--optimizer.lr", "1e38", "--training.steps", "1", "--checkpoint.enable")
    assert code == ExitCode.DIVERGED
    assert err.startswith("spurline train: step 1: the validation loss is nan. Try a lower --optimizer.lr")
    assert len(err.splitlines()) == 1
    assert "sample" not in out
    assert not (folder / "run" / "checkpoints").exists()
    (record,) = metrics_of(folder / "run")
    assert record["loss"] > 0
    assert record["validation_loss"] is None


BAD = {
    "missing data": ("--data.path nowhere", "data.path 'nowhere' does not exist"),
    "empty folder": ("--data.path hollow", "data.pattern '*' matches no file in data.path 'hollow'"),
    "no file that matches": ("--data.pattern *.md", "data.pattern '*.md' matches no file in data.path 'text'"),
    "empty data": ("--data.path empty", "data.path 'empty' has no text"),
    "too little data": ("--data.path short", "has 6 tokens, but one training window needs 17"),
    "binary data": ("--data.path binary", "is not UTF-8 text (a NUL byte at offset 1)"),
    "file in the way": ("--job.dump_folder short/run", "job.dump_folder short/run: {folder}/short is a file"),
    "dangling link in the way": ("--job.dump_folder dangling", "job.dump_folder dangling: can't make this folder"),
    "vocabulary too small": (
        "--model.vocab_size 256",
        "the tokenizer has 257 tokens, more than --model.vocab_size 256",
    ),
    "K > E": ("--model.moe.top_k 5", "model.moe.top_k 5 is larger than num_experts 4"),
    "groups that don't divide E": ("--model.moe.num_groups 3", "model.moe.num_groups 3 does not divide num_experts 4"),
    "unknown backend": ("--compile.enable --compile.backend x", "compile.backend: there is no 'x'. Choose from:"),
    "unknown module": ("--module deepsek_v3", "--module: there is no 'deepsek_v3'. Did you mean deepseek_v3?"),
    "unknown option": ("--training.stepz 3", "--training.stepz"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line_and_nothing_is_written(train, folder, case):
    (folder / "hollow").mkdir()
    (folder / "empty").write_text("")
    (folder / "short").write_text("short")
    (folder / "binary").write_bytes(b"a\0b")
    (folder / "dangling").symlink_to("gone")
    options, told = BAD[case]
    before = sorted(folder.rglob("*"))
    code, out, err, _ = train(*options.split())
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("spurline train: ")
    assert told.format(folder=folder) in line
    assert sorted(folder.rglob("*")) == before


def test_sample_that_the_output_can_not_encode_does_not_spoil_the_run(train, folder, monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(run_module, "sample_text", lambda trainer: "naïve\ufffd")
    assert train("--debug.stop_after", "1").code == 0
    written = output.buffer.getvalue().decode("ascii")
    assert "na?ve?\n" in written
    assert written.endswith("run folder: run\nreport: run/report.html\n")
