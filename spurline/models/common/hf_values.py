"""A reader for Hugging Face config.json files; a key that is not understood is an error. No torch import."""

from __future__ import annotations

import json
from typing import Any

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
    """A config.json that tracks which keys were read: in the end, each must be taken, checked or known as harmless."""

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


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
