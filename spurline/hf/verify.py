"""Verify a conversion: compare our model's logits with those of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from spurline.models.common.decoder_config import DecoderConfig
from spurline.models.common.init import build_to_load
from spurline.train.checkpoint.manager import CheckpointManager

TOLERANCE = 1e-3
"""Relative to the largest logit: far above rounding differences, far below the effect of a wrong weight."""


def compare_logits(
    model: DecoderConfig, run: Path, step: int, hf_folder: Path, dtype: torch.dtype | None = None
) -> str:
    """Run both models in float32 on the same random tokens; returns a summary, or raises a ValueError if they differ.

    The weights of both are rounded to `dtype`, as in the conversion. Both models are held in memory.
    """
    tokens_BL = torch.randint(model.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours_BLV = _rounded(_our_model(model, run, step), dtype)(tokens_BL)
        theirs_BLV = _rounded(_their_model(hf_folder), dtype)(tokens_BL).logits
    difference, largest = (ours_BLV - theirs_BLV).abs().max().item(), theirs_BLV.abs().max().item()
    if not difference <= TOLERANCE * largest:
        raise ValueError(
            f"the logits differ from those of transformers by up to {difference:.3g} (the largest is {largest:.3g}):"
            " the models are not equivalent, so nothing was written"
        )
    return f"verified: the logits differ from those of transformers by at most {difference:.2g} (largest {largest:.3g})"


def _our_model(model: DecoderConfig, run: Path, step: int) -> Any:
    ours = build_to_load(model, "cpu").eval()
    CheckpointManager(run, interval=1, keep_latest_k=0).load(step, ours, None)
    return ours


def _rounded(model: Any, dtype: torch.dtype | None) -> Any:
    for parameter in model.parameters() if dtype else ():
        parameter.copy_(parameter.to(dtype))
    return model


def _their_model(folder: Path) -> Any:
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError:
        raise ValueError("--verify needs the package transformers: pip install transformers") from None
    disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
