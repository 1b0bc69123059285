"""The results of a run that must not depend on interruptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from spurline.train.checkpoint.layout import read_layout

# Metrics that are reproducible bit for bit; the others are time and memory.
REPEATABLE = ("step", "loss", "balance_loss", "grad_norm", "lr", "expert_load", "tokens_seen", "validation_loss")


class RunResult(NamedTuple):
    metrics: list[dict[str, Any]]
    tensors: dict[str, list[bytes]]
    """Parameters, buffers and optimizer state of the last checkpoint, by name, one entry per chunk."""


def run_result(folder: Path) -> RunResult:
    """Read the results from a run folder."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = max((folder / "checkpoints").glob("step-*"))
    content = {path.name: path.read_bytes() for path in last.iterdir()}
    layout = read_layout(last, {name: len(data) for name, data in content.items()})
    tensors = {
        name: [content[chunk.place.file][chunk.place.begin :][: chunk.place.num_bytes] for chunk in tensor.chunks]
        for name, tensor in layout.tensors.items()
        if not name.startswith("random.")
    }
    return RunResult([{key: record[key] for key in REPEATABLE if key in record} for record in records], tensors)
