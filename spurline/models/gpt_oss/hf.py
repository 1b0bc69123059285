"""gpt-oss in Hugging Face format: all experts of a layer in one tensor, transposed, gate and up interleaved.

Published weights are MXFP4; they are dequantized to bfloat16 when read, and exported as bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spurline.models.common.hf import (
    DECODER_NAMES,
    GROUPED_QUERY_NAMES,
    QKV_BIAS_NAMES,
    Architecture,
    Columns,
    Piece,
    Present,
    Shape,
    Slot,
    moe_obstacles,
    transposed_slot,
)
from spurline.models.common.hf_config import head_dim_of, read_decoder, read_layer_types, write_decoder
from spurline.models.common.hf_rope import yarn_obstacles
from spurline.models.common.hf_values import TheirConfig
from spurline.models.gpt_oss.configs import GptOssConfig
from spurline.moe.config import MoEConfig

_GPT_OSS = "GptOssForCausalLM"
_KINDS = "sliding_attention", "full_attention"
_LIMIT, _ALPHA = 7.0, 1.702
_NAMES = (
    DECODER_NAMES
    | GROUPED_QUERY_NAMES
    | QKV_BIAS_NAMES
    | {
        "layers.{layer}.attention.wo.bias": "model.layers.{layer}.self_attn.o_proj.bias",
        "layers.{layer}.attention.sinks_H": "model.layers.{layer}.self_attn.sinks",
        "layers.{layer}.moe.router.gate_ED": "model.layers.{layer}.mlp.router.weight",
        "layers.{layer}.moe.router.gate_bias_E": "model.layers.{layer}.mlp.router.bias",
        "layers.{layer}.moe.router.expert_bias_E": None,
        "layers.{layer}.moe.experts.b2_ED": "model.layers.{layer}.mlp.experts.down_proj_bias",
    }
)
_GATE_OR_UP = {"w1_EFD": 0, "b1_EF": 0, "w3_EFD": 1, "b3_EF": 1}


@dataclass(frozen=True)
class _TransposedExperts(Architecture):
    def _slot(self, name: str, shape: Shape, present: Present) -> Slot:
        owner, _, weight = name.rpartition(".")
        experts = f"model.layers.{owner.split('.')[1]}.mlp.experts." if owner.endswith(".moe.experts") else ""
        if not experts or weight == "b2_ED":
            return super()._slot(name, shape, present)
        if weight == "w2_EDF":
            return transposed_slot(name, shape, f"{experts}down_proj", 1, slice(None))
        in_turn = slice(_GATE_OR_UP[weight], None, 2)
        if weight.startswith("w"):
            return transposed_slot(name, shape, f"{experts}gate_up_proj", 2, in_turn)
        both = shape[0], 2 * shape[1]
        return Slot(name, shape, (Piece(f"{experts}gate_up_proj_bias", both, 0, Columns(both, in_turn, False)),))


def _read(theirs: TheirConfig) -> GptOssConfig:
    fields = read_decoder(theirs, has_bias=True)
    theirs.require("attention_bias", True)
    theirs.require("swiglu_limit", _LIMIT)
    theirs.require("swiglu_alpha", _ALPHA)
    theirs.skip("experts_per_token", "initial_context_length")  # other names for keys that are read
    kinds = read_layer_types(theirs, *_KINDS)
    if kinds and kinds != [_KINDS[layer % 2] for layer in range(fields["num_layers"])]:
        theirs.problems.append("layer_types are not sliding_attention and full_attention in turn, as Spurline has them")
    moe = MoEConfig(
        hidden_dim=fields["dense_hidden_dim"],
        num_experts=theirs.take("num_local_experts", int),
        top_k=theirs.take("num_experts_per_tok", int),
        experts="clamped_swiglu",
        gate_bias=True,
        route_norm=True,
    )
    return GptOssConfig(
        **fields,
        num_kv_heads=theirs.take("num_key_value_heads", int, fields["num_heads"]),
        head_dim=head_dim_of(theirs, fields),
        sliding_window=theirs.take("sliding_window", int, 128),
        moe=moe,
    )


def _obstacles(model: GptOssConfig) -> list[str]:
    only = {
        "num_dense_layers": 0,
        "dense_layers": (),
        "moe.experts": "clamped_swiglu",
        "moe.gate_bias": True,
        "moe.route_norm": True,
    }
    return yarn_obstacles(model.yarn, _GPT_OSS) + moe_obstacles(model, _GPT_OSS, only)


def _write(model: GptOssConfig) -> dict[str, Any]:
    written = write_decoder(model)
    # Without any scaling, transformers would use that of the published models.
    written["rope_scaling"] = written["rope_scaling"] or {"rope_type": "default"}
    return written | {
        "attention_bias": True,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "sliding_window": model.sliding_window,
        "layer_types": [_KINDS[layer % 2] for layer in range(model.num_layers)],
        "intermediate_size": model.moe.hidden_dim,
        "num_local_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.top_k,
        "swiglu_limit": _LIMIT,
    }


ARCHITECTURES = (_TransposedExperts(_GPT_OSS, "gpt_oss", _read, _obstacles, _write, _NAMES),)


def architecture_for(model: GptOssConfig) -> Architecture:
    return ARCHITECTURES[0]
