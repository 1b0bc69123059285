"""Dense models that become mixtures of experts: the same function at step 0, and one that training can change."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from their_models import load, logits, make, save

from spurline import config_io
from spurline.cli import main
from spurline.models.qwen3.configs import Qwen3Config, Qwen3MoEConfig, qwen3_debugmodel
from spurline.testing.equivalence import relative_error
from spurline.testing.tiny import tiny_model, write_words
from spurline.tools.generate import load_model
from spurline.train.run import train


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense run folder, trained for two steps."""
    folder = tmp_path_factory.mktemp("dense")
    start = qwen3_debugmodel()
    model = Qwen3Config(vocab_size=260, dim=16, num_layers=2, dense_hidden_dim=24, num_kv_heads=2, head_dim=4)
    config = replace(
        start,
        model=model,
        job=replace(start.job, dump_folder=str(folder)),
        training=replace(start.training, steps=2, seq_len=32, local_batch_size=2),
        data=replace(start.data, path=str(write_words(tmp_path_factory.mktemp("text")))),
        checkpoint=replace(start.checkpoint, enable=True),
        metrics=replace(start.metrics, validation_batches=0, sample_tokens=0, report=False, tensorboard=False),
    )
    train("qwen3", "qwen3_debugmodel", config)
    return folder


def run_of(folder: Path) -> tuple[Any, Any]:
    config = config_io.load(folder / "config.json")[2]
    return config, load_model(folder, config, None)


def run_logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return run_of(folder)[1](torch.randint(250, (2, 30), generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    "options",
    [
        "--experts 4 --top_k 2",
        "--experts 8 --top_k 4 --split 2 --dense_layers 1",
        "--experts 6 --top_k 3 --split 3 --router_std 1",
        "--experts 4 --top_k 1",
    ],
)
def test_upcycled_model_computes_what_the_dense_one_does(dense: Path, tmp_path: Path, options: str) -> None:
    out = tmp_path / "moe"
    assert main(["convert", "upcycle", str(dense), str(out), *options.split(), "--verify"]) == 0
    config, model = run_of(out)
    assert isinstance(config.model, Qwen3MoEConfig)
    assert relative_error(run_logits(out), run_logits(dense)) < 1e-5
    gate = model.layers["1"].moe.router.gate_ED
    split = int(options.split("--split ")[1].split()[0]) if "split" in options else 1
    assert len(torch.unique(gate, dim=0)) == config.model.moe.num_experts // split


def test_noise_and_seed_change_the_copies(dense: Path, tmp_path: Path) -> None:
    found = []
    for seed, noise in ((0, 0.1), (1, 0.1), (0, 0.1)):
        out = tmp_path / str(len(found))
        command = f"convert upcycle {dense} {out} --experts 4 --noise {noise} --seed {seed} --verify"
        assert main(command.split()) == 0
        found.append(run_of(out)[1].layers["0"].moe.experts.w1_EFD.detach())
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0][0], found[0][1])
    spread = (found[0] - found[0].mean(0)).std() / found[0].std()
    assert 0.05 < spread < 0.15
    assert relative_error(run_logits(tmp_path / "0"), run_logits(dense)) > 1e-4


def test_upcycled_run_trains_and_its_experts_part(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "moe"
    assert main(f"convert upcycle {dense} {out} --experts 4 --router_std 0.5".split()) == 0
    config, before = run_of(out)
    experts = before.layers["0"].moe.experts.w1_EFD.detach()
    assert torch.equal(experts[0], experts[3])
    family, preset, _ = config_io.load(out / "config.json")
    train(family, preset, replace(config, training=replace(config.training, steps=3)))
    after = run_of(out)[1].layers["0"].moe.experts.w1_EFD.detach()
    assert (after[0] - after[3]).abs().max() > 1e-4


@pytest.mark.parametrize(
    "name", ["llama", pytest.param("qwen3", marks=pytest.mark.slow), pytest.param("qwen2", marks=pytest.mark.slow)]
)
def test_hugging_face_folder_becomes_one_of_a_sparse_class(tmp_path: Path, name: str) -> None:
    """Through our run folder and back: `transformers` computes with experts what it computed without."""
    theirs = save(make(name), tmp_path / "theirs")
    assert main(f"convert upcycle {theirs} {tmp_path / 'moe'} --experts 4 --top_k 2 --verify".split()) == 0
    assert main(f"convert to-hf {tmp_path / 'moe'} {tmp_path / 'out'} --verify".split()) == 0
    upcycled = load(tmp_path / "out")
    assert upcycled.config.num_experts_per_tok == 2
    assert relative_error(logits(upcycled), logits(load(theirs))) < 1e-5


def test_sparse_folder_is_refused_by_its_own_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = save(make("qwen3_moe"), tmp_path / "theirs")
    assert main(f"convert upcycle {theirs} {tmp_path / 'moe'}".split()) == 2
    assert f"{theirs} already has experts: upcycling begins with a dense model" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [theirs]


def test_latent_attention_model_is_upcycled_within_its_family() -> None:
    from spurline.hf.upcycling import Recipe, sparse_model

    family, _, model = sparse_model("deepseek_v3", tiny_model(num_dense_layers=3), Recipe(experts=4, dense_layers=1))
    assert family == "deepseek_v3"
    assert [model.moe_of_layer(layer) is not None for layer in range(3)] == [False, True, True]
    assert model.problems() == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--experts 6 --top_k 2 --split 4", "--experts 6 is not a multiple of --split 4"),
        ("--top_k 9", "--top_k 9 is larger than --experts 8"),
        ("--split 5 --experts 10 --top_k 5", "--split 5 does not divide the model's dense_hidden_dim 24"),
        ("--dense_layers 2", "--dense_layers must be between 0 and 1, got 2"),
        ("--noise -1", "--noise"),
    ],
)
def test_recipe_that_can_not_be_is_refused(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, says: str
) -> None:
    assert main(f"convert upcycle {dense} {tmp_path / 'moe'} {options}".split()) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "moe").exists()
