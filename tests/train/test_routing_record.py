"""Routing decisions that are recorded and replayed: the same experts, whatever the weights say."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spurline.config import RunConfig
from spurline.moe.balance import routers
from spurline.testing.tiny import tiny_model, tiny_run, write_words
from spurline.train.routing_record import Shape, read_step
from spurline.train.trainer import make_trainer

MODEL = tiny_model(num_mtp_layers=1, moe={"bias_update_rate": 1e-2})


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp("text"))


def config(text: Path, **debug: Any) -> RunConfig[Any]:
    training = {"local_batch_size": 2, "global_batch_size": 4}
    return tiny_run(text, MODEL, training=training, debug=debug, activation_checkpoint={"mode": "full"})


def run(config: RunConfig[Any], steps: int = 2) -> list[dict[str, Any]]:
    trainer = make_trainer(config)
    return [trainer.step(step).read() for step in range(1, steps + 1)]


def shape_of(folder: Path) -> Shape:
    return Shape(**json.loads((folder / "routing.json").read_text()))


@pytest.fixture(scope="module")
def recorded(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("recordings") / "first"
    return folder, run(config(text, record_routing=str(folder), record_routing_weights=True))


def test_recording_has_what_routers_decided(text: Path, recorded: tuple[Path, list[dict[str, Any]]]) -> None:
    """Seen by hooks of our own: with recomputation, two micro-batches, and a module that predicts further."""
    trainer = make_trainer(config(text))
    seen: dict[str, list[Any]] = {}
    for layer, router in routers(trainer.model).items():
        router.register_forward_hook(lambda _, __, routing, layer=layer: seen.setdefault(layer, []).append(routing))
    trainer.step(1)
    found = read_step(recorded[0], 1, shape_of(recorded[0]))
    assert found.keys() == seen.keys() == {"layers.1.moe", "layers.2.moe", "mtp.0.block.moe"}
    with np.load(recorded[0] / "step-00000001-rank-00000.npz") as arrays:
        assert arrays["ids/layers.1.moe"].dtype == np.uint8
        for layer, routings in seen.items():
            once = routings[::2]  # a backward pass computes each a second time
            length = 15 if layer.startswith("mtp") else 16
            expected = torch.cat([routing.expert_TK.view(2, length, 2) for routing in once])
            assert (found[layer][:, :length] == expected.numpy()).all()
            weights = torch.cat([routing.weight_TK.view(2, length, 2) for routing in once]).detach()
            assert (arrays[f"weights/{layer}"] == weights.numpy()).all()


def test_replaying_the_same_run_changes_nothing(text: Path, recorded: tuple[Path, list[dict[str, Any]]]) -> None:
    replayed = run(config(text, replay_routing=str(recorded[0])))
    assert [record["loss"] for record in replayed] == [record["loss"] for record in recorded[1]]


def test_other_weights_visit_the_recorded_experts(text: Path, recorded: tuple[Path, list[dict[str, Any]]]) -> None:
    """With another seed each router would decide otherwise; weights are those of the new scores, and are trained."""
    folder, records = recorded
    other = config(text, replay_routing=str(folder))
    other = replace(other, training=replace(other.training, seed=9))
    trainer = make_trainer(other, data=make_trainer(config(text)).data)
    before = {name: r.gate_ED.detach().clone() for name, r in routers(trainer.model).items()}
    found = [trainer.step(step).read() for step in (1, 2)]
    assert [record["expert_load"] for record in found] == [record["expert_load"] for record in records]
    assert found[0]["loss"] != records[0]["loss"]
    assert all(not torch.equal(r.gate_ED, before[name]) for name, r in routers(trainer.model).items())


def test_validation_between_steps_is_not_on_the_tape(text: Path, recorded: tuple[Path, list[dict[str, Any]]]) -> None:
    from spurline.train.validation import validate

    trainer = make_trainer(config(text, replay_routing=str(recorded[0])))
    plain = make_trainer(config(text))
    assert validate(trainer) == validate(plain)


def test_what_does_not_fit_is_one_line(text: Path, recorded: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    folder = recorded[0]

    def says(changed: RunConfig[Any], steps: int = 1) -> str:
        with pytest.raises(ValueError, match=r"\w") as raised:
            run(changed, steps)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    replaying = config(text, replay_routing=str(folder))
    assert "there is no recording of step 3" in says(replaying, 3)
    longer = replace(replaying, training=replace(replaying.training, seq_len=12))
    assert "seq_len is 16 in the recording, 12 in the run" in says(longer)
    larger = replace(replaying, training=replace(replaying.training, global_batch_size=8))
    assert "sequences is 4 in the recording, 8 in the run" in says(larger)
    wider = replace(replaying, model=replace(MODEL, moe=replace(MODEL.moe, num_experts=4)))
    assert "layers.1.moe has 8 experts, 2 a token in the recording, 4 experts, 2 a token" in says(wider)
    assert "not a recording of routing" in says(config(text, replay_routing=str(tmp_path)))
    (tmp_path / "file").touch()
    assert "not an empty folder" in says(config(text, record_routing=str(tmp_path)))
    compiled = replace(replaying, compile=replace(replaying.compile, enable=True))
    assert "need eager blocks" in says(compiled)

    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "step-00000001-rank-00000.npz").write_bytes(b"PK\x03\x04 no")
    assert "is damaged" in says(config(text, replay_routing=str(copy)))
