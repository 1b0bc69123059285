"""Metrics for Weights & Biases, or in its format in `<run>/wandb/` without a network."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spurline.train.metrics.scalars import scalars


class WandbWriter:
    """Takes the same records as JsonlWriter. A resumed run continues under its old id.

    W&B accepts each step once, so its values for steps after the checkpoint stay as they are.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        mode: str,
        project: str,
        config: Mapping[str, Any],
        resume_from_step: int | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise ValueError(
                "metrics.wandb: the package wandb is not installed: pip install 'spurline[wandb]'"
            ) from None
        folder = Path(folder)
        id_file = folder / "wandb_id"
        known_id = id_file.read_text().strip() if resume_from_step is not None and id_file.exists() else None
        self._run = wandb.init(
            project=project,
            name=folder.name,
            dir=str(folder),
            config=dict(config),
            mode=mode,
            id=known_id,
            resume="allow" if known_id else None,
        )
        id_file.write_text(f"{self._run.id}\n")

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log(dict(scalars(record)), step=record["step"])
        for warning in record.get("warnings", ()):
            self._run.alert(title="Spurline", text=warning)

    def close(self) -> None:
        self._run.finish()
