"""GLM-4.5 in Hugging Face format: attention as in Llama, experts as in DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from spurline.models.common.hf import (
    ANY,
    DECODER_NAMES,
    EXPERT_NAMES,
    GROUPED_QUERY_NAMES,
    QK_NORM_NAMES,
    QKV_BIAS_NAMES,
    SHARED_EXPERT_NAMES,
    Architecture,
    further_prediction_layers,
    moe_obstacles,
)
from spurline.models.common.hf_config import head_dim_of, read_decoder, write_decoder
from spurline.models.common.hf_rope import yarn_obstacles
from spurline.models.common.hf_values import TheirConfig
from spurline.models.glm4_moe.configs import Glm4MoEConfig
from spurline.moe.config import MoEConfig

_GLM4 = "Glm4MoeForCausalLM"
_NAMES = (
    DECODER_NAMES
    | GROUPED_QUERY_NAMES
    | QKV_BIAS_NAMES
    | QK_NORM_NAMES
    | EXPERT_NAMES
    | SHARED_EXPERT_NAMES
    | {"layers.{layer}.moe.router.expert_bias_E": "model.layers.{layer}.mlp.gate.e_score_correction_bias"}
)


def _read(theirs: TheirConfig) -> Glm4MoEConfig:
    fields = read_decoder(theirs, has_bias=True, rotary_fraction=0.5)
    theirs.skip("num_nextn_predict_layers", "num_mtp_layers")
    num_groups, num_limited = theirs.take("n_group", int, 1), theirs.take("topk_group", int, 1)
    moe = MoEConfig(
        hidden_dim=theirs.take("moe_intermediate_size", int),
        num_experts=theirs.take("n_routed_experts", int),
        top_k=theirs.take("num_experts_per_tok", int),
        num_shared_experts=theirs.take("n_shared_experts", int, 1),
        score_func="sigmoid",
        route_norm=theirs.take("norm_topk_prob", bool, True),
        route_scale=theirs.take("routed_scaling_factor", float, 1.0),
        num_groups=num_groups,
        num_limited_groups=num_limited if num_groups > 1 else None,
    )
    return Glm4MoEConfig(
        **fields,
        num_kv_heads=theirs.take("num_key_value_heads", int, fields["num_heads"]),
        head_dim=head_dim_of(theirs, fields),
        num_dense_layers=theirs.take("first_k_dense_replace", int, 1),
        qkv_bias=theirs.take("attention_bias", bool, False),
        qk_norm=theirs.take("use_qk_norm", bool, False),
        moe=moe,
    )


def _obstacles(model: Glm4MoEConfig) -> list[str]:
    any_value = ("moe.num_shared_experts", "moe.route_scale", "moe.num_groups")
    only = {"dense_layers": (), "moe.score_func": "sigmoid", **dict.fromkeys(any_value, ANY)}
    found = yarn_obstacles(model.yarn, _GLM4) + moe_obstacles(model, _GLM4, only)
    if model.moe.num_shared_experts < 1:
        found.append(f"model.moe.num_shared_experts is 0, and {_GLM4} needs at least 1")
    return found


def _write(model: Glm4MoEConfig) -> dict[str, Any]:
    return write_decoder(model) | {
        "attention_bias": model.qkv_bias,
        "use_qk_norm": model.qk_norm,
        "partial_rotary_factor": model.rotary_fraction,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "first_k_dense_replace": model.num_dense_layers,
        "moe_intermediate_size": model.moe.hidden_dim,
        "n_routed_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.top_k,
        "n_shared_experts": model.moe.num_shared_experts,
        "routed_scaling_factor": model.moe.route_scale,
        "norm_topk_prob": model.moe.route_norm,
        "n_group": model.moe.num_groups,
        "topk_group": model.moe.num_limited_groups or 1,
        "num_nextn_predict_layers": 0,
    }


ARCHITECTURES = (Architecture(_GLM4, "glm4_moe", _read, _obstacles, _write, _NAMES, further_prediction_layers),)


def architecture_for(model: Glm4MoEConfig) -> Architecture:
    return ARCHITECTURES[0]
