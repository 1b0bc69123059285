"""Qwen3 in Hugging Face format: a dense class and one with experts; rotary channels are paired as ours are."""

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
from spurline.models.qwen3.configs import Qwen3Config, Qwen3MoEConfig
from spurline.moe.config import MoEConfig

_DENSE, _SPARSE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
_NAMES = DECODER_NAMES | GROUPED_QUERY_NAMES | QK_NORM_NAMES


def _read_shared(theirs: TheirConfig) -> dict[str, Any]:
    fields = read_decoder(theirs)
    theirs.require("use_sliding_window", False)
    theirs.skip("sliding_window", "max_window_layers")  # they have no effect without use_sliding_window
    read_layer_types(theirs, "full_attention")
    fields["num_kv_heads"] = theirs.take("num_key_value_heads", int)
    return fields


def _read_dense(theirs: TheirConfig) -> Qwen3Config:
    return Qwen3Config(**_read_shared(theirs), head_dim=theirs.take("head_dim", int, 128))


def _read_sparse(theirs: TheirConfig) -> Qwen3MoEConfig:
    fields = _read_shared(theirs)
    fields |= read_dense_layers(theirs, fields["num_layers"])
    experts_key = "num_local_experts" if "num_local_experts" in theirs.content else "num_experts"
    moe = MoEConfig(
        hidden_dim=theirs.take("moe_intermediate_size", int),
        num_experts=theirs.take(experts_key, int),
        top_k=theirs.take("num_experts_per_tok", int),
        route_norm=theirs.take("norm_topk_prob", bool, False),
    )
    return Qwen3MoEConfig(**fields, head_dim=head_dim_of(theirs, fields), moe=moe)


def _dense_obstacles(model: Qwen3Config) -> list[str]:
    return yarn_obstacles(model.yarn, _DENSE)


def _sparse_obstacles(model: Qwen3MoEConfig) -> list[str]:
    return yarn_obstacles(model.yarn, _SPARSE) + moe_obstacles(model, _SPARSE, {})


def _write_dense(model: Qwen3Config) -> dict[str, Any]:
    of_heads = {"num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim}
    return write_decoder(model) | of_heads | {"use_sliding_window": False}


def _write_sparse(model: Qwen3MoEConfig) -> dict[str, Any]:
    return (
        _write_dense(model)
        | write_dense_layers(model)
        | {
            "moe_intermediate_size": model.moe.hidden_dim,
            "num_experts": model.moe.num_experts,
            "num_experts_per_tok": model.moe.top_k,
            "norm_topk_prob": model.moe.route_norm,
        }
    )


ARCHITECTURES = (
    Architecture(_DENSE, "qwen3", _read_dense, _dense_obstacles, _write_dense, _NAMES),
    Architecture(_SPARSE, "qwen3_moe", _read_sparse, _sparse_obstacles, _write_sparse, _NAMES | EXPERT_NAMES),
)


def architecture_for(model: Qwen3Config) -> Architecture:
    return ARCHITECTURES[isinstance(model, Qwen3MoEConfig)]
