import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from spurline import models
from spurline.config_io import load
from spurline.models.deepseek_v3.configs import deepseek_v3_debugmodel
from spurline.tools.console import human, human_flops
from spurline.train.run import Ended


@pytest.fixture
def trainer(monkeypatch):
    """Takes the trainer's place: notes its calls in `calls`, and raises `error`."""
    stub = SimpleNamespace(calls=[], error=None)

    def train(*args):
        stub.calls.append(args)
        if stub.error is not None:
            raise stub.error
        return Ended(Path("where no run is"))

    stub.train = train
    monkeypatch.setitem(sys.modules, "spurline.train.run", stub)
    return stub


def test_trainer_gets_the_names_and_the_resolved_config(train, trainer):
    assert train("--training.steps", "3") == (0, "", "")
    ((module, config_name, run_config),) = trainer.calls
    assert (module, config_name) == ("deepseek_v3", "deepseek_v3_debugmodel")
    assert run_config.training.steps == 3
    assert run_config.job.dump_folder == ""
    assert run_config.job.runs_folder == "outputs/deepseek_v3_debugmodel"
    assert not run_config.model.moe.force_load_balance


def test_forced_balance_reaches_the_model(train, trainer):
    train("--debug.moe_force_load_balance")
    assert trainer.calls[0][2].model.moe.force_load_balance


def test_trainer_is_not_called_when_something_is_wrong(train, trainer):
    assert train("--training.steps", "0").code == 2
    assert trainer.calls == []


def test_user_error_found_late_is_one_line(train, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("too short")
    code, out, err = train("--data.path", "text")
    assert (code, out) == (2, "")
    assert err.startswith("spurline train: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "outputs").exists()


def test_interrupt_is_one_line(train, trainer):
    trainer.error = KeyboardInterrupt()
    assert train() == (130, "", "spurline train: interrupted\n")


def test_other_errors_keep_their_traceback(train, trainer):
    trainer.error = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        train()


@pytest.mark.parametrize(("content", "problem"), [(b"", "has no text"), (b"\xff\xfe", "is not UTF-8 text")])
def test_unusable_text_is_one_line_and_nothing_is_written(problems, tmp_path, content, problem):
    (tmp_path / "data").write_bytes(content)
    (told,) = problems("--data.path", "data")
    assert told.startswith("data.path")
    assert problem in told


def test_dry_run_prints_the_config_and_its_cost_and_writes_nothing(train, trainer, tmp_path):
    code, out, err = train("--dry-run", "--training.steps", "10", "--training.seq_len", "64")
    assert (code, err) == (0, "")
    assert trainer.calls == []
    assert list(tmp_path.iterdir()) == []
    text, cost = out.split("\n\n")
    (tmp_path / "config.json").write_text(text)
    assert load(tmp_path / "config.json")[2].training.seq_len == 64

    model, sequences = deepseek_v3_debugmodel().model, deepseek_v3_debugmodel().training.local_batch_size
    flops, tokens = model.flops_per_token(64), sequences * 64
    *lines, memory = cost.splitlines()
    assert lines == [
        f"parameters  {human(model.num_params())} total, {human(model.num_active_params())} active per token",
        f"tokens      {tokens:,} per step ({sequences} sequences of 64), {tokens * 10:,} in 10 steps",
        f"compute     {human_flops(flops)} per token, {human_flops(flops * tokens)} per step,"
        f" {human_flops(flops * tokens * 10)} in total (forward and backward)",
        "run folder  outputs/deepseek_v3_debugmodel/<number>",
    ]
    words = re.search(r"^memory +(\S+) MiB per rank on an accelerator .*?([\d.]+) MiB optimizer state", memory)
    peak, state = words.groups()
    # AdamW keeps two fp32 numbers for each parameter, rounded up for the allocator; the peak has parameters too.
    assert 1 <= float(state) * 2**20 / (8 * model.num_params()) < 1.05
    assert float(peak) > 1.5 * float(state)


def test_dry_run_counts_the_sequences_of_all_data_ranks(train, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    options = ("--dry-run", "--parallelism.tensor_parallel_degree", "2", "--training.local_batch_size", "3")
    assert "(12 sequences of 256)" in train(*options).out
    assert "(24 sequences of 256)" in train(*options, "--training.global_batch_size", "24").out


def test_dry_run_shows_the_forced_balance(train):
    out = train("--dry-run", "--debug.moe_force_load_balance").out
    assert json.loads(out.split("\n\n")[0])["model"]["moe"]["force_load_balance"] is True


@pytest.fixture
def user_package(monkeypatch, tmp_path):
    """A package in the working directory that registers a family of its own."""
    package = tmp_path / "family_of_a_user"
    package.mkdir()
    package.joinpath("__init__.py").write_text(
        "from spurline.models import register_family\nregister_family('mine', __name__)\n"
    )
    package.joinpath("configs.py").write_text(
        "from spurline.models.deepseek_v3.configs import deepseek_v3_debugmodel\n"
        "CONFIGS = {'mine_small': deepseek_v3_debugmodel}\n"
    )
    monkeypatch.setattr(models, "_FAMILIES", dict(models._FAMILIES))
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(Path.cwd()))])
    yield package.name
    for name in (package.name, f"{package.name}.configs"):
        sys.modules.pop(name, None)


def test_users_family_can_be_trained_and_listed(spurline, trainer, user_package):
    assert spurline("train", "--import", user_package, "--module", "mine", "--config", "mine_small").code == 0
    assert trainer.calls[0][:2] == ("mine", "mine_small")
    assert "mine_small" in spurline("configs", "--import", user_package).out


def test_package_that_can_not_be_imported_is_one_line(problems):
    assert problems("--import", "no_such_package") == ["--import no_such_package: No module named 'no_such_package'"]


def test_an_error_of_another_library_keeps_its_trace(train, trainer):
    trainer.error = ValueError("raised by a module that isn't ours")
    with pytest.raises(ValueError, match="isn't ours"):
        train()


def test_a_full_disk_is_one_line(train, trainer):
    trainer.error = OSError(28, "No space left on device", "metrics.jsonl")
    assert train() == (2, "", "spurline train: metrics.jsonl: No space left on device\n")
