"""Upcycle a dense model: the same family with experts that are copies of its feed-forward layers.

E experts, K per token, split S ways: each of the E / S copies of a layer is cut into S experts of hidden width F / S.
All S parts of a copy have the same row in the gate, so a token routed to one is routed to all. Their outputs add up to
the layer's once the last matrix is multiplied by S, since the K weights of a token add up to 1. Without noise, the
model thus computes the same function as the dense one, whatever the gate's weights. A family whose models all have a
gated shared expert (Qwen2) gets one with a zero output matrix: it contributes nothing at first, and learns.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spurline import config_io
from spurline.config import Job, RunConfig
from spurline.hf.accounting import model_shapes
from spurline.hf.folder import TOKENIZER_FOLDER, new_folder
from spurline.hf.importing import import_folder
from spurline.models import family_configs
from spurline.models.common.decoder_config import SparseDecoderConfig
from spurline.models.common.init import build_to_load
from spurline.moe.config import MoEConfig
from spurline.ops.draw import KeyedGenerator
from spurline.train.checkpoint.folder import WHY_NONE
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.checkpoint.reader import StoredCheckpoint

_EXPERTS_OF = {"agpt": "mixtral"}
"""Dense families -> the equivalent family with experts."""
TOLERANCE = 1e-5
"""Largest difference of logits, relative to the largest logit, that --verify accepts for a recipe without noise."""


@dataclass(frozen=True)
class Recipe:
    """How experts are built from a feed-forward layer."""

    experts: int = 8
    top_k: int = 2
    split: int = 1
    """Parts into which each copy is split along its hidden width (1: not split)."""
    noise: float = 0.0
    """Standard deviation of the noise added to the copies, relative to each matrix's own (0: no noise)."""
    router_std: float = 0.02
    """Standard deviation of the gate's initial weights."""
    dense_layers: int = 0
    """Number of layers at the start that stay dense."""
    seed: int = 0

    def problems(self, hidden_dim: int, num_layers: int) -> list[str]:
        found = [
            f"--{name} must be at least {least}, got {getattr(self, name)}"
            for name, least in {"experts": 2, "top_k": 1, "split": 1, "noise": 0, "router_std": 0}.items()
            if getattr(self, name) < least
        ]
        if found:
            return found
        if self.top_k > self.experts:
            found.append(f"--top_k {self.top_k} is larger than --experts {self.experts}")
        found += [
            f"--{name} {getattr(self, name)} is not a multiple of --split {self.split}: a token visits whole copies"
            for name in ("experts", "top_k")
            if getattr(self, name) % self.split
        ]
        if hidden_dim % self.split:
            found.append(f"--split {self.split} does not divide the model's dense_hidden_dim {hidden_dim}")
        if not 0 <= self.dense_layers < num_layers:
            found.append(f"--dense_layers must be between 0 and {num_layers - 1}, got {self.dense_layers}")
        return found


def upcycle(
    source: Path,
    out: Path,
    recipe: Recipe,
    verify: bool = False,
    step: int | None = None,
    sign_key: bytes | None = None,
) -> list[str]:
    """Upcycle a dense run folder or Hugging Face folder into the run folder `out`; returns messages for the user."""
    if (source / "config.json").is_file() and not (source / "checkpoints").is_dir():
        with tempfile.TemporaryDirectory(
            dir=out.absolute().parent if out.absolute().parent.is_dir() else None
        ) as folder:
            imported = Path(folder) / "imported"
            messages = [line for line in import_folder(source, imported) if str(imported) not in line]
            return messages + _upcycle_run(imported, f"{source}", out, recipe, verify, None, None)
    return _upcycle_run(source, f"{source}", out, recipe, verify, step, sign_key)


