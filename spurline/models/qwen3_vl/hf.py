"""Qwen3-VL in Hugging Face format: a text model and a vision encoder, each with its own config.

The class with experts stores all experts of a layer in one tensor, either transposed, as published and as written here,
or as `transformers` holds them in memory and saves them. Both are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spurline.data.patch_sizes import FRAMES, MERGE, PATCH_SIZE
from spurline.models.common.hf import (
    EXPERT_WEIGHT_OF,
    IN_MEMORY,
    NO_TENSORS,
    Architecture,
    Piece,
    Present,
    Shape,
    Slot,
    fused_slot,
    moe_obstacles,
    transposed_slot,
    unlike,
)
from spurline.models.common.hf_config import read_decoder, read_dense_layers, write_decoder, write_dense_layers
from spurline.models.common.hf_values import TheirConfig
from spurline.models.qwen3.hf import ARCHITECTURES as QWEN3
from spurline.models.qwen3_vl.configs import Qwen3VLConfig, Qwen3VLMoEConfig, VisionConfig
from spurline.moe.config import MoEConfig

_DENSE, _SPARSE = "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"
_TEXT_NAMES = {
    ours: theirs and theirs.replace("model.", "model.language_model.", 1) for ours, theirs in QWEN3[1].names.items()
}
# Ours -> theirs, substituted in this order.
_VISION_NAMES = {
    r"^vision\.": "model.visual.",
    r"\.patch\.": ".patch_embed.proj.",
    r"\.positions\.": ".pos_embed.",
    r"\.deepstack\.": ".deepstack_merger_list.",
    r"\.layers\.(\d+)\.w([12])\.": r".blocks.\1.mlp.linear_fc\2.",
    r"\.layers\.": ".blocks.",
    r"\.attention_norm\.": ".norm1.",
    r"\.ffn_norm\.": ".norm2.",
    r"\.attention\.wqkv\.": ".attn.qkv.",
    r"\.attention\.wo\.": ".attn.proj.",
    r"\.w([12])\.": r".linear_fc\1.",
}
_NO_SCALING = {"yarn.factor": 1.0, "llama3_rope.factor": 1.0}
_PATCH_SHAPE = (3, FRAMES, PATCH_SIZE, PATCH_SIZE)  # their patch embedding is a convolution
_TOKEN_IDS = {
    "image_token_id": 151_655,
    "video_token_id": 151_656,
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
}


@dataclass(frozen=True)
class _WithVision(Architecture):
    """The tensors of the text model and of the vision encoder."""

    def slots(self, shapes: Mapping[str, Shape], present: Present = NO_TENSORS) -> list[Slot]:
        text = {name: shape for name, shape in shapes.items() if not name.startswith("vision.")}
        vision = {name: shape for name, shape in shapes.items() if name.startswith("vision.")}
        return super().slots(text, present) + [_vision_slot(name, shape) for name, shape in vision.items()]

    def _slot(self, name: str, shape: Shape, present: Present) -> Slot:
        owner, _, ours = name.rpartition(".")
        if not owner.endswith(".moe.experts"):
            return super()._slot(name, shape, present)
        weight = EXPERT_WEIGHT_OF[ours]
        fused = f"model.language_model.layers.{owner.split('.')[1]}.mlp.experts.{weight.fused}"
        num_experts, num_rows, num_columns = shape
        as_in_memory = num_experts, weight.num_parts * num_rows, num_columns
        is_square = as_in_memory[1] == num_columns  # then transformers assumes its in-memory layout
        is_in_memory = present is IN_MEMORY
        if is_square or is_in_memory or (fused in present and tuple(present[fused].shape) == as_in_memory):
            return fused_slot(name, shape, fused, weight)
        first = weight.part * num_rows
        return transposed_slot(name, shape, fused, weight.num_parts, slice(first, first + num_rows))


def _vision_slot(name: str, shape: Shape) -> Slot:
    theirs = name
    for pattern, replacement in _VISION_NAMES.items():
        theirs = re.sub(pattern, replacement, theirs)
    their_shape = (shape[0], *_PATCH_SHAPE) if name == "vision.patch.weight" else shape
    return Slot(name, shape, (Piece(theirs, their_shape),))


def _read_dense(theirs: TheirConfig) -> Qwen3VLConfig:
    return Qwen3VLConfig(**_read_shared(theirs))


def _read_sparse(theirs: TheirConfig) -> Qwen3VLMoEConfig:
    return Qwen3VLMoEConfig(**_read_shared(theirs, _read_experts))


def _read_experts(text: TheirConfig, fields: dict[str, Any]) -> dict[str, Any]:
    text.require("norm_topk_prob", True)
    text.require("sliding_window")
    experts_key = "num_local_experts" if "num_local_experts" in text.content else "num_experts"
    moe = MoEConfig(
        hidden_dim=text.take("moe_intermediate_size", int),
        num_experts=text.take(experts_key, int),
        top_k=text.take("num_experts_per_tok", int),
        route_norm=True,
    )
    return read_dense_layers(text, fields["num_layers"]) | {"moe": moe}


def _read_shared(
    theirs: TheirConfig, read_more: Callable[[TheirConfig, dict[str, Any]], dict[str, Any]] | None = None
) -> dict[str, Any]:
    content = theirs.take("text_config", dict)
    text = TheirConfig(_without_sections(content), prefix="text_config.")
    fields = read_decoder(text)
    fields["num_kv_heads"] = text.take("num_key_value_heads", int)
    fields["head_dim"] = text.take("head_dim", int, 128)
    fields["tied_embeddings"] = theirs.take("tie_word_embeddings", bool, fields["tied_embeddings"])
    if read_more is not None:
        fields |= read_more(text, fields)
    text.refuse_unknown()
    vision = TheirConfig(theirs.take("vision_config", dict), prefix="vision_config.")
    fields |= {"mrope_section": _section(content), "vision": _read_vision(vision, fields["dim"])}
    theirs.skip(*_TOKEN_IDS)
    theirs.problems += text.problems + vision.problems
    return fields


def _section(content: Mapping[str, Any]) -> tuple[int, int, int]:
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    time, height, width = rope.get("mrope_section", (24, 20, 20))
    return time, height, width


def _without_sections(content: Mapping[str, Any]) -> dict[str, Any]:
    """Their config with the rotary options common to all decoders; M-RoPE is always interleaved in this family."""
    changed = dict(content)
    for key in content.keys() & {"rope_scaling", "rope_parameters"}:
        rope = content[key] or {}
        changed[key] = {name: rope[name] for name in rope if name not in ("mrope_section", "mrope_interleaved")}
    return changed


def _read_vision(theirs: TheirConfig, text_dim: int) -> VisionConfig:
    theirs.require("hidden_act", "gelu_pytorch_tanh")
    theirs.require("in_channels", 3)
    theirs.require("patch_size", PATCH_SIZE)
    theirs.require("temporal_patch_size", FRAMES)
    theirs.require("spatial_merge_size", MERGE)
    theirs.require("out_hidden_size", text_dim)
    theirs.require("rope_parameters", {"rope_theta": 10000.0, "rope_type": "axial"})
    num_positions = theirs.take("num_position_embeddings", int, 2304)
    if math.isqrt(num_positions) ** 2 != num_positions:
        theirs.problems.append(f"vision_config.num_position_embeddings is {num_positions}, which is not a square")
    vision = VisionConfig(
        dim=theirs.take("hidden_size", int),
        num_layers=theirs.take("depth", int),
        num_heads=theirs.take("num_heads", int),
        hidden_dim=theirs.take("intermediate_size", int),
        positions_per_side=math.isqrt(num_positions),
        deepstack_layers=tuple(theirs.take("deepstack_visual_indexes", list)),
    )
    theirs.refuse_unknown()
    return vision


def _dense_obstacles(model: Qwen3VLConfig) -> list[str]:
    return unlike(model, _NO_SCALING, _DENSE)


def _sparse_obstacles(model: Qwen3VLMoEConfig) -> list[str]:
    return unlike(model, _NO_SCALING, _SPARSE) + moe_obstacles(model, _SPARSE, {"moe.route_norm": True})


def _write_sparse(model: Qwen3VLMoEConfig) -> dict[str, Any]:
    written = _write(model)
    written["text_config"] |= write_dense_layers(model) | {
        "model_type": "qwen3_vl_moe_text",
        "moe_intermediate_size": model.moe.hidden_dim,
        "num_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.top_k,
        "norm_topk_prob": True,
    }
    written["vision_config"]["model_type"] = "qwen3_vl_moe"
    return written


def _write(model: Qwen3VLConfig) -> dict[str, Any]:
    sections = {"rope_type": "default", "mrope_section": list(model.mrope_section), "mrope_interleaved": True}
    text = write_decoder(model) | {
        "model_type": "qwen3_vl_text",
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rope_scaling": sections,
    }
    vision = {
        "model_type": "qwen3_vl",
        "hidden_size": model.vision.dim,
        "depth": model.vision.num_layers,
        "num_heads": model.vision.num_heads,
        "intermediate_size": model.vision.hidden_dim,
        "num_position_embeddings": model.vision.positions_per_side**2,
        "deepstack_visual_indexes": list(model.vision.deepstack_layers),
        "out_hidden_size": model.dim,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "patch_size": PATCH_SIZE,
        "temporal_patch_size": FRAMES,
        "spatial_merge_size": MERGE,
    }
    return {
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": model.tied_embeddings,
        **_TOKEN_IDS,
    }


ARCHITECTURES = (
    _WithVision(_DENSE, "qwen3_vl", _read_dense, _dense_obstacles, _write, _TEXT_NAMES),
    _WithVision(_SPARSE, "qwen3_vl_moe", _read_sparse, _sparse_obstacles, _write_sparse, _TEXT_NAMES),
)


def architecture_for(model: Qwen3VLConfig) -> Architecture:
    return ARCHITECTURES[isinstance(model, Qwen3VLMoEConfig)]
