"""How a family maps to Hugging Face checkpoints: architectures and tensor names. No torch import.

A family's `hf.py` has ARCHITECTURES, the classes of `transformers` it can be imported from, and
architecture_for(model), the one that a model is exported as. E experts, F hidden width, D model width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any, NamedTuple

from spurline.models.common.hf_config import TheirConfig

Shape = tuple[int, ...]
Names = Mapping[str, str | None]
"""Our name -> theirs, with {layer} for a block's number and {expert} where our tensor stacks those of all experts.

None: they have no such tensor. Ours is zeros after import, and must be zeros for export.
"""


class Piece(NamedTuple):
    """A contiguous run of elements of one of their tensors: all of them, or those from `start` on."""

    name: str
    shape: Shape
    start: int = 0


@dataclass(frozen=True)
class Slot:
    """One of our tensors as a concatenation of pieces of theirs, all of the same size."""

    name: str
    shape: Shape
    pieces: tuple[Piece, ...]

    @property
    def piece_size(self) -> int:
        """Elements in each of the pieces."""
        return prod(self.shape) // len(self.pieces)


ROTARY_FREQUENCIES = {
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": "rotary frequencies, which follow from the config"
}


def _only_rotary_frequencies(their_config: Mapping[str, Any], present: Collection[str]) -> dict[str, str]:
    return ROTARY_FREQUENCIES


@dataclass(frozen=True)
class Architecture:
    """A model class of `transformers`, with its conversion to our models and back."""

    name: str
    model_type: str
    read: Callable[[TheirConfig], Any]
    """Their config -> our model config; values that ours can't express are added to their config's `problems`."""
    obstacles: Callable[[Any], list[str]]
    """Why a model of ours can't be exported as this architecture, one message each; empty if it can."""
    write: Callable[[Any], dict[str, Any]]
    """Our model config -> theirs: every key that changes the computation."""
    names: Names
    harmless: Callable[[Mapping[str, Any], Collection[str]], dict[str, str]] = _only_rotary_frequencies
    """Their config and tensor names -> tensors that may be ignored: a pattern of their names -> what they are."""

    def slots(self, shapes: Mapping[str, Shape], present: Collection[str] = ()) -> list[Slot]:
        """How the tensors of our model, by name, are stored; fused experts are the source if `present` has them."""
        return [_slot(name, shape, self.names, present) for name, shape in shapes.items()]

    def copies(self, shapes: Mapping[str, Shape]) -> dict[str, str]:
        """Their tensors that duplicate another one: the name of each copy -> that of the original in our model."""
        return {}


DECODER_NAMES: dict[str, str | None] = {
    "embedding.weight": "model.embed_tokens.weight",
    "layers.{layer}.attention_norm.weight": "model.layers.{layer}.input_layernorm.weight",
    "layers.{layer}.ffn_norm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
    "layers.{layer}.feed_forward.w1.weight": "model.layers.{layer}.mlp.gate_proj.weight",
    "layers.{layer}.feed_forward.w3.weight": "model.layers.{layer}.mlp.up_proj.weight",
    "layers.{layer}.feed_forward.w2.weight": "model.layers.{layer}.mlp.down_proj.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
GROUPED_QUERY_NAMES: dict[str, str | None] = {
    "layers.{layer}.attention.wq.weight": "model.layers.{layer}.self_attn.q_proj.weight",
    "layers.{layer}.attention.wk.weight": "model.layers.{layer}.self_attn.k_proj.weight",
    "layers.{layer}.attention.wv.weight": "model.layers.{layer}.self_attn.v_proj.weight",
    "layers.{layer}.attention.wo.weight": "model.layers.{layer}.self_attn.o_proj.weight",
}


class ExpertWeight(NamedTuple):
    """One weight of SwiGLU experts: our names and theirs.

    `transformers` can also save all experts of a layer as they are in its memory: gate and up fused to one (E, 2F, D),
    down as (E, D, F). Ours is one of the equal parts of the fused tensor's rows.
    """

    ours: str
    ours_shared: str
    theirs: str
    fused: str
    part: int
    num_parts: int


EXPERT_WEIGHTS = (
    ExpertWeight("w1_EFD", "w1_FD", "gate_proj", "gate_up_proj", 0, 2),
    ExpertWeight("w3_EFD", "w3_FD", "up_proj", "gate_up_proj", 1, 2),
    ExpertWeight("w2_EDF", "w2_DF", "down_proj", "down_proj", 0, 1),
)
ROUTER_NAMES: dict[str, str | None] = {
    "layers.{layer}.moe.router.gate_ED": "model.layers.{layer}.mlp.gate.weight",
    "layers.{layer}.moe.router.expert_bias_E": None,
}
EXPERT_NAMES: dict[str, str | None] = ROUTER_NAMES | {
    f"layers.{{layer}}.moe.experts.{weight.ours}": (
        f"model.layers.{{layer}}.mlp.experts.{{expert}}.{weight.theirs}.weight"
    )
    for weight in EXPERT_WEIGHTS
}
SHARED_EXPERT_NAMES: dict[str, str | None] = {
    f"layers.{{layer}}.moe.shared_experts.{weight.ours_shared}": (
        f"model.layers.{{layer}}.mlp.shared_experts.{weight.theirs}.weight"
    )
    for weight in EXPERT_WEIGHTS
}
_EXPERT_WEIGHT_OF = {weight.theirs: weight for weight in EXPERT_WEIGHTS}


def _slot(name: str, shape: Shape, names: Names, present: Collection[str]) -> Slot:
    layer = match[1] if (match := re.match(r"layers\.(\d+)\.", name)) else ""
    theirs = names[name.replace(f"layers.{layer}.", "layers.{layer}.", 1) if layer else name]
    if theirs is None:
        return Slot(name, shape, ())
    if "{expert}" not in theirs:
        return Slot(name, shape, (Piece(theirs.format(layer=layer), shape),))
    num_experts, num_rows, num_columns = shape
    prefix, _, suffix = theirs.partition("{expert}.")
    weight = _EXPERT_WEIGHT_OF[suffix.removesuffix(".weight")]
    if (fused := prefix.format(layer=layer) + weight.fused) in present:
        fused_shape = num_experts, weight.num_parts * num_rows, num_columns
        size = num_rows * num_columns
        starts = [(expert * weight.num_parts + weight.part) * size for expert in range(num_experts)]
        return Slot(name, shape, tuple(Piece(fused, fused_shape, start) for start in starts))
    experts = [theirs.format(layer=layer, expert=expert) for expert in range(num_experts)]
    return Slot(name, shape, tuple(Piece(expert, shape[1:]) for expert in experts))


def unlike(model: Any, only: Mapping[str, Any], architecture: str) -> list[str]:
    """An error for each dotted field of `model` that isn't the only value the architecture can express."""
    values = {name: reduce(getattr, name.split("."), model) for name in only}
    return [
        f"model.{name} is {values[name]!r}, and {architecture} can only be {value!r}"
        for name, value in only.items()
        if values[name] != value
    ]