def _upcycle_run(
    run: Path, name: str, out: Path, recipe: Recipe, verify: bool, step: int | None, sign_key: bytes | None
) -> list[str]:
    """`name` is the folder as the user knows it."""
    family, _, config = config_io.load(run / "config.json")
    if config.lora.rank:
        raise ValueError(f"{name} has adapters and no weights of its own: merge them by `spurline convert merge`")
    dense = config.model
    if any(dense.moe_of_layer(layer) for layer in range(dense.num_layers)):
        raise ValueError(f"{name} already has experts: upcycling begins with a dense model")
    if problems := recipe.problems(dense.dense_hidden_dim, dense.num_layers):
        raise config_io.ConfigError(problems)
    family, preset, model = sparse_model(family, dense, recipe)
    if problems := model.problems():
        raise config_io.ConfigError([f"model.{problem}" for problem in problems])
    checkpoints = CheckpointManager(run, interval=1, keep_latest_k=0, sign_key=sign_key)
    step = checkpoints.latest() if step is None else step
    if step is None:
        raise ValueError(f"{checkpoints.folder} has no complete checkpoint: {WHY_NONE}")
    copies = Copies(checkpoints.open(step), recipe)
    shapes = model_shapes(model)
    tensors = {name: torch.empty(shape, dtype=copies.dtype_of(name), device="meta") for name, shape in shapes.items()}
    with new_folder(out) as folder:
        of_run = replace(
            config,
            model=model,
            job=Job(dump_folder=f"{out}"),
            checkpoint=replace(config.checkpoint, enable=True, initial_load_path=f"{out}"),
            data=_copy_tokenizer(run, folder, out, config),
        )
        config_io.save(folder / "config.json", family, preset, of_run)
        CheckpointManager(folder, interval=1, keep_latest_k=0).write_tensors(
            0, tensors, copies.read, {"tokens_seen": 0}
        )
        messages = [
            f"{family}: {recipe.experts} experts of hidden width {model.moe.hidden_dim}, {recipe.top_k} a token;"
            f" {dense.num_params() / 1e6:,.1f}M parameters became {model.num_params() / 1e6:,.1f}M,"
            f" {model.num_active_params() / 1e6:,.1f}M active"
        ]
        if verify:
            messages.append(compare_with_dense(run, step, dense, folder, model, recipe))
    return [*messages, f"run folder: {out}"]


def sparse_model(family: str, dense: Any, recipe: Recipe) -> tuple[str, str, Any]:
    """(family, preset, model config) with experts; load balancing is that of the family's preset closest in size."""
    family = _EXPERTS_OF.get(family, family)
    presets = {name: preset().model for name, preset in family_configs(family).items()}
    sparse = {name: model for name, model in presets.items() if isinstance(model, SparseDecoderConfig)}
    fields = {f.name: getattr(dense, f.name) for f in dataclasses.fields(dense)}
    sparse = {
        name: model for name, model in sparse.items() if fields.keys() <= {f.name for f in dataclasses.fields(model)}
    }
    if not sparse:
        raise ValueError(f"the family {family} has no models with experts: convert one of another family")
    nearest = min(sparse, key=lambda name: abs(math.log(sparse[name].num_params() / dense.num_params())))
    of_preset = sparse[nearest].moe
    moe = MoEConfig(
        hidden_dim=dense.dense_hidden_dim // recipe.split,
        num_experts=recipe.experts,
        top_k=recipe.top_k,
        route_norm=True,  # the weights of a token add up to 1
        score_func=of_preset.score_func,
        bias_update_rate=of_preset.bias_update_rate,
        aux_loss=of_preset.aux_loss,
        aux_loss_weight=of_preset.aux_loss_weight,
        z_loss_weight=of_preset.z_loss_weight,
        shared_gate=of_preset.shared_gate,
        num_shared_experts=int(of_preset.shared_gate),
    )
    fields |= {"moe": moe, "num_dense_layers": recipe.dense_layers, "dense_layers": ()}
    return family, nearest, type(sparse[nearest])(**fields)


