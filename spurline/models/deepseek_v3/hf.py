"""DeepSeek in Hugging Face format: V3 for sigmoid scores, V2 for softmax scores.

Both pair adjacent rotary channels, as we do, so no weight is permuted. V2 selects experts by score alone: it has no
selection bias, doesn't normalize weights, and scores a group by its best expert, where ours uses the two best.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spurline.models.common.hf import (
    ANY,
    DECODER_NAMES,
    EXPERT_NAMES,
    NO_TENSORS,
    SHARED_EXPERT_NAMES,
    Architecture,
    Present,
    Shape,
    Slot,
    further_prediction_layers,
    moe_obstacles,
)
from spurline.models.common.hf_config import read_decoder, write_decoder
from spurline.models.common.hf_rope import yarn_obstacles
from spurline.models.common.hf_values import TheirConfig
from spurline.models.deepseek_v3.configs import DeepSeekV3Config
from spurline.moe.config import MoEConfig

_V2, _V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
_LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms inside latent attention, whatever rms_norm_eps is; ours uses norm_eps for all norms."""
_NAMES_V2 = (
    DECODER_NAMES
    | EXPERT_NAMES
    | SHARED_EXPERT_NAMES
    | {
        "layers.{layer}.attention.wq.weight": "model.layers.{layer}.self_attn.q_proj.weight",
        "layers.{layer}.attention.wq_a.weight": "model.layers.{layer}.self_attn.q_a_proj.weight",
        "layers.{layer}.attention.q_norm.weight": "model.layers.{layer}.self_attn.q_a_layernorm.weight",
        "layers.{layer}.attention.wq_b.weight": "model.layers.{layer}.self_attn.q_b_proj.weight",
        "layers.{layer}.attention.wkv_a.weight": "model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight",
        "layers.{layer}.attention.kv_norm.weight": "model.layers.{layer}.self_attn.kv_a_layernorm.weight",
        "layers.{layer}.attention.wkv_b.weight": "model.layers.{layer}.self_attn.kv_b_proj.weight",
        "layers.{layer}.attention.wo.weight": "model.layers.{layer}.self_attn.o_proj.weight",
    }
)
# Prediction modules are stored as additional layers after the last one: see _V3Architecture.
_NAMES_V3 = _NAMES_V2 | {
    "layers.{layer}.moe.router.expert_bias_E": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
    "layers.{layer}.enorm.weight": "model.layers.{layer}.enorm.weight",
    "layers.{layer}.hnorm.weight": "model.layers.{layer}.hnorm.weight",
    "layers.{layer}.eh_proj.weight": "model.layers.{layer}.eh_proj.weight",
    "layers.{layer}.norm.weight": "model.layers.{layer}.shared_head.norm.weight",
}
# Tensors of which each prediction module stores a copy, and their originals.
_COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


class _V3Architecture(Architecture):
    def slots(self, shapes: Mapping[str, Shape], present: Present = NO_TENSORS) -> list[Slot]:
        """Prediction module k is their layer num_layers + k; its copies of embedding and output matrix are ignored."""
        num_layers = len({name.split(".")[1] for name in shapes if name.startswith("layers.")})

        def numbered_on(name: str) -> str:
            return re.sub(r"^mtp\.(\d+)\.(block\.)?", lambda match: f"layers.{num_layers + int(match[1])}.", name)

        found = super().slots({numbered_on(name): shape for name, shape in shapes.items()}, present)
        return [replace(slot, name=name) for slot, name in zip(found, shapes, strict=True)]

    def copies(self, shapes: Mapping[str, Shape]) -> dict[str, str]:
        num_layers = len({name.split(".")[1] for name in shapes if name.startswith("layers.")})
        modules = {int(name.split(".")[1]) for name in shapes if name.startswith("mtp.")}
        return {
            f"model.layers.{num_layers + number}.{copy}": original
            for number in modules
            for copy, original in _COPIES.items()
        }


