"""Read and write a Hugging Face config.json; a key that is not understood is an error. No torch import."""

from __future__ import annotations

from typing import Any

from spurline.models.common.decoder_config import DecoderConfig, SparseDecoderConfig
from spurline.models.common.hf_rope import read_rope, write_rope
from spurline.models.common.hf_values import TheirConfig


def read_layer_types(theirs: TheirConfig, *known: str) -> list[str]:
    """The attention type of each layer; empty if not given."""
    kinds: list[str] = theirs.take("layer_types", list, [])
    if others := sorted({f"{kind}" for kind in kinds if kind not in known}):
        theirs.problems.append(f"layer_types has {', '.join(others)}, and Spurline has only {' and '.join(known)}")
    return kinds


def head_dim_of(theirs: TheirConfig, fields: dict[str, Any]) -> int:
    """The width of a head: head_dim if given, or the model's width divided by the number of heads."""
    head_dim: int = theirs.take("head_dim", int, fields["dim"] // max(fields["num_heads"], 1))
    return head_dim


def read_decoder(
    theirs: TheirConfig,
    *,
    scales_softmax: bool = False,
    has_bias: bool = False,
    rotary_fraction: float | None = None,
) -> dict[str, Any]:
    """The fields of DecoderConfig.

    `scales_softmax`: YaRN's mscale_all_dim also changes the softmax scale. `has_bias`: the family reads attention_bias.
    `rotary_fraction`: its default, in a family whose heads may rotate only some of their channels.
    """
    theirs.require("hidden_act", "silu")
    if not has_bias:
        theirs.require("attention_bias", False)
    theirs.require("mlp_bias", False)
    theirs.require("attention_dropout", 0, 0.0)
    _read_quantization(theirs)
    return read_rope(theirs, scales_softmax, rotary_fraction) | {
        "vocab_size": theirs.take("vocab_size", int),
        "dim": theirs.take("hidden_size", int),
        "num_layers": theirs.take("num_hidden_layers", int),
        "num_heads": theirs.take("num_attention_heads", int),
        "dense_hidden_dim": theirs.take("intermediate_size", int),
        "norm_eps": theirs.take("rms_norm_eps", float, 1e-6),
        "tied_embeddings": theirs.take("tie_word_embeddings", bool, False),
    }


def _read_quantization(theirs: TheirConfig) -> None:
    """Reject quantization formats that can't be read; weights are dequantized, so the model config ignores them."""
    quantization = theirs.take("quantization_config", dict, {})
    if not quantization:
        return
    section = TheirConfig(quantization, prefix="quantization_config.")
    section.require("quant_method", "fp8", "mxfp4")
    if section.take("quant_method", str) == "fp8":
        section.require("fmt", "e4m3")
        block = section.take("weight_block_size", list)
        if len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
            section.problems.append(f"{section.prefix}weight_block_size is {block}, which is not two sizes")
        section.skip("activation_scheme", "modules_to_not_convert", "scale_fmt")
        section.refuse_unknown()
    theirs.problems += section.problems


def read_dense_layers(theirs: TheirConfig, num_layers: int) -> dict[str, Any]:
    """num_dense_layers and dense_layers from mlp_only_layers and decoder_sparse_step of the Qwen families."""
    step = theirs.take("decoder_sparse_step", int, 1)
    listed = theirs.take("mlp_only_layers", list, [])
    if step < 1:
        theirs.problems.append(f"decoder_sparse_step is {step}, which is not a number of layers")
        return {}
    dense = [layer for layer in range(num_layers) if layer in listed or (layer + 1) % step]
    first = next((number for number, layer in enumerate(dense) if layer != number), len(dense))
    return {"num_dense_layers": first, "dense_layers": tuple(dense[first:])}


def write_dense_layers(model: SparseDecoderConfig) -> dict[str, Any]:
    """The same pattern in their keys: a list of all dense layers."""
    return {"decoder_sparse_step": 1, "mlp_only_layers": [*range(model.num_dense_layers), *model.dense_layers]}


def write_decoder(model: DecoderConfig) -> dict[str, Any]:
    """The keys for the fields of DecoderConfig, in the form that transformers 4 and 5 both read."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.dense_hidden_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_embeddings,
    } | write_rope(model)
