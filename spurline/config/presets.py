"""Named sets of options that a command line applies before its own: `--preset finetune`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from spurline.config.run import RunConfig

FROZEN_ROUTER = "*.router.* lr_factor=0"


def finetune(run: RunConfig[Any]) -> RunConfig[Any]:
    """Settings for fine-tuning trained weights: a low learning rate, no weight decay, and a frozen router.

    Routing stays as pretrained: gates are frozen, the selection bias is not updated, and no balance loss affects the
    hidden states. Attention does not cross the boundaries of conversations or documents within a sequence.
    """
    has_router = run.model.parallel_facts().num_experts > 0
    model = run.model
    if has_router:
        model = replace(model, moe=replace(model.moe, bias_update_rate=0.0, aux_loss="none", z_loss_weight=0.0))
    return replace(
        run,
        model=model,
        optimizer=replace(
            run.optimizer, name="adamw", lr=2e-5, weight_decay=0.0, groups=(FROZEN_ROUTER,) if has_router else ()
        ),
        lr_scheduler=replace(
            run.lr_scheduler, warmup_steps=20, decay_ratio=1.0, decay_type="cosine", min_lr_factor=0.1
        ),
        data=replace(run.data, mask_documents=run.data.kind != "pictures"),
        checkpoint=replace(run.checkpoint, enable=True),
    )


PRESETS: dict[str, Callable[[RunConfig[Any]], RunConfig[Any]]] = {"finetune": finetune}
