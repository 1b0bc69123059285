"""One way to build tiny models, runs and text for tests: DeepSeek-V3-style models that learn in seconds on a CPU."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from spurline.config import Checkpoint, Data, LRScheduler, Metrics, Optimizer, RunConfig, Training
from spurline.models.deepseek_v3.configs import DeepSeekV3Config
from spurline.moe.config import MoEConfig

_MODEL: dict[str, Any] = {
    "vocab_size": 260,
    "dim": 16,
    "num_layers": 3,
    "num_dense_layers": 1,
    "dense_hidden_dim": 24,
    "num_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
}


def tiny_moe(**changes: Any) -> MoEConfig:
    """8 experts of hidden width 16, top-2, and one shared expert."""
    return replace(MoEConfig(hidden_dim=16, num_experts=8, top_k=2, num_shared_experts=1), **changes)


def tiny_model(moe: MoEConfig | dict[str, Any] | None = None, **changes: Any) -> DeepSeekV3Config:
    """The config of a model with one dense and two MoE layers; `moe` is a config, or changes to `tiny_moe()`."""
    experts = moe if isinstance(moe, MoEConfig) else tiny_moe(**(moe or {}))
    return DeepSeekV3Config(**(_MODEL | {"moe": experts} | changes))


def tiny_run(text_folder: str | Path, model: DeepSeekV3Config | None = None, **sections: Any) -> RunConfig[Any]:
    """The config of a short run on the text files of a folder; a section is a config or a dict of changes.

    It saves no checkpoints unless `checkpoint` enables them.
    """
    config = RunConfig(
        model=model or tiny_model(),
        training=Training(steps=8, seq_len=16, local_batch_size=4, threads=1),
        optimizer=Optimizer(lr=4e-3),
        lr_scheduler=LRScheduler(warmup_steps=4),
        checkpoint=Checkpoint(enable=False),
        data=Data(path=str(text_folder), validation_fraction=0.1),
        metrics=Metrics(validation_batches=3, sample_tokens=8, sample_prompt="ten "),
    )
    changed = {
        name: replace(getattr(config, name), **section) if isinstance(section, dict) else section
        for name, section in sections.items()
    }
    return replace(config, **changed)


def write_words(folder: str | Path, *names: str, num_words: int = 500) -> Path:
    """Write text files of made-up words, the same in every call; returns the folder."""
    words = random.Random(0)
    for name in names or ("a", "b", "c"):
        text = " ".join("".join(words.choices("aeinrst", k=words.randint(1, 6))) for _ in range(num_words))
        Path(folder, f"{name}.txt").write_text(text)
    return Path(folder)
