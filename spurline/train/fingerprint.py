"""The fingerprint of a run: the options and the data that affect its numbers. Free of torch.

A checkpoint stores it, and a run that resumes is compared with it. An option that is in neither of the two lists below
is compared, so new options are safe by default.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from spurline.config import RunConfig
from spurline.data import DataSets
from spurline.moe.config import SAME_NUMBERS, MoEConfig
from spurline.typed_json import flattened, shown

FREE = (
    # Where the run writes, what it writes, and who looks at it.
    *("job.*", "checkpoint.*", "metrics.*", "profile.*"),
    # How the same numbers are computed: ranks, devices, compilation, recomputation.
    *("parallelism.*", "comm.*", "compile.*", "activation_checkpoint.*"),
    *(
        "training.local_batch_size",
        "training.threads",
        "training.gc_freq",
        "training.keep_freed_memory",
        "training.device",
    ),
    *("training.on_bad_step", "training.max_bad_steps", "training.on_loss_spike", "training.loss_spike_*"),
    "training.max_step_backs",
    *("debug.stop_after", "debug.deterministic", "debug.separate_expert_units"),
    *("debug.check_replicas_interval", "debug.record_routing*"),
    # Where the weights of a base model are: their values are compared.
    *("lora.base", "lora.base_step"),
    # Where the data is: its content is compared.
    *("data.path", "data.pattern", "data.text_field"),
    # How experts are computed and rows dispatched, unless rows may be dropped (`_capacity`); loading the model reports
    # these.
    *(f"model.moe.{name}" for name in (*SAME_NUMBERS, "dispatcher")),
)
"""Options that may change without being reported."""
REPORTED = ("training.steps", "training.global_batch_size")
"""Options that may change, and are then reported: they alter the learning-rate schedule, or the noise of a step."""


def fingerprint(config: RunConfig[Any], global_batch_size: int, data: DataSets) -> dict[str, Any]:
    """Options and data that affect the run's numbers, by dotted name, as JSON returns them."""
    content = {
        **flattened(dataclasses.asdict(config)),
        "training.global_batch_size": global_batch_size,  # by default it depends on the number of ranks
        "data.tokenizer": data.tokenizer.fingerprint,
        "data.num_documents": data.num_documents,
        "data.num_tokens": data.num_tokens,
        "data.content": data.fingerprint(),
    }
    plain: dict[str, Any] = json.loads(json.dumps(content))
    compared = {name: value for name, value in plain.items() if not _is_one_of(name, FREE)}
    return compared | _capacity(config.model)


def check_fingerprint(
    stored: object, current: Mapping[str, Any], step: int, allow_changes: bool, say: Callable[[str], None]
) -> None:
    """Compare the fingerprint in the checkpoint of `step` with the current run: a ValueError lists what differs.

    Allowed differences are reported. Checkpoints of earlier versions have no fingerprint and are accepted as they are,
    and options that only one of the two versions knows are not compared.
    """
    if not isinstance(stored, dict):
        return
    changed = [name for name in current if name in stored and stored[name] != current[name]]
    lines = {name: f"{name}: {shown(stored[name])} -> {shown(current[name])}" for name in changed}
    refused = [line for name, line in lines.items() if not _is_one_of(name, REPORTED)]
    if refused and not allow_changes:
        raise ValueError(
            "\n".join(
                [
                    f"the checkpoint of step {step} is of a run with other options or data:",
                    *(f"  {line}" for line in refused),
                    "set them as they were, accept the changes with --job.allow_changes, or start anew in another"
                    " --job.dump_folder",
                ]
            )
        )
    for line in lines.values():
        say(f"changed since the checkpoint of step {step}: {line}")


def _capacity(model: Any) -> dict[str, Any]:
    """Of the options in FREE, those that decide which rows are dropped: dispatchers that drop none are alike."""
    moe = getattr(model, "moe", None)
    if not isinstance(moe, MoEConfig):
        return {}
    if moe.dispatcher != "capacity":
        return {"model.moe.dispatcher": "one that keeps all rows"}
    return {"model.moe.dispatcher": moe.dispatcher, "model.moe.row_multiple": moe.row_multiple}


def _is_one_of(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
