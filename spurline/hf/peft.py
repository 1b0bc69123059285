"""Export the adapters of a run in peft's format: adapter_config.json and adapter_model.safetensors.

To peft, a separate matrix is a module, and so are its A (r, I) and B (O, r). In `transformers`, experts are stacked
parameters, with gate and up fused, and peft adapts them as parameters (`target_parameters`): A of all experts is one
(E * r, I) matrix, B one (O, r * E) matrix in which the expert varies fastest. If several of our weights are in one
fused parameter, their A's are concatenated and their B's block-diagonal, which multiplies its rank (`rank_pattern`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spurline.hf.accounting import model_shapes
from spurline.hf.families import architecture_for
from spurline.hf.folder import new_folder
from spurline.hf.merging import AdaptedRun, open_adapted_run
from spurline.hf.safetensors_file import Entry, write_file
from spurline.models.common.hf import IN_MEMORY, Slot

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_EXPERT_MODULES = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Modules that peft treats as experts in every MoE model, even in dense layers; they are targeted as parameters."""


@dataclass
class Adapters:
    """The contents of the two files."""

    modules: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    ranks: dict[str, int] = field(default_factory=dict)
    """Ranks of the parameters whose rank differs from the default."""
    tensors: dict[str, Tensor] = field(default_factory=dict)


def export_adapters(
    run: Path, out: Path, step: int | None = None, base_model: str = "", sign_key: bytes | None = None
) -> list[str]:
    """Write the folder `out` for `peft.PeftModel.from_pretrained`; returns messages for the user.

    `base_model` is the model to load that the config names (default: the Hugging Face folder of lora.base). Raises a
    ValueError, and writes nothing, if an adapter has no counterpart in the `transformers` model.
    """
    adapted = open_adapted_run(run, step, sign_key)
    names = adapted.adapted_names()
    left_out = [name for name in names if name.startswith("mtp.")]
    adapters = collect(adapted, [name for name in names if not name.startswith("mtp.")])
    if adapted.base.at.is_hugging_face:
        base_model = base_model or adapted.config.lora.base
    config = adapter_config(adapted, adapters, base_model)
    with new_folder(out) as folder:
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in adapters.tensors.items()]
        write_file(folder / WEIGHTS, entries, iter(adapters.tensors.values()))
    messages = (
        [f"left out: {len(left_out)} adapters of MTP modules, which transformers does not have"] if left_out else []
    )
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in adapters.tensors.values())
    return [
        *messages,
        f"step {adapted.step}: {len(adapters.tensors)} tensors, {num_bytes / 1e6:,.1f} MB",
        f"peft: {out}",
    ]


def adapter_config(adapted: AdaptedRun, adapters: Adapters, base_model: str) -> dict[str, Any]:
    """The content of adapter_config.json; where a parameter's rank is a multiple, so is its alpha."""
    lora = adapted.config.lora
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model or None,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": adapters.modules,
        "target_parameters": adapters.parameters or None,
        "rank_pattern": {re.escape(name): rank for name, rank in adapters.ranks.items()},
        "alpha_pattern": {re.escape(name): alpha * (rank // lora.rank) for name, rank in adapters.ranks.items()},
    }


def collect(adapted: AdaptedRun, names: list[str]) -> Adapters:
    """The adapters of these weights, under peft's names."""
    model = adapted.config.model
    shapes = model_shapes(model)
    architecture = architecture_for(adapted.family, model)
    slots = {slot.name: slot for slot in architecture.slots({name: shapes[name] for name in names}, IN_MEMORY)}
    has_experts = getattr(model, "moe", None) is not None
    found = Adapters()
    of_parameter: dict[str, list[str]] = {}
    for name, slot in slots.items():
        in_theirs = {piece.name for piece in slot.pieces}
        if len(in_theirs) != 1 or len(shapes[name]) not in (2, 3):
            raise ValueError(f"{name} is not one matrix in {architecture.name}: leave it out of --lora.targets")
        of_parameter.setdefault(in_theirs.pop(), []).append(name)
    for theirs, ours in of_parameter.items():
        if len(shapes[ours[0]]) == 2:
            a, b = adapted.adapter(ours[0])
            module = theirs.removesuffix(".weight")
            if has_experts and module.rpartition(".")[2] in _EXPERT_MODULES:
                found.parameters.append(theirs)
            else:
                found.modules.append(module)
            found.tensors |= _pair(module, a, b)
        else:
            a, b = _fused(adapted, [slots[name] for name in ours])
            found.parameters.append(theirs)
            if a.shape[1] != adapted.config.lora.rank:
                found.ranks[theirs] = a.shape[1]
            found.tensors |= _pair(_wrapper(theirs, of_parameter), a.flatten(0, 1), b.permute(1, 2, 0).flatten(1))
    return found


def _pair(module: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {
        f"{_PREFIX}{module}.lora_A.weight": a.contiguous(),
        f"{_PREFIX}{module}.lora_B.weight": b.contiguous(),
    }


def _wrapper(parameter: str, adapted: Mapping[str, Any]) -> str:
    """The module under which peft stores the adapter of a stacked parameter: the second of two wraps the first."""
    module, _, name = parameter.rpartition(".")
    is_inside = name == "gate_up_proj" and f"{module}.down_proj" in adapted
    return f"{module}.base_layer" if is_inside else module


def _fused(adapted: AdaptedRun, slots: list[Slot]) -> tuple[Tensor, Tensor]:
    """A (E, n r, I) and B (E, O, n r) of a parameter that fuses n of our weights."""
    pairs = [adapted.adapter(slot.name) for slot in slots]
    a = torch.cat([a for a, _ in pairs], dim=1)
    num_experts, rank = pairs[0][0].shape[:2]
    first = slots[0].pieces[0]
    num_outputs = first.shape[1] if first.columns is None else first.shape[2]
    b = torch.zeros(num_experts, num_outputs, len(slots) * rank)
    for number, (slot, (_, part)) in enumerate(zip(slots, pairs, strict=True)):
        b[:, _outputs(slot), number * rank : (number + 1) * rank] = part
    return a, b


def _outputs(slot: Slot) -> slice:
    """Which outputs of their parameter are ours: a range of rows, or some columns if it is stored transposed."""
    piece = slot.pieces[0]
    if piece.columns is not None:
        return piece.columns.chosen
    start = piece.start // slot.shape[2]
    return slice(start, start + slot.shape[1])