def _read_shared(theirs: TheirConfig, **routing: Any) -> DeepSeekV3Config:
    fields = read_decoder(theirs, scales_softmax=True)
    if fields["norm_eps"] != _LATENT_NORM_EPS:
        theirs.problems.append(
            f"rms_norm_eps is {fields['norm_eps']}, latent attention has {_LATENT_NORM_EPS}, and Spurline one for all"
        )
    theirs.require("moe_layer_freq", 1)
    theirs.require("num_key_value_heads", fields["num_heads"])
    theirs.skip("head_dim", "qk_head_dim")  # they follow from the widths below
    widths = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    num_shared = theirs.take("n_shared_experts", int, null=0)
    if num_shared < 1:
        theirs.problems.append(f"n_shared_experts is {num_shared}, and Spurline reads only models that have some")
    moe = MoEConfig(
        hidden_dim=theirs.take("moe_intermediate_size", int),
        num_experts=theirs.take("n_routed_experts", int),
        top_k=theirs.take("num_experts_per_tok", int),
        num_shared_experts=num_shared,
        route_scale=theirs.take("routed_scaling_factor", float),
        **routing,
    )
    return DeepSeekV3Config(
        **fields,
        **{width: theirs.take(width, int) for width in widths},
        num_dense_layers=theirs.take("first_k_dense_replace", int),
        q_lora_rank=theirs.take("q_lora_rank", int, null=0),
        moe=moe,
    )


def _read_v2(theirs: TheirConfig) -> DeepSeekV3Config:
    theirs.require("scoring_func", "softmax")
    theirs.require("topk_method", "greedy")
    theirs.require("norm_topk_prob", False)
    theirs.skip("n_group", "topk_group")  # greedy selection ignores them
    return _read_shared(theirs, score_func="softmax")


def _read_v3(theirs: TheirConfig) -> DeepSeekV3Config:
    theirs.require("scoring_func", "sigmoid")
    theirs.require("topk_method", "noaux_tc")
    theirs.require("rope_interleave", True)
    theirs.skip("num_nextn_predict_layers")
    num_groups, num_limited = theirs.take("n_group", int), theirs.take("topk_group", int)
    return _read_shared(
        theirs,
        score_func="sigmoid",
        route_norm=theirs.take("norm_topk_prob", bool),
        num_groups=num_groups,
        num_limited_groups=num_limited if num_groups > 1 else None,
    )


def _shared_obstacles(model: DeepSeekV3Config, architecture: str, only: dict[str, Any]) -> list[str]:
    only = {
        "norm_eps": _LATENT_NORM_EPS,
        "dense_layers": (),
        **dict.fromkeys(("moe.score_func", "moe.num_shared_experts", "moe.route_scale", "moe.num_groups"), ANY),
    } | only
    found = yarn_obstacles(model.yarn, architecture, scales_softmax=True) + moe_obstacles(model, architecture, only)
    if model.moe.num_shared_experts < 1:
        found.append(f"model.moe.num_shared_experts is 0, and {architecture} needs at least 1")
    return found


def _v2_obstacles(model: DeepSeekV3Config) -> list[str]:
    found = _shared_obstacles(model, _V2, {"moe.route_norm": False, "moe.num_groups": 1, "num_mtp_layers": 0})
    if model.dim % model.num_heads:
        found.append(f"model.dim {model.dim} is not a multiple of model.num_heads {model.num_heads}, as {_V2} needs")
    return found


def _v3_obstacles(model: DeepSeekV3Config) -> list[str]:
    return _shared_obstacles(model, _V3, {"moe.score_func": "sigmoid"})


def _write_shared(model: DeepSeekV3Config) -> dict[str, Any]:
    return write_decoder(model) | {
        "num_key_value_heads": model.num_heads,
        "q_lora_rank": model.q_lora_rank or None,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_nope_head_dim,
        "qk_rope_head_dim": model.qk_rope_head_dim,
        "v_head_dim": model.v_head_dim,
        "first_k_dense_replace": model.num_dense_layers,
        "moe_layer_freq": 1,
        "moe_intermediate_size": model.moe.hidden_dim,
        "n_routed_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.top_k,
        "n_shared_experts": model.moe.num_shared_experts,
        "routed_scaling_factor": model.moe.route_scale,
        "scoring_func": model.moe.score_func,
        "norm_topk_prob": model.moe.route_norm,
        "n_group": model.moe.num_groups,
        "topk_group": model.moe.num_limited_groups or 1,
    }


def _write_v2(model: DeepSeekV3Config) -> dict[str, Any]:
    return _write_shared(model) | {"topk_method": "greedy"}


def _write_v3(model: DeepSeekV3Config) -> dict[str, Any]:
    return _write_shared(model) | {"topk_method": "noaux_tc", "num_nextn_predict_layers": model.num_mtp_layers}


V2 = Architecture(_V2, "deepseek_v2", _read_v2, _v2_obstacles, _write_v2, _NAMES_V2)
V3 = _V3Architecture(_V3, "deepseek_v3", _read_v3, _v3_obstacles, _write_v3, _NAMES_V3, further_prediction_layers)
ARCHITECTURES = (V2, V3)


def architecture_for(model: DeepSeekV3Config) -> Architecture:
    return V3 if model.moe.score_func == "sigmoid" else V2
