"""Parameters that are frozen by name: they stay as they are, and cost neither gradients nor optimizer state."""

from pathlib import Path

import pytest
import torch

from spurline.config_io import ConfigError
from spurline.testing.tiny import tiny_model, tiny_run, write_words
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.freezing import freeze
from spurline.train.trainer import Trainer, make_trainer

BALANCED = tiny_model(moe={"bias_update_rate": 1e-2, "aux_loss": "sequence"})


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp("text"))


def frozen_trainer(text: Path, *patterns: str) -> Trainer:
    return make_trainer(tiny_run(text, BALANCED, training={"freeze": patterns}))


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def test_frozen_parameters_stay_and_all_others_move(text: Path) -> None:
    trainer = frozen_trainer(text, "layers.0.*|embedding.*", "*.experts.*", "!*.experts.w2_EDF")
    before = state(trainer)
    for step in (1, 2, 3):
        trainer.step(step)
    after = state(trainer)
    stayed = {name for name in before if torch.equal(before[name], after[name])}
    expected = {name for name in before if name.startswith(("layers.0.", "embedding."))}
    expected |= {name for name in before if ".experts.w1" in name or ".experts.w3" in name}
    assert stayed == expected
    assert any("experts.w2_EDF" in name for name in before.keys() - stayed)


def test_frozen_parameters_take_no_gradient_and_no_optimizer_state(text: Path) -> None:
    trainer = frozen_trainer(text, "*", "!*.router.*")
    named = dict(trainer.model.named_parameters())
    trained = {name for name, parameter in named.items() if parameter.requires_grad}
    trainer.optimizer.register_step_pre_hook(
        lambda *_: gradients.update(name for name, parameter in named.items() if parameter.grad is not None)
    )
    gradients: set[str] = set()
    trainer.step(1)
    assert trained == gradients == {name for name in named if ".router." in name}
    assert {id(p) for p in trainer.optimizer.state} == {id(named[name]) for name in trained}


def test_frozen_gradients_are_those_of_full_training(text: Path) -> None:
    """Freezing changes what is kept, not what is computed: trained parameters have the gradients they would have."""
    found = []
    for patterns in ((), ("layers.1.*", "output.*", "*.attention.*")):
        trainer = frozen_trainer(text, *patterns)
        batches = trainer.micro_batches(1)
        trainer.accumulate_gradients(batches, trainer.count_tokens(batch.labels_BL for batch in batches))
        found.append({name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None})
    full, partial = found
    assert 0 < len(partial) < len(full)
    for name, gradient in partial.items():
        torch.testing.assert_close(gradient, full[name], rtol=1e-6, atol=1e-9)


def test_bias_of_a_frozen_router_stays(text: Path) -> None:
    moved = {}
    for patterns in (("layers.1.moe.router.*",), ("layers.1.moe.experts.*",)):
        trainer = frozen_trainer(text, *patterns)
        trainer.step(1)
        moved[patterns[0]] = [bool(trainer.model.layers[n].moe.router.expert_bias_E.any()) for n in ("1", "2")]
    assert moved == {"layers.1.moe.router.*": [False, True], "layers.1.moe.experts.*": [True, True]}


def test_checkpoint_of_a_frozen_run_resumes_exactly_and_loads_into_a_full_run(text: Path, tmp_path: Path) -> None:
    undisturbed, first, second = (frozen_trainer(text, "*.experts.*") for _ in range(3))
    for step in (1, 2, 3, 4):
        undisturbed.step(step)
    for step in (1, 2):
        first.step(step)
    checkpoints = CheckpointManager(tmp_path, interval=1, keep_latest_k=0)
    checkpoints.save(2, first.model, first.optimizer, {})
    checkpoints.load(2, second.model, second.optimizer)
    full = frozen_trainer(text)
    checkpoints.load(2, full.model, full.optimizer)  # experts begin without optimizer state
    for step in (3, 4):
        second.step(step)
        full.step(step)
    expected = state(undisturbed)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state(second).items())
    assert not torch.equal(state(full)["layers.1.moe.experts.w1_EFD"], expected["layers.1.moe.experts.w1_EFD"])


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        (("*.expert.*",), r"'\*.expert.\*': it matches no parameter; names look like layers.*experts"),
        (("*.experts.*", "!*.gates_ED"), r"'\*.gates_ED': it matches no parameter"),
        (("!*.router.*",), "exceptions; add what is to be frozen"),
        (("*",), "no parameter is left to train"),
    ],
)
def test_pattern_that_can_not_be_is_one_line(patterns: tuple[str, ...], says: str) -> None:
    with torch.device("meta"):
        model = BALANCED.build()
    with pytest.raises(ConfigError, match=says) as caught:
        freeze(model, patterns)
    assert len(caught.value.problems) == 1
