"""`spurline routing` on a tiny trained model: the statistics of what its routers decide."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spurline import config_io
from spurline.cli import main
from spurline.moe.balance import routers
from spurline.testing.tiny import tiny_model, tiny_run, write_words
from spurline.tools.generate import load_model
from spurline.train.run import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    config = tiny_run(
        write_words(tmp_path_factory.mktemp("text")),
        tiny_model(num_mtp_layers=1),
        job={"dump_folder": str(folder)},
        training={"steps": 2},
        checkpoint={"enable": True},
        metrics={"validation_batches": 0, "sample_tokens": 0, "tensorboard": False},
    )
    train("deepseek_v3", "deepseek_v3_debugmodel", config)
    return folder


def test_shares_are_those_of_the_routers(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "ein satin tern " * 3
    (tmp_path / "own.txt").write_text(text)
    page = tmp_path / "page.html"
    capsys.readouterr()
    assert main(["routing", str(run), str(tmp_path / "own.txt"), "--out", str(page), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"layers.1.moe", "layers.2.moe"}

    config = config_io.load(run / "config.json")[2]
    model = load_model(run, config, None)
    counts = dict.fromkeys(found, torch.zeros(8))
    for layer, router in routers(model).items():
        if layer in counts:
            router.register_forward_hook(
                lambda _, __, routing, layer=layer: counts.update({layer: counts[layer] + routing.count_E})
            )
    from spurline.data import open_data

    data = open_data(replace(config.data, path=str(tmp_path / "own.txt"), validation_fraction=0.0), 16, 0).train
    with torch.no_grad():
        for number in range(len(data.windows)):
            model(data.batch(number, 1).tokens_BL)
    for layer, experts in found.items():
        shares = torch.tensor([expert["share"] for expert in experts])
        torch.testing.assert_close(shares, counts[layer] / counts[layer].sum(), rtol=1e-5, atol=1e-6)
        letters = {token["text"] for expert in experts for token in expert["tokens"]}
        assert letters <= {*text, ""} or any(letter in text for letter in letters)
    assert "layers.2.moe" in page.read_text()


def test_what_can_not_be_shown_is_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def says(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["routing", *arguments]) == 2
        return capsys.readouterr().err

    assert "expected RUN and maybe DATA" in says()
    assert "no such folder" in says(str(tmp_path / "nowhere"))
    assert "nothing.txt" in says(str(run), str(tmp_path / "nothing.txt"))
    assert "--tokens must be at least 1" in says(str(run), "--tokens", "0")
    assert "there is no folder" in says(str(run), "--out", str(tmp_path / "no" / "page.html"))
