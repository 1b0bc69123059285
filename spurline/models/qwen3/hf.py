"""Qwen3 as Hugging Face stores it: a dense class and one with experts; rotary channels are paired as ours are."""

from __future__ import annotations

from typing import Any

from spurline.models.common.hf import DECODER_NAMES, EXPERT_NAMES, GROUPED_QUERY_NAMES, Architecture, unlike
from spurline.models.common.hf_config import TheirConfig, read_decoder, write_decoder, yarn_obstacles
from spurline.models.qwen3.configs import Qwen3Config, Qwen3MoEConfig
from spurline.moe.config import MoEConfig

_DENSE, _SPARSE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
_NAMES = (
    DECODER_NAMES
    | GROUPED_QUERY_NAMES
    | {
        "layers.{layer}.attention.q_norm.weight": "model.layers.{layer}.self_attn.q_norm.weight",
        "layers.{layer}.attention.k_norm.weight": "model.layers.{layer}.self_attn.k_norm.weight",
    }
)


def _read_shared(theirs: TheirConfig) -> dict[str, Any]:
    fields = read_decoder(theirs)
    theirs.require("use_sliding_window", False)
    theirs.skip("sliding_window", "max_window_layers")  # which mean nothing without it
    if any(kind != "full_attention" for kind in theirs.take("layer_types", list, [])):
        theirs.problems.append("layer_types has other layers than full_attention, which is all that Spurline has")
    fields["num_kv_heads"] = theirs.take("num_key_value_heads", int)
    return fields


def _read_dense(theirs: TheirConfig) -> Qwen3Config:
    return Qwen3Config(**_read_shared(theirs), head_dim=theirs.take("head_dim", int, 128))


def _read_sparse(theirs: TheirConfig) -> Qwen3MoEConfig:
    fields = _read_shared(theirs)
    theirs.require("decoder_sparse_step", 1)
    dense_layers = sorted(theirs.take("mlp_only_layers", list, []))
    if dense_layers != list(range(len(dense_layers))):
        theirs.problems.append(f"mlp_only_layers is {dense_layers}, and Spurline has dense layers only at the start")
    experts_key = "num_local_experts" if "num_local_experts" in theirs.content else "num_experts"
    moe = MoEConfig(
        hidden_dim=theirs.take("moe_intermediate_size", int),
        num_experts=theirs.take(experts_key, int),
        top_k=theirs.take("num_experts_per_tok", int),
        route_norm=theirs.take("norm_topk_prob", bool, False),
    )
    head_dim = theirs.take("head_dim", int, fields["dim"] // max(fields["num_heads"], 1))
    return Qwen3MoEConfig(**fields, head_dim=head_dim, num_dense_layers=len(dense_layers), moe=moe)


def _dense_obstacles(model: Qwen3Config) -> list[str]:
    return yarn_obstacles(model.yarn, _DENSE)


def _sparse_obstacles(model: Qwen3MoEConfig) -> list[str]:
    only = {
        "moe.score_func": "softmax",
        "moe.num_shared_experts": 0,
        "moe.route_scale": 1.0,
        "moe.num_groups": 1,
        "moe.score_before_experts": False,
        "moe.force_load_balance": False,
        "moe.router": "top_k",
    }
    return yarn_obstacles(model.yarn, _SPARSE) + unlike(model, only, _SPARSE)


def _write_dense(model: Qwen3Config) -> dict[str, Any]:
    of_heads = {"num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim}
    return write_decoder(model) | of_heads | {"use_sliding_window": False}


def _write_sparse(model: Qwen3MoEConfig) -> dict[str, Any]:
    return _write_dense(model) | {
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(model.num_dense_layers)),
        "moe_intermediate_size": model.moe.hidden_dim,
        "num_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.top_k,
        "norm_topk_prob": model.moe.route_norm,
    }


ARCHITECTURES = (
    Architecture(_DENSE, "qwen3", _read_dense, _dense_obstacles, _write_dense, _NAMES),
    Architecture(_SPARSE, "qwen3_moe", _read_sparse, _sparse_obstacles, _write_sparse, _NAMES | EXPERT_NAMES),
)


def architecture_for(model: Qwen3Config) -> Architecture:
    return ARCHITECTURES[isinstance(model, Qwen3MoEConfig)]
