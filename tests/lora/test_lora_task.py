"""A model that has learned to copy letters is taught to shift them: by all its weights, and by adapters alone."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spurline.config import Data, Lora, LRScheduler, Metrics, Optimizer, RunConfig, Training
from spurline.data.tokenizer import ByteTokenizer
from spurline.models.common.init import initialize_parameters
from spurline.models.qwen3.configs import Qwen3MoEConfig
from spurline.moe.config import MoEConfig
from spurline.train.freezing import num_parameters
from spurline.train.trainer import Trainer, make_trainer

LETTERS = "abcdefghij"
MOE = MoEConfig(hidden_dim=128, num_experts=4, top_k=2, route_norm=True, aux_loss="batch")
MODEL = Qwen3MoEConfig(vocab_size=260, dim=128, num_layers=2, num_kv_heads=2, head_dim=32, moe=MOE)


def text(shift: int, count: int, seed: int) -> str:
    """'abc>bcd;' with shift 1."""
    draw = random.Random(seed)
    words = ["".join(draw.choices(LETTERS, k=3)) for _ in range(count)]
    return "".join(f"{word}>{''.join(LETTERS[(LETTERS.index(c) + shift) % 10] for c in word)};" for word in words)


def trainer_on(folder: Path, shift: int, steps: int, lr: float, lora: Lora) -> Trainer:
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(text(shift, 20_000, seed=shift))
    config: RunConfig[Any] = RunConfig(
        model=MODEL,
        training=Training(steps=steps, seq_len=48, local_batch_size=8, threads=1),
        optimizer=Optimizer(lr=lr, weight_decay=0.0),
        lr_scheduler=LRScheduler(warmup_steps=10, decay_ratio=0.5),
        data=Data(path=str(folder), validation_fraction=0.0),
        metrics=Metrics(layer_times=False),
        lora=lora,
    )
    return make_trainer(config)


def train_from(trainer: Trainer, weights: dict[str, torch.Tensor]) -> Trainer:
    initialize_parameters(trainer.model, 0)
    trainer.model.load_state_dict(weights, strict=False)
    for step in range(1, trainer.config.training.steps + 1):
        trainer.step(step)
    trainer.tally.read()
    return trainer


@torch.no_grad()
def exact_answers(model: Any, shift: int) -> float:
    """Of new words, behind four examples, the share whose three letters are each the most likely next one."""
    tokenizer, exact = ByteTokenizer(), 0
    model.eval()
    for number in range(60):
        tokens = torch.tensor([[tokenizer.boundary_id, *map(int, tokenizer.encode(text(shift, 5, 1000 + number)))]])
        predicted = model(tokens)[0].argmax(-1)
        exact += torch.equal(predicted[-5:-2], tokens[0, -4:-1])
    return exact / 60


@pytest.mark.slow
def test_adapters_learn_what_all_weights_learn(tmp_path: Path) -> None:
    base = train_from(trainer_on(tmp_path / "copy", 0, 300, 3e-3, Lora()), {})
    weights = {name: tensor.clone() for name, tensor in base.model.state_dict().items()}
    assert exact_answers(base.model, 0) > 0.95
    assert exact_answers(base.model, 1) < 0.05
    full = train_from(trainer_on(tmp_path / "shift", 1, 200, 1e-3, Lora()), weights)
    lora = train_from(trainer_on(tmp_path / "shift", 1, 200, 1e-2, replace(Lora(), rank=2, alpha=8.0)), weights)
    assert num_parameters(lora.model)[0] < 0.05 * MODEL.num_params()
    assert exact_answers(full.model, 1) > 0.95
    assert exact_answers(lora.model, 1) > 0.95
    frozen = {name: tensor for name, tensor in lora.model.state_dict().items() if name in weights}
    assert all(torch.equal(tensor, weights[name]) for name, tensor in frozen.items())
