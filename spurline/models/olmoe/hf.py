"""OLMoE in Hugging Face format."""

from __future__ import annotations

from typing import Any

from spurline.models.common.hf import (
    DECODER_NAMES,
    EXPERT_NAMES,
    GROUPED_QUERY_NAMES,
    QK_NORM_NAMES,
    Architecture,
    moe_obstacles,
)
from spurline.models.common.hf_config import head_dim_of, read_decoder, write_decoder
from spurline.models.common.hf_rope import yarn_obstacles
from spurline.models.common.hf_values import TheirConfig
from spurline.models.olmoe.configs import OLMoEConfig
from spurline.moe.config import MoEConfig

_OLMOE = "OlmoeForCausalLM"


def _read(theirs: TheirConfig) -> OLMoEConfig:
    fields = read_decoder(theirs)
    theirs.require("clip_qkv")
    moe = MoEConfig(
        hidden_dim=fields["dense_hidden_dim"],
        num_experts=theirs.take("num_experts", int, 64),
        top_k=theirs.take("num_experts_per_tok", int, 8),
        route_norm=theirs.take("norm_topk_prob", bool, False),
    )
    return OLMoEConfig(
        **fields,
        num_kv_heads=theirs.take("num_key_value_heads", int, fields["num_heads"]),
        head_dim=head_dim_of(theirs, fields),
        moe=moe,
    )


def _obstacles(model: OLMoEConfig) -> list[str]:
    found = yarn_obstacles(model.yarn, _OLMOE)
    if model.num_heads * model.head_dim != model.dim:
        found.append(
            f"model.num_heads {model.num_heads} x model.head_dim {model.head_dim} differs from model.dim {model.dim},"
            f" which {_OLMOE} can't express"
        )
    only = {"num_dense_layers": 0, "dense_layers": ()}
    return found + moe_obstacles(model, _OLMOE, only)


def _write(model: OLMoEConfig) -> dict[str, Any]:
    return write_decoder(model) | {
        "num_key_value_heads": model.num_kv_heads,
        "intermediate_size": model.moe.hidden_dim,
        "num_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.top_k,
        "norm_topk_prob": model.moe.route_norm,
    }


_NAMES = DECODER_NAMES | GROUPED_QUERY_NAMES | QK_NORM_NAMES | EXPERT_NAMES
ARCHITECTURES = (Architecture(_OLMOE, "olmoe", _read, _obstacles, _write, _NAMES),)


def architecture_for(model: OLMoEConfig) -> Architecture:
    return ARCHITECTURES[0]
