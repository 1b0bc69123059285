"""AGPT in Hugging Face format: Llama. Both pair channels of a head's two halves for RoPE, so no weight is permuted."""

from __future__ import annotations

from typing import Any

from spurline.models.agpt.configs import AGPTConfig
from spurline.models.common.hf import DECODER_NAMES, GROUPED_QUERY_NAMES, Architecture
from spurline.models.common.hf_config import head_dim_of, read_decoder, write_decoder
from spurline.models.common.hf_rope import yarn_obstacles
from spurline.models.common.hf_values import TheirConfig

_LLAMA = "LlamaForCausalLM"


def _read(theirs: TheirConfig) -> AGPTConfig:
    fields = read_decoder(theirs)
    num_heads = fields["num_heads"]
    return AGPTConfig(
        **fields,
        num_kv_heads=theirs.take("num_key_value_heads", int, num_heads),
        head_dim=head_dim_of(theirs, fields),
    )


def _obstacles(model: AGPTConfig) -> list[str]:
    found = yarn_obstacles(model.yarn, _LLAMA)
    if model.dim % model.num_heads:
        found.append(f"model.dim {model.dim} is not a multiple of model.num_heads {model.num_heads}, as {_LLAMA} needs")
    return found


def _write(model: AGPTConfig) -> dict[str, Any]:
    of_heads = {"num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim}
    return write_decoder(model) | of_heads | {"mlp_bias": False}


ARCHITECTURES = (Architecture(_LLAMA, "llama", _read, _obstacles, _write, DECODER_NAMES | GROUPED_QUERY_NAMES),)


def architecture_for(model: AGPTConfig) -> Architecture:
    return ARCHITECTURES[0]
