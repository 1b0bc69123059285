"""Import a Hugging Face folder as a run folder, one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spurline import config_io
from spurline.hf.accounting import account, target_dtype
from spurline.hf.families import run_config_like_a_preset
from spurline.hf.folder import TOKENIZER_FOLDER, find_tensors, import_tokenizer, new_folder
from spurline.hf.quantized import AnyStored, dequantized
from spurline.hf.safetensors_file import FLOATS
from spurline.hf.settings import read_folder_model
from spurline.hf.slots import dtype_of, read_slot
from spurline.hf.verify import compare_logits
from spurline.models.common.hf import Slot
from spurline.train.checkpoint.manager import CheckpointManager


def import_folder(
    source: Path, out: Path, dtype: torch.dtype | None = None, verify: bool = False, with_mtp: bool = False
) -> list[str]:
    """Import the Hugging Face folder `source` as the run folder `out`; returns messages for the user.

    The weights become the checkpoint of step 0, in `dtype` (None: unchanged). MTP modules, which do not affect the
    logits, are imported only `with_mtp`. Raises a ValueError, and writes nothing, if anything is not supported.
    """
    if not source.is_dir():
        raise ValueError(f"{source} is not a folder: give one with config.json and safetensors files")
    their_config, architecture, model = read_folder_model(source)
    if with_mtp:
        model = _with_mtp(model, their_config, f"{source / 'config.json'}")
    stored = dequantized(find_tensors(source), their_config, f"{source}")
    slots, messages = account(architecture, model, their_config, stored, f"{source}")
    max_length = their_config.get("max_position_embeddings")
    family, preset, run_config = run_config_like_a_preset(architecture, model, f"{out}", max_length)

    with new_folder(out) as folder:
        copied = import_tokenizer(source, folder)
        if "tokenizer.json" in copied:
            run_config = replace(run_config, data=replace(run_config.data, tokenizer=f"{out / TOKENIZER_FOLDER}"))
        # So that a run started from this config, in its own folder, begins with these weights.
        run_config = replace(run_config, checkpoint=replace(run_config.checkpoint, initial_load_path=f"{out}"))
        config_io.save(folder / "config.json", family, preset, run_config)
        write_checkpoint(folder, slots, stored, dtype)
        messages.append(f"{architecture.name} as {family}, training settings of {preset}: {_size(slots, stored)}")
        if verify:
            messages.append(compare_logits(model, folder, 0, source, dtype))
    messages.append(f"run folder: {out}, tokenizer files: {', '.join(copied) or 'none'}")
    messages.append(f"to fine-tune it: spurline train --config-file {out / 'config.json'} --preset finetune")
    return messages


def _with_mtp(model: Any, their_config: dict[str, Any], where: str) -> Any:
    num_layers = their_config.get("num_nextn_predict_layers") or 0
    if not num_layers or not hasattr(model, "num_mtp_layers"):
        raise ValueError(f"{where} has no MTP modules (num_nextn_predict_layers): omit --mtp")
    return replace(model, num_mtp_layers=num_layers)


def write_checkpoint(
    run_folder: Path, slots: list[Slot], stored: Mapping[str, AnyStored], dtype: torch.dtype | None
) -> None:
    """Write the checkpoint of step 0; each tensor is read just before it is written."""
    of_name = {slot.name: slot for slot in slots}
    tensors = {slot.name: _like(slot, stored, dtype) for slot in slots}

    def read(name: str) -> Tensor:
        return read_slot(of_name[name], stored, tensors[name].dtype)

    CheckpointManager(run_folder, interval=1, keep_latest_k=0).write_tensors(0, tensors, read, {"tokens_seen": 0})


def _like(slot: Slot, stored: Mapping[str, AnyStored], dtype: torch.dtype | None) -> Tensor:
    return torch.empty(slot.shape, dtype=target_dtype(slot.name, dtype_of(slot, stored), dtype), device="meta")


def _size(slots: list[Slot], stored: Mapping[str, AnyStored]) -> str:
    names = {piece.name for slot in slots for piece in slot.pieces}
    num_bytes = sum(prod(stored[name].shape) * FLOATS[stored[name].dtype].itemsize for name in names)
    return f"{len(names)} tensors, {num_bytes / 1e6:,.1f} MB"
