"""Qwen2 in Hugging Face format: a dense class, and one with experts and a gated shared expert."""

from __future__ import annotations

from typing import Any

from spurline.models.common.hf import (
    ANY,
    DECODER_NAMES,
    EXPERT_NAMES,
    GROUPED_QUERY_NAMES,
    QKV_BIAS_NAMES,
    SHARED_EXPERT_NAMES,
    Architecture,
    moe_obstacles,
    unlike,
)
from spurline.models.common.hf_config import (
    head_dim_of,
    read_decoder,
    read_dense_layers,
    read_layer_types,
    write_decoder,
    write_dense_layers,
)
from spurline.models.common.hf_rope import yarn_obstacles
from spurline.models.common.hf_values import TheirConfig
from spurline.models.qwen2_moe.configs import Qwen2Config, Qwen2MoEConfig
from spurline.moe.config import MoEConfig

_DENSE, _SPARSE = "Qwen2ForCausalLM", "Qwen2MoeForCausalLM"
_NAMES = DECODER_NAMES | GROUPED_QUERY_NAMES | QKV_BIAS_NAMES
_SHARED_NAMES = {
    ours: theirs and theirs.replace(".shared_experts.", ".shared_expert.")
    for ours, theirs in SHARED_EXPERT_NAMES.items()
}
_SPARSE_NAMES = (
    _NAMES
    | EXPERT_NAMES
    | _SHARED_NAMES
    | {"layers.{layer}.moe.shared_experts.gate_1D": "model.layers.{layer}.mlp.shared_expert_gate.weight"}
)


def _read_shared(theirs: TheirConfig) -> dict[str, Any]:
    fields = read_decoder(theirs)
    theirs.require("use_sliding_window", False)
    theirs.skip("sliding_window", "max_window_layers")  # they have no effect without use_sliding_window
    read_layer_types(theirs, "full_attention")
    fields["num_kv_heads"] = theirs.take("num_key_value_heads", int, fields["num_heads"])
    fields["head_dim"] = head_dim_of(theirs, fields)
    return fields


def _read_dense(theirs: TheirConfig) -> Qwen2Config:
    return Qwen2Config(**_read_shared(theirs))


def _read_sparse(theirs: TheirConfig) -> Qwen2MoEConfig:
    fields = _read_shared(theirs)
    hidden_dim = theirs.take("moe_intermediate_size", int)
    shared_hidden_dim = theirs.take("shared_expert_intermediate_size", int)
    if hidden_dim < 1 or shared_hidden_dim < 1 or shared_hidden_dim % hidden_dim:
        theirs.problems.append(
            f"shared_expert_intermediate_size is {shared_hidden_dim}, and Spurline has only multiples of"
            f" moe_intermediate_size {hidden_dim}"
        )
    moe = MoEConfig(
        hidden_dim=hidden_dim,
        num_experts=theirs.take("num_experts", int),
        top_k=theirs.take("num_experts_per_tok", int),
        num_shared_experts=shared_hidden_dim // max(hidden_dim, 1),
        shared_gate=True,
        route_norm=theirs.take("norm_topk_prob", bool, False),
    )
    qkv_bias = theirs.take("qkv_bias", bool, True)
    return Qwen2MoEConfig(**fields, **read_dense_layers(theirs, fields["num_layers"]), qkv_bias=qkv_bias, moe=moe)


def _dense_obstacles(model: Qwen2Config) -> list[str]:
    return yarn_obstacles(model.yarn, _DENSE) + unlike(model, {"qkv_bias": True}, _DENSE)


def _sparse_obstacles(model: Qwen2MoEConfig) -> list[str]:
    found = yarn_obstacles(model.yarn, _SPARSE)
    return found + moe_obstacles(model, _SPARSE, {"moe.shared_gate": True, "moe.num_shared_experts": ANY})


def _write_dense(model: Qwen2Config) -> dict[str, Any]:
    of_heads = {"num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim}
    written = write_decoder(model) | of_heads | {"use_sliding_window": False}
    del written["attention_bias"]
    return written


def _write_sparse(model: Qwen2MoEConfig) -> dict[str, Any]:
    return (
        _write_dense(model)
        | write_dense_layers(model)
        | {
            "qkv_bias": model.qkv_bias,
            "moe_intermediate_size": model.moe.hidden_dim,
            "shared_expert_intermediate_size": model.moe.shared_hidden_dim,
            "num_experts": model.moe.num_experts,
            "num_experts_per_tok": model.moe.top_k,
            "norm_topk_prob": model.moe.route_norm,
        }
    )


ARCHITECTURES = (
    Architecture(_DENSE, "qwen2", _read_dense, _dense_obstacles, _write_dense, _NAMES),
    Architecture(_SPARSE, "qwen2_moe", _read_sparse, _sparse_obstacles, _write_sparse, _SPARSE_NAMES),
)


def architecture_for(model: Qwen2Config) -> Architecture:
    return ARCHITECTURES[isinstance(model, Qwen2MoEConfig)]
