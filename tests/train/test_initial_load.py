"""A run that starts from the weights of another one, or of a Hugging Face folder: `spurline train` from end to end."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from spurline import config_io
from spurline.cli import main
from spurline.hf.settings import mismatch, read_folder_model
from spurline.moe.config import SAME_WEIGHTS
from spurline.tools.options import resolve
from spurline.train.checkpoint.manager import CheckpointManager

STEPS = ("--training.steps", "3", "--training.seq_len", "16", "--training.local_batch_size", "2")
COMMON = (
    *STEPS,
    "--training.threads",
    "1",
    "--metrics.sample_tokens",
    "0",
    "--metrics.no_report",
    "--data.path",
    "text",
)
NO_MOVE = ("--optimizer.lr", "0", "--model.moe.bias_update_rate", "0")


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of `transformers` with a tiny model, in an empty working folder with some text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("a spur line is a side track that carries some of the traffic\n" * 20)
    config = transformers.Qwen3MoeConfig(
        vocab_size=260,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def weights(run: str, step: int) -> dict[str, torch.Tensor]:
    model = config_io.load(Path(run) / "config.json")[2].model.build()
    CheckpointManager(run, interval=1, keep_latest_k=0).load(step, model, None)
    return dict(model.state_dict())


def lines_of(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def test_model_and_weights_come_from_the_folder(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--checkpoint.initial_load_path", "theirs", *COMMON, *NO_MOVE]) == 0
    out = capsys.readouterr().out
    assert "weights of theirs (Qwen3MoeForCausalLM, 45 tensors); a fresh optimizer, step 0" in out
    assert "--preset finetune" not in out  # the rate is low
    found, stored = weights("outputs/theirs-tuned/0001", 3), load_file(theirs / "model.safetensors")
    assert torch.equal(found["embedding.weight"], stored["model.embed_tokens.weight"])
    expert = stored["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert torch.equal(found["layers.1.moe.experts.w2_EDF"][3], expert)
    assert config_io.load("outputs/theirs-tuned/0001/config.json")[2].training.seq_len == 16


@pytest.mark.parametrize("name", SAME_WEIGHTS)
def test_how_experts_are_computed_may_differ_from_the_folder(theirs: Path, name: str) -> None:
    values = {"experts_backend": "loop", "equal_split": "forced", "equal_split_threshold": 0.5, "check_exchange": True}
    values |= {"row_multiple": 8, "dispatcher": "capacity", "capacity_factor": 2.0, "overflow": "grow"}
    model = read_folder_model(theirs).model
    changed = replace(model, moe=replace(model.moe, **{name: (values | {"exchange_dtype": "float8"})[name]}))
    assert changed != model
    assert mismatch(model, changed) == ""


def test_a_high_rate_is_mentioned_with_the_preset_for_it(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--checkpoint.initial_load_path", "theirs", *COMMON]) == 0
    assert "optimizer.lr 0.003 suits random weights; for trained ones, --preset finetune" in capsys.readouterr().out


def test_a_run_that_resumes_ignores_the_folder_and_says_so(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "--checkpoint.initial_load_path", "theirs", *COMMON]
    assert main([*command, "--debug.stop_after", "2"]) == 0
    for path in theirs.iterdir():
        path.unlink()
    theirs.rmdir()  # it is not needed any more
    capsys.readouterr()
    assert main(["train", "--job.resume", "outputs/theirs-tuned", "--debug.stop_after", "0"]) == 0
    out = capsys.readouterr().out
    assert "resuming from the checkpoint of step 2" in out
    assert "checkpoint.initial_load_path theirs is ignored: the run has weights of its own" in out
    assert [line["step"] for line in lines_of("outputs/theirs-tuned/0001")] == [1, 2, 3]


def test_weights_of_a_run_begin_another_at_step_0(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--checkpoint.initial_load_path", "theirs", *COMMON, "--job.dump_folder", "first"]) == 0
    trained = weights("first", 3)
    for source in ("first", "first/checkpoints/step-00000003"):
        out = "second" if source == "first" else "third"
        options = (*NO_MOVE, "--job.dump_folder", out, "--training.steps", "1")
        assert main(["train", "--checkpoint.initial_load_path", source, *options]) == 0
        assert "weights of first, step 3; a fresh optimizer, step 0" in capsys.readouterr().out
        assert [line["step"] for line in lines_of(out)] == [1]
        begun = weights(out, 1)
        assert all(torch.equal(begun[name], tensor) for name, tensor in trained.items())


QWEN3 = ("--module", "qwen3", "--config", "qwen3_debugmodel_moe")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--checkpoint.initial_load_path", "nowhere"), "nowhere: there is no such folder"),
        ((*QWEN3, "--checkpoint.initial_load_path", "nowhere"), "nowhere: there is no such folder"),
        (("--checkpoint.initial_load_path", "empty"), "empty has no config.json: give a Hugging Face folder, a run"),
        (
            (*QWEN3, "--checkpoint.initial_load_path", "theirs"),
            "theirs is of another model: model.vocab_size 264 (the folder: 260); model.dim ",
        ),
        (
            ("--module", "mixtral", "--config", "mixtral_debugmodel", "--checkpoint.initial_load_path", "theirs"),
            "theirs is of another model: the model is a MixtralConfig (the folder: Qwen3MoEConfig)",
        ),
        (("--checkpoint.initial_load_path", "theirs", "--preset", "finetun"), "there is no 'finetun'. Did you mean"),
    ],
)
def test_a_folder_that_does_not_fit_is_one_line_before_anything_starts(
    theirs: Path, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    before = sorted(Path().rglob("*"))
    assert main(["train", *options, *COMMON]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1
    assert sorted(Path().rglob("*")) == before


def test_finetune_is_a_low_rate_and_routing_that_stays(theirs: Path) -> None:
    start = ["train", "--checkpoint.initial_load_path", "theirs", "--preset", "finetune", *COMMON]
    assert main([*start, "--optimizer.lr", "1e-2", "--lr_scheduler.warmup_steps", "1"]) == 0
    config = config_io.load("outputs/theirs-tuned/0001/config.json")[2]
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (1e-2, 0.0)  # one's own options come last
    assert (config.lr_scheduler.decay_type, config.lr_scheduler.decay_ratio) == ("cosine", 1.0)
    assert (config.model.moe.bias_update_rate, config.model.moe.aux_loss) == (0.0, "none")
    found, stored = weights("outputs/theirs-tuned/0001", 3), load_file(theirs / "model.safetensors")
    gate = stored["model.layers.0.mlp.gate.weight"]
    assert torch.equal(found["layers.0.moe.router.gate_ED"], gate)
    assert not torch.equal(found["embedding.weight"], stored["model.embed_tokens.weight"])


def test_finetune_is_for_dense_models_too() -> None:
    optimizer = resolve(
        ["--module", "qwen3", "--config", "qwen3_debugmodel", "--preset", "finetune"]
    ).run_config.optimizer
    assert (optimizer.lr, optimizer.groups) == (2e-5, ())
