"""Text that a run's model generates, and where it is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from spurline.models.common.generate import generate, printable
from spurline.models.common.sampling import Sampling
from spurline.train.answers import write_answers
from spurline.train.captions import write_captions
from spurline.train.metrics.jsonl import drop_lines_after

SAMPLES_FILE = "samples.jsonl"

if TYPE_CHECKING:
    from spurline.train.trainer import Trainer


def sample_text(trainer: Trainer) -> str:
    """A continuation of metrics.sample_prompt and, if the held-out data has pictures, captions of some of them.

    For conversations, answers to held-out questions instead.
    """
    metrics, training, tokenizer = trainer.config.metrics, trainer.config.training, trainer.data.tokenizer
    if (asked := trainer.data.questions) and asked.questions:
        with torch.compiler.set_stance("force_eager"):
            return "\n".join(write_answers(trainer.model, asked, metrics.sample_tokens, training.seq_len))
    prompt = [tokenizer.boundary_id, *tokenizer.encode(metrics.sample_prompt).tolist()]
    # The length grows token by token: compiling for that takes longer than it saves.
    with torch.compiler.set_stance("force_eager"):
        # No token ends the text: all ranks must take the same number of steps, even if one of them rounds differently.
        (written,) = generate(
            trainer.model,
            [prompt],
            metrics.sample_tokens,
            sampling=Sampling(metrics.sample_temperature),
            seed=training.seed,
            max_context=training.seq_len,
        )
        captions = list(write_captions(trainer.model, trainer.data, trainer.device))
    of_pictures = [f"a picture of {caption.true!r}: {caption.written!r}" for caption in captions]
    return "\n".join([printable(tokenizer.decode(prompt + written)), *of_pictures])


def drop_samples_after(folder: Path, step: int) -> None:
    """Remove the samples of later steps, which a run that resumes after `step` writes again."""
    path = folder / SAMPLES_FILE
    if path.exists():
        drop_lines_after(path, step)


def append_sample(folder: Path, step: int, text: str) -> None:
    """Add a sample to the run's samples.jsonl, which the report shows."""
    with (folder / SAMPLES_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "text": text}) + "\n")