class Copies:
    """The tensors of the model with experts, built from the dense model's."""

    def __init__(self, dense: StoredCheckpoint, recipe: Recipe) -> None:
        self.dense, self.recipe = dense, recipe

    def dtype_of(self, name: str) -> torch.dtype:
        source = self._source(name)
        return self.dense.layout.tensors[f"model.{source}"].dtype if source else torch.float32

    def read(self, name: str) -> Tensor:
        source = self._source(name)
        if not source:
            return self._of_router(name)
        tensor = self.dense.read_tensor(f"model.{source}")
        if source == name:
            return tensor
        if ".shared_experts." in name:
            if name.endswith("w2_DF"):
                return torch.zeros_like(tensor[:, : tensor.shape[1] // self.recipe.split])
            return tensor[: tensor.shape[0] // self.recipe.split].contiguous()
        if name.endswith("w2_EDF"):
            parts = (tensor * self.recipe.split).unflatten(1, (self.recipe.split, -1)).movedim(1, 0)
        else:
            parts = tensor.unflatten(0, (self.recipe.split, -1))
        stacked = parts.repeat(self.recipe.experts // self.recipe.split, 1, 1)
        if self.recipe.noise:
            noise = torch.randn(stacked.shape, generator=self._generator(name))
            stacked = stacked + (self.recipe.noise * stacked.float().std() * noise).to(stacked.dtype)
        return stacked.contiguous()

    def _source(self, name: str) -> str:
        """Name of the dense tensor that a tensor with experts is built from; empty for gates and their biases."""
        if name.endswith(("gate_ED", "gate_1D")):
            return ""
        if f"model.{name}" in self.dense.layout.tensors:
            return name
        block, _, weight = name.partition(".moe.")
        is_expert = weight.startswith(("experts.", "shared_experts."))
        return f"{block}.feed_forward.{weight.split('.')[1][:2]}.weight" if is_expert else ""

    def _of_router(self, name: str) -> Tensor:
        width = self.dense.layout.tensors["model.embedding.weight"].shape[1]
        if name.endswith("gate_1D"):
            return torch.zeros(1, width)
        if not name.endswith("gate_ED"):
            return torch.zeros(self.recipe.experts)
        num_copies = self.recipe.experts // self.recipe.split
        of_copies = torch.randn(num_copies, width, generator=self._generator(name)) * self.recipe.router_std
        return of_copies.repeat_interleave(self.recipe.split, 0)

    def _generator(self, name: str) -> torch.Generator:
        return KeyedGenerator().at(f"{self.recipe.seed} upcycle {name}")


def compare_with_dense(run: Path, step: int, dense: Any, out: Path, model: Any, recipe: Recipe) -> str:
    """Run both models on the same random tokens; a ValueError if a recipe without noise changed the logits."""
    tokens_BL = torch.randint(dense.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    found = []
    for folder, at, config in ((run, step, dense), (out, 0, model)):
        built = build_to_load(config, "cpu").eval()
        CheckpointManager(folder, interval=1, keep_latest_k=0).load(at, built, None)
        with torch.no_grad():
            found.append(built(tokens_BL))
    difference, largest = (found[0] - found[1]).abs().max().item(), found[0].abs().max().item()
    if not recipe.noise and not difference <= TOLERANCE * largest:
        raise ValueError(
            f"the logits changed by up to {difference:.3g} (the largest is {largest:.3g}); nothing was written"
        )
    return f"the logits differ from those of the dense model by at most {difference:.2g} (largest {largest:.3g})"


def _copy_tokenizer(run: Path, folder: Path, out: Path, config: RunConfig[Any]) -> Any:
    """Copy the tokenizer of an imported model; returns the data section."""
    tokenizer = run / TOKENIZER_FOLDER
    if not tokenizer.is_dir():
        return config.data
    shutil.copytree(tokenizer, folder / TOKENIZER_FOLDER)
    if Path(config.data.tokenizer).resolve() != tokenizer.resolve():
        return config.data
    return replace(config.data, tokenizer=f"{out / TOKENIZER_FOLDER}")
