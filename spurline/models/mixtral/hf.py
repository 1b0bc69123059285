"""Mistral and Mixtral in Hugging Face format: a layer's experts are block_sparse_moe, with w1 gate, w2 down, w3 up."""

from __future__ import annotations

from typing import Any

from spurline.models.common.hf import DECODER_NAMES, GROUPED_QUERY_NAMES, Architecture, moe_obstacles
from spurline.models.common.hf_config import head_dim_of, read_decoder, write_decoder
from spurline.models.common.hf_rope import yarn_obstacles
from spurline.models.common.hf_values import TheirConfig
from spurline.models.mixtral.configs import MistralConfig, MixtralConfig
from spurline.moe.config import MoEConfig

_DENSE, _SPARSE = "MistralForCausalLM", "MixtralForCausalLM"
_NAMES = DECODER_NAMES | GROUPED_QUERY_NAMES
_MOE = "model.layers.{layer}.block_sparse_moe."
_SPARSE_NAMES = _NAMES | {
    "layers.{layer}.moe.router.gate_ED": _MOE + "gate.weight",
    "layers.{layer}.moe.router.expert_bias_E": None,
    "layers.{layer}.moe.experts.w1_EFD": _MOE + "experts.{expert}.w1.weight",
    "layers.{layer}.moe.experts.w3_EFD": _MOE + "experts.{expert}.w3.weight",
    "layers.{layer}.moe.experts.w2_EDF": _MOE + "experts.{expert}.w2.weight",
}


def _read_shared(theirs: TheirConfig) -> dict[str, Any]:
    fields = read_decoder(theirs)
    fields["num_kv_heads"] = theirs.take("num_key_value_heads", int, fields["num_heads"])
    fields["head_dim"] = head_dim_of(theirs, fields)
    fields["sliding_window"] = theirs.take("sliding_window", int, 0, null=0)
    return fields


def _read_dense(theirs: TheirConfig) -> MistralConfig:
    return MistralConfig(**_read_shared(theirs))


def _read_sparse(theirs: TheirConfig) -> MixtralConfig:
    fields = _read_shared(theirs)
    theirs.skip("router_jitter_noise")  # only used in training
    moe = MoEConfig(
        hidden_dim=fields["dense_hidden_dim"],
        num_experts=theirs.take("num_local_experts", int),
        top_k=theirs.take("num_experts_per_tok", int),
        route_norm=True,
    )
    return MixtralConfig(**fields, moe=moe)


def _dense_obstacles(model: MistralConfig) -> list[str]:
    return yarn_obstacles(model.yarn, _DENSE)


def _sparse_obstacles(model: MixtralConfig) -> list[str]:
    only = {"num_dense_layers": 0, "dense_layers": (), "moe.route_norm": True}
    return yarn_obstacles(model.yarn, _SPARSE) + moe_obstacles(model, _SPARSE, only)


def _write_dense(model: MistralConfig) -> dict[str, Any]:
    of_heads = {"num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim}
    return write_decoder(model) | of_heads | {"sliding_window": model.sliding_window or None}


def _write_sparse(model: MixtralConfig) -> dict[str, Any]:
    return _write_dense(model) | {
        "intermediate_size": model.moe.hidden_dim,
        "num_local_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.top_k,
    }


ARCHITECTURES = (
    Architecture(_DENSE, "mistral", _read_dense, _dense_obstacles, _write_dense, _NAMES),
    Architecture(_SPARSE, "mixtral", _read_sparse, _sparse_obstacles, _write_sparse, _SPARSE_NAMES),
)


def architecture_for(model: MistralConfig) -> Architecture:
    return ARCHITECTURES[isinstance(model, MixtralConfig)]
