"""Export a checkpoint of a run as a Hugging Face folder, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spurline import config_io
from spurline.config import RunConfig
from spurline.data.chat_template import NO_TEMPLATE, find_template
from spurline.data.shipped import tokenizer_path
from spurline.hf.accounting import model_shapes, target_dtype
from spurline.hf.families import architecture_for
from spurline.hf.folder import INDEX, TOKENIZER_FOLDER, WEIGHTS, copy_tokenizer, new_folder, read_json
from spurline.hf.quantizing import Block, BlockQuantized, TensorSource
from spurline.hf.safetensors_file import Entry, write_file
from spurline.hf.slots import place
from spurline.hf.verify import compare_logits
from spurline.models.common.hf import Slot
from spurline.train.checkpoint.finite import is_finite
from spurline.train.checkpoint.folder import WHY_NONE
from spurline.train.checkpoint.layout import TensorLayout
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.checkpoint.reader import StoredCheckpoint

# Keys that don't affect the logits, so they are not in our model config; kept from the imported config.json.
_KEPT_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "initializer_range")


def export_run(
    run: Path,
    out: Path,
    step: int | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    verify: bool = False,
    sign_key: bytes | None = None,
    fp8_block: Block | None = None,
) -> list[str]:
    """Export a checkpoint (default: the newest) as the Hugging Face folder `out`; returns messages for the user.

    Weights are written in `dtype` (None: unchanged); with `fp8_block`, projections are written in FP8, with one scale
    per block of that many rows and columns. Raises a ValueError, and writes nothing, if no class of `transformers` can
    represent the model.
    """
    family, _, run_config = config_io.load(run / "config.json")
    model = run_config.model
    if run_config.lora.rank:
        raise ValueError(
            f"{run} has adapters and no weights of its own: make a run with both by `spurline convert merge`, or write"
            " the adapters for peft by `spurline convert to-peft`"
        )
    architecture = architecture_for(family, model)
    checkpoints = CheckpointManager(run, interval=1, keep_latest_k=0, sign_key=sign_key)
    step = checkpoints.latest() if step is None else step
    if step is None:
        raise ValueError(f"{checkpoints.folder} has no complete checkpoint: {WHY_NONE}")
    if verify and fp8_block:
        raise ValueError("--verify compares weights that are not quantized: omit --verify or --fp8")
    source: TensorSource = Source(checkpoints.open(step), architecture.slots(model_shapes(model)), dtype)
    quantization: dict[str, Any] = {}
    if fp8_block:
        source = BlockQuantized(source, fp8_block)
        quantization = {"quantization_config": source.config}

    with new_folder(out) as folder:
        messages = [f"{architecture.name}, step {step}: {write_weights(folder, source, max_shard_bytes)}"]
        tokenizer = _tokenizer_folder(run, run_config.data.tokenizer)
        copied = copy_tokenizer(tokenizer, folder)
        if run_config.data.chat_template not in ("", NO_TEMPLATE):
            template = find_template(run_config.data.chat_template, run_config.data.tokenizer)
            assert template is not None
            (folder / "chat_template.jinja").write_text(template.source, encoding="utf-8")
        their_config = {
            "architectures": [architecture.name],
            "model_type": architecture.model_type,
            **architecture.write(model),
            **_kept(tokenizer, _max_length(run_config)),
            "torch_dtype": f"{source.main_dtype}".removeprefix("torch."),
            **quantization,
        }
        (folder / "config.json").write_text(json.dumps(their_config, indent=2) + "\n", encoding="utf-8")
        if verify:
            messages.append(compare_logits(model, run, step, folder, dtype))
    messages.append(f"Hugging Face folder: {out}, tokenizer files: {', '.join(copied) or 'none'}")
    return messages


class Source:
    """The tensors of a checkpoint under their Hugging Face names; values are read one slot at a time."""

    def __init__(self, checkpoint: StoredCheckpoint, slots: list[Slot], dtype: torch.dtype | None) -> None:
        self._checkpoint = checkpoint
        # The slots and piece numbers that make up each of their tensors.
        self._targets: dict[str, list[tuple[Slot, int]]] = {}
        for slot in slots:
            for number, piece in enumerate(slot.pieces):
                self._targets.setdefault(piece.name, []).append((slot, number))
        saved = {
            name.removeprefix("model."): tensor
            for name, tensor in checkpoint.layout.tensors.items()
            if name.startswith("model.")
        }
        self._check(slots, saved)
        self._dtype_of = {name: target_dtype(name, tensor.dtype, dtype) for name, tensor in saved.items()}

    @property
    def main_dtype(self) -> torch.dtype:
        return self._dtype_of["embedding.weight"]

    def entries(self) -> Iterator[Entry]:
        for name, sources in self._targets.items():
            slot, number = sources[0]
            yield Entry(name, self._dtype_of[slot.name], slot.pieces[number].shape)

    def values(self) -> Iterator[Tensor]:
        """Yield the tensors in the order of the entries; each of ours is kept only while theirs are built from it."""
        ours: dict[str, Tensor] = {}
        for sources in self._targets.values():
            ours = {slot.name: ours[slot.name] for slot, _ in sources if slot.name in ours}
            for slot, _ in sources:
                if slot.name not in ours:
                    ours[slot.name] = self._read(slot)
            yield self._made_of(sources, ours)

    def _read(self, slot: Slot) -> Tensor:
        tensor = self._checkpoint.read_tensor(f"model.{slot.name}")
        if not is_finite(tensor):
            raise ValueError(f"{slot.name} in {self._checkpoint.folder} is not finite: the run had diverged")
        return tensor.to(self._dtype_of[slot.name])

    def _made_of(self, sources: list[tuple[Slot, int]], ours: dict[str, Tensor]) -> Tensor:
        slot, number = sources[0]
        piece, tensor = slot.pieces[number], ours[slot.name]
        if len(sources) == 1 and piece.columns is None:
            return tensor.view(-1)[number * slot.piece_size :][: slot.piece_size].view(piece.shape)
        theirs = torch.empty(piece.shape, dtype=tensor.dtype)
        for slot, number in sources:
            place(slot, number, ours[slot.name], theirs)
        return theirs

    def _check(self, slots: list[Slot], saved: dict[str, TensorLayout]) -> None:
        misfits = [slot.name for slot in slots if slot.name not in saved or saved[slot.name].shape != slot.shape]
        misfits += saved.keys() - {slot.name for slot in slots}
        if misfits:
            raise ValueError(
                f"the checkpoint {self._checkpoint.folder} does not match the model in config.json:"
                f" {', '.join(sorted(misfits)[:5])} differ"
            )
        for slot in slots:
            if not slot.pieces and self._checkpoint.read_tensor(f"model.{slot.name}").any():
                raise ValueError(
                    f"{slot.name} is not zero, but the Hugging Face architecture has no selection bias:"
                    " only models trained with --model.moe.bias_update_rate 0 can be exported"
                )


def write_weights(folder: Path, source: TensorSource, max_shard_bytes: int) -> str:
    """Write the safetensors files, and an index if there are several; returns a summary."""
    shards = split_into_shards(list(source.entries()), max_shard_bytes)
    names = [WEIGHTS] if len(shards) == 1 else _shard_names(len(shards))
    values = source.values()
    for name, entries in zip(names, shards, strict=True):
        write_file(folder / name, entries, values)
    total = sum(entry.num_bytes for entries in shards for entry in entries)
    if len(shards) > 1:
        weight_map = {entry.name: name for name, entries in zip(names, shards, strict=True) for entry in entries}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    num_tensors = sum(map(len, shards))
    return f"{num_tensors} tensors, {total / 1e6:,.1f} MB in {len(shards)} file{'s' if len(shards) > 1 else ''}"


def _shard_names(count: int) -> list[str]:
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def split_into_shards(entries: list[Entry], max_bytes: int) -> list[list[Entry]]:
    """Group consecutive tensors into shards of at most `max_bytes`; a larger tensor gets its own shard."""
    shards: list[list[Entry]] = []
    size = 0
    for entry in entries:
        if not shards or size + entry.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.num_bytes
    return shards


def _tokenizer_folder(run: Path, data_tokenizer: str) -> Path:
    """Folder of the run's tokenizer: in the run folder of an imported model, else from the data options."""
    if (run / TOKENIZER_FOLDER).is_dir() or not data_tokenizer:
        return run / TOKENIZER_FOLDER
    path = Path(tokenizer_path(data_tokenizer))
    return path if path.is_dir() else path.parent


def _max_length(run_config: RunConfig[Any]) -> int:
    for scaling in (run_config.model.yarn, run_config.model.llama3_rope):
        if scaling.factor > 1:
            return round(scaling.factor * scaling.original_seq_len)
    return run_config.training.seq_len


def _kept(tokenizer: Path, max_length: int) -> dict[str, Any]:
    path = tokenizer / "config.json"
    theirs = read_json(path) if path.is_file() else {}
    return {"bos_token_id": None, "eos_token_id": None, "max_position_embeddings": max_length} | {
        key: theirs[key] for key in _KEPT_KEYS if key in theirs
    }
