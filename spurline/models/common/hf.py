"""How a family maps to Hugging Face checkpoints: architectures and tensor names. No torch import.

A family's `hf.py` has ARCHITECTURES, the `transformers` classes it can be imported from, and
architecture_for(model), the class that a model is exported as. E experts, F hidden width, D model width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from spurline.models.common.hf_values import TheirConfig

Shape = tuple[int, ...]
Present = Mapping[str, Any]
"""The tensors of a Hugging Face folder by name; each has a `shape`."""
NO_TENSORS: Present = MappingProxyType({})


class _InMemory(Mapping[str, Any]):
    """See IN_MEMORY."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.endswith((".experts.gate_up_proj", ".experts.down_proj"))

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


IN_MEMORY: Present = _InMemory()
"""Stands for the tensors of a model in memory, where `transformers` stacks and fuses all experts of a layer."""
Names = Mapping[str, str | None]
"""Our name -> theirs, with {layer} for a block's index and {expert} where ours stacks one tensor per expert.

None: they have no such tensor. Ours is zero after import, and must be zero to be exported.
"""


class Columns(NamedTuple):
    """Some columns of a matrix that is stored contiguously."""

    shape: Shape
    """Rows and columns of the full matrix."""
    chosen: slice
    transposed: bool
    """Whether the piece is the transpose of the chosen columns."""


class Piece(NamedTuple):
    """Elements of one of their tensors: all, a contiguous range from `start` on, or some columns of a matrix there."""

    name: str
    shape: Shape
    """Shape of their full tensor."""
    start: int = 0
    columns: Columns | None = None


@dataclass(frozen=True)
class Slot:
    """One of our tensors as a concatenation of pieces of theirs, all of the same size."""

    name: str
    shape: Shape
    pieces: tuple[Piece, ...]

    @property
    def piece_size(self) -> int:
        """Number of elements in each piece."""
        return prod(self.shape) // len(self.pieces)

    def stored_size(self, piece: Piece) -> int:
        """Number of contiguous elements that a piece is read from."""
        return self.piece_size if piece.columns is None else prod(piece.columns.shape)


ROTARY_FREQUENCIES = {
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": "rotary frequencies, which follow from the config"
}


def only_rotary_frequencies(their_config: Mapping[str, Any], present: Present) -> dict[str, str]:
    return ROTARY_FREQUENCIES


def further_prediction_layers(their_config: Mapping[str, Any], present: Present) -> dict[str, str]:
    """Multi-token prediction modules, stored after the last layer; their eh_proj identifies them."""
    num_layers, num_heads = their_config["num_hidden_layers"], their_config.get("num_nextn_predict_layers") or 0
    layers = range(num_layers, num_layers + num_heads)
    heads = [layer for layer in layers if f"model.layers.{layer}.eh_proj.weight" in present]
    further = {rf"model\.layers\.{layer}\..*": "a head that predicts further tokens" for layer in heads}
    return further | ROTARY_FREQUENCIES


@dataclass(frozen=True)
class Architecture:
    """A model class of `transformers`, and its conversion to and from our models."""

    name: str
    model_type: str
    read: Callable[[TheirConfig], Any]
    """Their config -> our model config; values that ours can't express are reported in `problems` of their config."""
    obstacles: Callable[[Any], list[str]]
    """Why a model of ours can't be exported as this architecture, one message each; empty if it can."""
    write: Callable[[Any], dict[str, Any]]
    """Our model config -> theirs: every key that changes the computation."""
    names: Names
    harmless: Callable[[Mapping[str, Any], Present], dict[str, str]] = only_rotary_frequencies
    """Their config and tensor names -> tensors that may be ignored: a pattern of their names -> what they are."""
    fused_experts: str = "model.layers.{layer}.mlp.experts."
    """Name prefix of fused experts."""

    def slots(self, shapes: Mapping[str, Shape], present: Present = NO_TENSORS) -> list[Slot]:
        """How each tensor of our model is stored in theirs; fused experts are the source if `present` has them."""
        return [self._slot(name, shape, present) for name, shape in shapes.items()]

    def _slot(self, name: str, shape: Shape, present: Present) -> Slot:
        theirs, layer = their_name(name, self.names)
        if theirs is None:
            return Slot(name, shape, ())
        if "{expert}" not in theirs:
            return Slot(name, shape, (Piece(theirs, shape),))
        weight = EXPERT_WEIGHT_OF[name.rpartition(".")[2]]
        if (fused := self.fused_experts.format(layer=layer) + weight.fused) in present:
            return fused_slot(name, shape, fused, weight)
        pieces = [Piece(theirs.format(expert=expert), shape[1:]) for expert in range(shape[0])]
        return Slot(name, shape, tuple(pieces))

    def copies(self, shapes: Mapping[str, Shape]) -> dict[str, str]:
        """Their tensors that duplicate another one: name of the copy -> name of the original in our model."""
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
QK_NORM_NAMES: dict[str, str | None] = {
    "layers.{layer}.attention.q_norm.weight": "model.layers.{layer}.self_attn.q_norm.weight",
    "layers.{layer}.attention.k_norm.weight": "model.layers.{layer}.self_attn.k_norm.weight",
}
QKV_BIAS_NAMES: dict[str, str | None] = {
    "layers.{layer}.attention.wq.bias": "model.layers.{layer}.self_attn.q_proj.bias",
    "layers.{layer}.attention.wk.bias": "model.layers.{layer}.self_attn.k_proj.bias",
    "layers.{layer}.attention.wv.bias": "model.layers.{layer}.self_attn.v_proj.bias",
}


