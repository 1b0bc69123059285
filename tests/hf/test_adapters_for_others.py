"""Adapters of a run in the hands of peft and transformers: the same answers, exported as adapters or merged."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_hf_quantized import quantize_folder
from their_models import load, make, save

from spurline import config_io
from spurline.cli import main
from spurline.config import Job, Lora, RunConfig
from spurline.hf.settings import run_config_for
from spurline.lora.adapters import is_adapter
from spurline.testing.params import slow_but
from spurline.testing.tiny import write_words
from spurline.tools.generate import load_model
from spurline.train.base_model import load_base
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.trainer import make_trainer

ALL = Lora().targets


def adapted_run(tmp_path: Path, name: str, targets: tuple[str, ...] = ALL) -> tuple[Path, Path]:
    """A model of theirs, and a run folder of ours with random adapters on it."""
    theirs, base = tmp_path / "theirs", tmp_path / "base"
    make(name).save_pretrained(theirs)
    assert main(["convert", "from-hf", str(theirs), str(base)]) == 0
    return theirs, with_adapters(tmp_path, base, *config_io.load(base / "config.json"), targets)


def with_adapters(
    tmp_path: Path, base: Path, family: str, preset: str, config: RunConfig[Any], targets: tuple[str, ...] = ALL
) -> Path:
    """A run folder with random adapters on the model of a folder."""
    run = tmp_path / "run"
    (tmp_path / "text").mkdir()
    config = replace(
        config,
        job=Job(dump_folder=str(run)),
        lora=Lora(rank=3, alpha=5.2, targets=targets, base=str(base)),
        data=replace(config.data, path=str(write_words(tmp_path / "text")), tokenizer=""),
        training=replace(config.training, dtype="float32"),
    )
    trainer = make_trainer(config, draw_weights=False)
    described = load_base(trainer.model, config)
    for parameter in (p for name, p in trainer.model.named_parameters() if is_adapter(name)):
        torch.nn.init.normal_(parameter, std=0.2)
    CheckpointManager(run, 1, 0).save(5, trainer.model, trainer.optimizer, described)
    config_io.save(run / "config.json", family, preset, config)
    return run


def logits_of(model: Any, tokens_BL: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(tokens_BL)
    return found if isinstance(found, torch.Tensor) else found.logits


CASES = {
    "llama": ALL,
    "qwen3_moe-square-dense-first": ALL,
    "qwen3_moe": ("*.experts.w1_EFD", "*.wq.weight"),
    "deepseek_v3": ALL,
    "mixtral": ALL,
    "gpt_oss": ALL,
    "qwen2_moe": ALL,
    "qwen2": ALL,
    "qwen3": ALL,
    "mistral": ALL,
    "olmoe": ALL,
    "glm4_moe": ALL,
    "deepseek_v2": ALL,
}
QUICK = ("qwen3_moe-square-dense-first", "qwen3_moe", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize("name", slow_but(QUICK, CASES))
def test_peft_and_merged_weights_answer_as_the_run_does(tmp_path: Path, name: str) -> None:
    theirs, run = adapted_run(tmp_path, name, CASES[name])
    tokens_BL = torch.randint(200, (2, 20))
    expected = logits_of(load_model(run, config_io.load(run / "config.json")[2], None), tokens_BL)
    plain = logits_of(load(theirs), tokens_BL)
    assert (expected - plain).abs().max() > 0.1 * plain.abs().max(), "the adapters do nothing"

    assert main(["convert", "to-peft", str(run), str(tmp_path / "adapter")]) == 0
    with_adapters = peft.PeftModel.from_pretrained(load(theirs), tmp_path / "adapter")
    torch.testing.assert_close(logits_of(with_adapters, tokens_BL), expected, rtol=1e-4, atol=1e-4)

    assert main(["convert", "merge", str(run), str(tmp_path / "merged")]) == 0
    assert main(["convert", "to-hf", str(tmp_path / "merged"), str(tmp_path / "out"), "--verify"]) == 0
    torch.testing.assert_close(logits_of(load(tmp_path / "out"), tokens_BL), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
def test_a_hugging_face_folder_is_a_base_without_a_conversion(tmp_path: Path, kind: str) -> None:
    """For peft its folder is the base too; merged in float32, quantized weights are not rounded."""
    theirs = save(make("deepseek_v3").bfloat16(), tmp_path / "theirs")
    if kind == "fp8":
        quantize_folder(theirs, (4, 2))
    run = with_adapters(tmp_path, theirs, *run_config_for(theirs, ""))
    tokens_BL = torch.randint(200, (2, 20))
    expected = logits_of(load_model(run, config_io.load(run / "config.json")[2], None), tokens_BL)

    assert main(["convert", "merge", str(run), str(tmp_path / "merged"), "--dtype", "float32"]) == 0
    assert main(["convert", "to-hf", str(tmp_path / "merged"), str(tmp_path / "out"), "--verify"]) == 0
    torch.testing.assert_close(logits_of(load(tmp_path / "out"), tokens_BL), expected, rtol=1e-4, atol=1e-4)
    assert main(["convert", "merge", str(run), str(tmp_path / "rounded")]) == 0
    stored = CheckpointManager(tmp_path / "rounded", 1, 0).open(0).layout.tensors
    assert stored["model.layers.1.moe.experts.w1_EFD"].dtype == torch.bfloat16

    assert main(["convert", "to-peft", str(run), str(tmp_path / "adapter")]) == 0
    named = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(theirs)
    if kind == "bfloat16":
        with_peft = peft.PeftModel.from_pretrained(load(Path(named)), tmp_path / "adapter")
        torch.testing.assert_close(logits_of(with_peft, tokens_BL), expected, rtol=1e-4, atol=1e-4)

    # Other weights in the same folder are noticed.
    tensors = load_file(theirs / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, theirs / "model.safetensors")
    with pytest.raises(ValueError, match=rf"on other weights, {theirs}, than those of {theirs}: choose") as error:
        load_model(run, config_io.load(run / "config.json")[2], None)
    assert "\n" not in str(error.value)


def test_what_can_not_be_merged_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, run = adapted_run(tmp_path, "qwen3_moe")
    base = tmp_path / "base"

    def says(*command: str) -> str:
        capsys.readouterr()
        assert main(["convert", *command, str(tmp_path / "new")]) == 2
        assert not (tmp_path / "new").exists()
        return capsys.readouterr().err

    assert "has no adapters (lora.rank is 0)" in says("merge", str(base))
    assert "has adapters and no weights of its own" in says("to-hf", str(run))
    assert "there is no complete checkpoint" in says("merge", str(run), "--step", "4")
    shutil.rmtree(base / "checkpoints" / "step-00000000")
    assert "is a run without a complete checkpoint" in says("to-peft", str(run))
