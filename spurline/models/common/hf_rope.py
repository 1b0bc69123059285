"""RoPE and its scaling in a Hugging Face config.json: YaRN and Llama 3.1. No torch import."""

from __future__ import annotations

from typing import Any

from spurline.models.common.decoder_config import DecoderConfig, Llama3RopeConfig, YarnConfig
from spurline.models.common.hf_values import TheirConfig


def read_rope(theirs: TheirConfig, scales_softmax: bool, rotary_fraction: float | None) -> dict[str, Any]:
    """rope_theta, yarn and llama3_rope; also rotary_fraction in families that have it, with the given default."""
    # Transformers 4 has rope_theta and rope_scaling, transformers 5 has both in rope_parameters.
    theta = theirs.take("rope_theta", float, 10_000.0)
    old, new = theirs.take("rope_scaling", dict, {}), theirs.take("rope_parameters", dict, {})
    rope = TheirConfig(old or new, prefix="rope_scaling." if old else "rope_parameters.")
    theta = rope.take("rope_theta", float, theta)
    fraction = {}
    if rotary_fraction is None:
        theirs.require("partial_rotary_factor", 1.0)
        rope.require("partial_rotary_factor", 1.0)
    else:
        outer = theirs.take("partial_rotary_factor", float, rotary_fraction)
        fraction = {"rotary_fraction": rope.take("partial_rotary_factor", float, outer)}
    kind = rope.take("rope_type", str, rope.take("type", str, "default"))
    yarn, llama3 = YarnConfig(), Llama3RopeConfig()
    if kind == "yarn":
        yarn = _read_yarn(rope, theirs.content.get("max_position_embeddings"), scales_softmax)
    elif kind == "llama3":
        llama3 = _read_llama3(rope)
    else:
        rope.require("rope_type", "default", "yarn", "llama3")
        rope.require("type", "default", "yarn", "llama3")
    if kind in ("default", "yarn", "llama3"):
        rope.refuse_unknown()
    theirs.problems += rope.problems
    return {"rope_theta": theta, "yarn": yarn, "llama3_rope": llama3, **fraction}


def _read_llama3(rope: TheirConfig) -> Llama3RopeConfig:
    return Llama3RopeConfig(
        factor=rope.take("factor", float),
        original_seq_len=rope.take("original_max_position_embeddings", int),
        low_freq_factor=rope.take("low_freq_factor", float),
        high_freq_factor=rope.take("high_freq_factor", float),
    )


def _read_yarn(rope: TheirConfig, max_length: Any, scales_softmax: bool) -> YarnConfig:
    rope.require("attention_factor")
    original = rope.take("original_max_position_embeddings", int, max_length)
    mscale, mscale_all_dim = rope.take("mscale", float, 0.0), rope.take("mscale_all_dim", float, 0.0)
    if mscale and mscale_all_dim and not scales_softmax:
        rope.problems.append(
            f"{rope.prefix}mscale_all_dim is {mscale_all_dim}: in this architecture Spurline has only YaRN without it"
        )
    if mscale_all_dim and not mscale and scales_softmax:
        rope.problems.append(f"{rope.prefix}mscale is missing beside mscale_all_dim {mscale_all_dim}")
    return YarnConfig(
        factor=rope.take("factor", float, (max_length or original or 1) / (original or 1)),
        original_seq_len=original or 0,
        beta_fast=rope.take("beta_fast", float, 32.0),
        beta_slow=rope.take("beta_slow", float, 1.0),
        truncate=rope.take("truncate", bool, True),
        # transformers ignores either one without the other.
        mscale=mscale if mscale and mscale_all_dim else 1.0,
        mscale_all_dim=mscale_all_dim if mscale else 0.0,
    )


def write_rope(model: DecoderConfig) -> dict[str, Any]:
    """The keys for rotary positions, in the form that transformers 4 and 5 both read."""
    scaling = None
    if model.yarn.factor > 1:
        scaling = _write_yarn(model.yarn)
    elif model.llama3_rope.factor > 1:
        scaling = _write_llama3(model.llama3_rope)
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling}


def _write_llama3(llama3: Llama3RopeConfig) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": llama3.factor,
        "original_max_position_embeddings": llama3.original_seq_len,
        "low_freq_factor": llama3.low_freq_factor,
        "high_freq_factor": llama3.high_freq_factor,
    }


def _write_yarn(yarn: YarnConfig) -> dict[str, Any]:
    scaling = {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_seq_len,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        **({} if yarn.truncate else {"truncate": False}),
    }
    return scaling | ({"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim} if yarn.mscale_all_dim else {})


def yarn_obstacles(yarn: YarnConfig, architecture: str, *, scales_softmax: bool = False) -> list[str]:
    """Errors for YaRN options that the architecture can't express."""
    if yarn.factor == 1 or (yarn.mscale, yarn.mscale_all_dim) == (1, 0):
        return []
    if scales_softmax and yarn.mscale and yarn.mscale_all_dim:
        return []
    without = "one without the other" if scales_softmax else "others than 1 and 0"
    return [
        f"model.yarn.mscale is {yarn.mscale} and model.yarn.mscale_all_dim {yarn.mscale_all_dim}:"
        f" {architecture} can't express {without}"
    ]