class ExpertWeight(NamedTuple):
    """One weight of SwiGLU experts: our names and theirs.

    `transformers` can also save all experts of a layer as it holds them in memory: gate and up fused into (E, 2F, D),
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
EXPERT_WEIGHT_OF = {weight.ours: weight for weight in EXPERT_WEIGHTS}


def their_name(name: str, names: Names) -> tuple[str | None, str]:
    """Their name for one of ours, with {expert} still in it, and its layer's index ("" if it has none)."""
    layer = match[1] if (match := re.match(r"layers\.(\d+)\.", name)) else ""
    theirs = names[name.replace(f"layers.{layer}.", "layers.{layer}.", 1) if layer else name]
    return theirs and theirs.replace("{layer}", layer), layer


def fused_slot(name: str, shape: Shape, fused: str, weight: ExpertWeight) -> Slot:
    """Stacked matrices (E, rows, columns), each stored as one of the equal row blocks of a fused matrix."""
    num_experts, num_rows, num_columns = shape
    fused_shape = num_experts, weight.num_parts * num_rows, num_columns
    size = num_rows * num_columns
    starts = [(expert * weight.num_parts + weight.part) * size for expert in range(num_experts)]
    return Slot(name, shape, tuple(Piece(fused, fused_shape, start) for start in starts))


def transposed_slot(name: str, shape: Shape, theirs: str, num_parts: int, columns: slice) -> Slot:
    """Stacked matrices (E, rows, columns), each stored transposed, as some columns of a wider matrix."""
    num_experts, num_rows, num_columns = shape
    matrix = num_columns, num_parts * num_rows
    pieces = [
        Piece(theirs, (num_experts, *matrix), expert * prod(matrix), Columns(matrix, columns, transposed=True))
        for expert in range(num_experts)
    ]
    return Slot(name, shape, tuple(pieces))


ANY = object()
"""For `moe_obstacles`: the architecture can express any value of the field."""


def unlike(model: Any, only: Mapping[str, Any], architecture: str) -> list[str]:
    """An error for each dotted field of `model` that differs from the only value the architecture can express."""
    values = {name: reduce(getattr, name.split("."), model) for name in only}
    return [
        f"model.{name} is {values[name]!r}, and {architecture} can only be {value!r}"
        for name, value in only.items()
        if values[name] != value
    ]


def moe_obstacles(model: Any, architecture: str, only: Mapping[str, Any]) -> list[str]:
    """The same for the MoE layers: plain softmax scores and SwiGLU experts, unless `only` overrides it."""
    plain = {
        "moe.score_func": "softmax",
        "moe.num_shared_experts": 0,
        "moe.shared_gate": False,
        "moe.gate_bias": False,
        "moe.route_scale": 1.0,
        "moe.num_groups": 1,
        "moe.score_before_experts": False,
        "moe.force_load_balance": False,
        "moe.router": "top_k",
        "moe.experts": "swiglu",
    }
    allowed = {name: value for name, value in (plain | dict(only)).items() if value is not ANY}
    return unlike(model, allowed, architecture)
