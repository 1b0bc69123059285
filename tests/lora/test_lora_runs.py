"""Runs with adapters: what they save, how they resume, and what generation and other tools make of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spurline import config_io
from spurline.config import RunConfig
from spurline.lora.adapters import is_adapter
from spurline.testing.tiny import tiny_model, tiny_run, write_words
from spurline.tools.generate import load_model
from spurline.tools.options import resolve, run_problems
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.run import train

QUIET = {"validation_batches": 0, "sample_tokens": 0, "tensorboard": False, "report": False}
MOE = {"bias_update_rate": 1e-2}
MODEL = tiny_model(moe=MOE)
NAMES = ("deepseek_v3", "deepseek_v3_debugmodel")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> RunConfig[Any]:
    """The config of a run of a few steps, with its checkpoint."""
    folder = tmp_path_factory.mktemp("base")
    config = tiny_run(
        write_words(tmp_path_factory.mktemp("text")),
        MODEL,
        job={"dump_folder": str(folder)},
        checkpoint={"enable": True, "interval": 100},
        metrics=QUIET,
    )
    train(*NAMES, config)
    return config


def adapted(base: RunConfig[Any], folder: Path, **sections: Any) -> RunConfig[Any]:
    config = replace(
        base,
        job=replace(base.job, dump_folder=str(folder)),
        lora=replace(base.lora, rank=4, alpha=8.0, base=base.job.dump_folder),
        checkpoint=replace(base.checkpoint, interval=3),
        training=replace(base.training, steps=6, seed=5),
    )
    return replace(config, **{name: replace(getattr(config, name), **changes) for name, changes in sections.items()})


def tensors(folder: str | Path, step: int) -> dict[str, torch.Tensor]:
    stored = CheckpointManager(folder, 1, 0).open(step)
    return {name: stored.read_tensor(name) for name in stored.layout.tensors if not name.startswith("random.")}


def test_checkpoints_have_adapters_alone_and_resume_exactly(base: RunConfig[Any], tmp_path: Path) -> None:
    train(*NAMES, adapted(base, tmp_path / "undisturbed"))
    stopped = adapted(base, tmp_path / "resumed", debug={"stop_after": 3})
    train(*NAMES, stopped)
    train(*NAMES, adapted(base, tmp_path / "resumed"))
    expected, found = tensors(tmp_path / "undisturbed", 6), tensors(tmp_path / "resumed", 6)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert all(is_adapter(name) for name in found)
    assert {name.split(".")[0] for name in found} == {"model", "optimizer"}
    assert any(found[name].any() for name in found if name.startswith("model.") and name.endswith("_b"))


def test_generation_has_base_and_adapters(base: RunConfig[Any], tmp_path: Path) -> None:
    config = adapted(base, tmp_path)
    train(*NAMES, config)
    model, plain = load_model(tmp_path, config, None), load_model(Path(base.job.dump_folder), base, None)
    weights, adapters = plain.state_dict(), tensors(tmp_path, 6)
    for name, tensor in model.state_dict().items():
        expected = weights[name]
        if f"model.{name}_lora_a" in adapters:
            expected = expected + 2.0 * (adapters[f"model.{name}_lora_b"] @ adapters[f"model.{name}_lora_a"])
            assert not torch.equal(tensor, weights[name])
        torch.testing.assert_close(tensor, expected)


def test_generation_needs_no_library_that_training_needed(base: RunConfig[Any], tmp_path: Path) -> None:
    config = adapted(base, tmp_path, training={"steps": 1})
    train(*NAMES, config)
    elsewhere = replace(config, model=tiny_model(moe={**MOE, "dispatcher": "deep_ep", "experts_backend": "triton"}))
    expected = load_model(tmp_path, config, None).state_dict()
    for name, tensor in load_model(tmp_path, elsewhere, None).state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_other_base_weights_are_refused(base: RunConfig[Any], tmp_path: Path) -> None:
    config = adapted(base, tmp_path / "run")
    train(*NAMES, config)
    other = replace(base, job=replace(base.job, dump_folder=str(tmp_path / "other")))
    train(*NAMES, replace(other, training=replace(other.training, steps=7)))
    moved = adapted(other, tmp_path / "run", training={"steps": 9})
    with pytest.raises(ValueError, match=r"trained on other weights, step 8 of .*, than those of step 7 of") as raised:
        train(*NAMES, moved)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="trained on other weights"):
        load_model(tmp_path / "run", moved, None)


def test_base_that_can_not_be_is_one_line(base: RunConfig[Any], tmp_path: Path) -> None:
    def problems(**lora: Any) -> list[str]:
        return run_problems(adapted(base, tmp_path / "run", lora=lora))

    assert problems() == []
    assert "has no config.json: give a Hugging Face folder, a run or a checkpoint" in problems(base=str(tmp_path))[0]
    assert "there is no complete checkpoint" in problems(base_step=77)[0]
    assert problems(base="") == [
        "lora.base is missing: give the folder of the model to adapt, of a run or of Hugging Face"
    ]
    assert problems(rank=0) == ["lora.base needs rank above 0"]
    same = adapted(base, Path(base.job.dump_folder))
    assert "adapters need a run folder of their own" in run_problems(same)[0]
    config_io.save(tmp_path / "config.json", *NAMES, adapted(base, tmp_path))
    assert "that run has adapters itself" in problems(base=str(tmp_path))[0]


def test_options_of_the_command_line_reach_the_section(base: RunConfig[Any]) -> None:
    where = f"--lora.base {base.job.dump_folder} --config-file {base.job.dump_folder}/config.json --job.dump_folder new"
    command = resolve(f"{where} --lora.rank 3 --lora.targets *.experts.* *.wo.weight".split())
    assert command.run_config.lora.rank == 3
    assert command.run_config.lora.targets == ("*.experts.*", "*.wo.weight")
