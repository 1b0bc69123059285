"""Read and write a Hugging Face config.json; a key that is not understood is an error. No torch import."""

from __future__ import annotations

import json
from typing import Any

from spurline.models.common.decoder_config import DecoderConfig, YarnConfig

_REQUIRED = object()
# Keys that do not change the logits: bookkeeping, token ids, initial weights, losses and generation defaults.
_HARMLESS = {
    *("architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "auto_map"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range", "max_position_embeddings"),
    *("return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("problem_type", "id2label", "label2id", "pretraining_tp", "ep_size"),
    *("output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux"),
}


class TheirConfig:
    """A config.json while it is read: by the end, each of its keys was taken, checked or is known to be harmless."""

    def __init__(self, content: dict[str, Any], prefix: str = "") -> None:
        self.content = content
        self.problems: list[str] = []
        self.prefix = prefix
        self._known = set(_HARMLESS)

    def take(self, key: str, kind: type, default: Any = _REQUIRED, *, null: Any = _REQUIRED) -> Any:
        """The value of `key`: `default` where it is missing, `null` (or else `default`) where it is null."""
        self._known.add(key)
        value = self.content.get(key, default)
        if value is None:
            value = default if null is _REQUIRED else null
        if value is _REQUIRED:
            self.problems.append(f"{self.prefix}{key} is missing")
            return kind()
        if kind is float and type(value) is int:
            return float(value)
        if value is not default and value is not null and type(value) is not kind:
            self.problems.append(f"{self.prefix}{key} is {_shown(value)}, which is not of type {kind.__name__}")
            return kind()
        return value

    def require(self, key: str, *supported: Any) -> None:
        """Reject any value of `key` but the supported ones; a missing or null value is accepted."""
        self._known.add(key)
        value = self.content.get(key)
        if value is not None and value not in supported:
            choices = " or ".join(_shown(choice) for choice in supported) or "none"
            self.problems.append(f"{self.prefix}{key} is {_shown(value)}, and Spurline has only {choices}")

    def skip(self, *keys: str) -> None:
        """Ignore keys that have no effect here."""
        self._known |= set(keys)

    def refuse_unknown(self) -> None:
        """Reject all keys that were not read: they may change the computation. Call this last."""
        for key, value in self.content.items():
            if key not in self._known and value is not None:
                self.problems.append(
                    f"{self.prefix}{key} is {_shown(value)}, which Spurline does not know:"
                    " remove the key if it changes nothing in the computation"
                )


def read_decoder(theirs: TheirConfig, *, scales_softmax: bool = False) -> dict[str, Any]:
    """The fields of DecoderConfig; `scales_softmax`: YaRN's mscale_all_dim also changes the softmax scale."""
    theirs.require("hidden_act", "silu")
    theirs.require("attention_bias", False)
    theirs.require("mlp_bias", False)
    theirs.require("attention_dropout", 0, 0.0)
    if theirs.take("quantization_config", dict, {}):
        theirs.problems.append(
            "quantization_config says that the weights are quantized: give a folder where they aren't"
        )
    rope_theta, yarn = _read_rope(theirs, scales_softmax)
    return {
        "vocab_size": theirs.take("vocab_size", int),
        "dim": theirs.take("hidden_size", int),
        "num_layers": theirs.take("num_hidden_layers", int),
        "num_heads": theirs.take("num_attention_heads", int),
        "dense_hidden_dim": theirs.take("intermediate_size", int),
        "norm_eps": theirs.take("rms_norm_eps", float, 1e-6),
        "tied_embeddings": theirs.take("tie_word_embeddings", bool, False),
        "rope_theta": rope_theta,
        "yarn": yarn,
    }


def _read_rope(theirs: TheirConfig, scales_softmax: bool) -> tuple[float, YarnConfig]:
    # Transformers 4 has rope_theta and rope_scaling, transformers 5 has both in rope_parameters.
    theta = theirs.take("rope_theta", float, 10_000.0)
    old, new = theirs.take("rope_scaling", dict, {}), theirs.take("rope_parameters", dict, {})
    theirs.require("partial_rotary_factor", 1.0)
    rope = TheirConfig(old or new, prefix="rope_scaling." if old else "rope_parameters.")
    theta = rope.take("rope_theta", float, theta)
    rope.require("partial_rotary_factor", 1.0)
    kind = rope.take("rope_type", str, rope.take("type", str, "default"))
    yarn = YarnConfig()
    if kind == "yarn":
        yarn = _read_yarn(rope, theirs.content.get("max_position_embeddings"), scales_softmax)
        rope.refuse_unknown()
    else:
        rope.require("rope_type", "default", "yarn")
        rope.require("type", "default", "yarn")
        if kind == "default":
            rope.refuse_unknown()
    theirs.problems += rope.problems
    return theta, yarn


def _read_yarn(rope: TheirConfig, max_length: Any, scales_softmax: bool) -> YarnConfig:
    rope.require("attention_factor")
    rope.require("truncate", True)
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
        # transformers ignores either of them without the other.
        mscale=mscale if mscale and mscale_all_dim else 1.0,
        mscale_all_dim=mscale_all_dim if mscale else 0.0,
    )


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
        "rope_theta": model.rope_theta,
        "rope_scaling": _write_yarn(model.yarn) if model.yarn.factor > 1 else None,
    }


def _write_yarn(yarn: YarnConfig) -> dict[str, Any]:
    scaling = {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_seq_len,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }
    return scaling | ({"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim} if yarn.mscale_all_dim else {})


def yarn_obstacles(yarn: YarnConfig, architecture: str, *, scales_softmax: bool = False) -> list[str]:
    """What of YaRN the architecture can't express."""
    if yarn.factor == 1 or (yarn.mscale, yarn.mscale_all_dim) == (1, 0):
        return []
    if scales_softmax and yarn.mscale and yarn.mscale_all_dim:
        return []
    without = "one without the other" if scales_softmax else "others than 1 and 0"
    return [
        f"model.yarn.mscale is {yarn.mscale} and model.yarn.mscale_all_dim {yarn.mscale_all_dim}:"
        f" {architecture} can't express {without}"
    ]


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
