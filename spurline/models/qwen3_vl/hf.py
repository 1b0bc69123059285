"""Dense Qwen3-VL checkpoints of Hugging Face: a text model and a vision encoder, each with a config of its own.

The class with experts stores all experts of a layer in one transposed tensor: it is neither imported nor exported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from spurline.data.patch_sizes import FRAMES, MERGE, PATCH_SIZE
from spurline.models.common.hf import Architecture, Piece, Shape, Slot, unlike
from spurline.models.common.hf_config import TheirConfig, read_decoder, write_decoder
from spurline.models.qwen3.hf import ARCHITECTURES as QWEN3
from spurline.models.qwen3_vl.configs import Qwen3VLConfig, Qwen3VLMoEConfig, VisionConfig

_DENSE = "Qwen3VLForConditionalGeneration"
_TEXT_NAMES = {
    ours: theirs and theirs.replace("model.", "model.language_model.", 1) for ours, theirs in QWEN3[0].names.items()
}
# Ours -> theirs, in this order.
_VISION_NAMES = {
    r"^vision\.": "model.visual.",
    r"\.patch\.": ".patch_embed.proj.",
    r"\.positions\.": ".pos_embed.",
    r"\.deepstack\.": ".deepstack_merger_list.",
    r"\.layers\.(\d+)\.w([12])\.": r".blocks.\1.mlp.linear_fc\2.",
    r"\.layers\.": ".blocks.",
    r"\.attention_norm\.": ".norm1.",
    r"\.ffn_norm\.": ".norm2.",
    r"\.attention\.wqkv\.": ".attn.qkv.",
    r"\.attention\.wo\.": ".attn.proj.",
    r"\.w([12])\.": r".linear_fc\1.",
}
_PATCH_SHAPE = (3, FRAMES, PATCH_SIZE, PATCH_SIZE)  # their patches are those of a convolution
_TOKEN_IDS = {
    "image_token_id": 151_655,
    "video_token_id": 151_656,
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
}


@dataclass(frozen=True)
class _WithVision(Architecture):
    """The tensors of the text model and of the vision encoder."""

    def slots(self, shapes: Mapping[str, Shape], present: Collection[str] = ()) -> list[Slot]:
        text = {name: shape for name, shape in shapes.items() if not name.startswith("vision.")}
        vision = {name: shape for name, shape in shapes.items() if name.startswith("vision.")}
        return super().slots(text, present) + [_vision_slot(name, shape) for name, shape in vision.items()]


def _vision_slot(name: str, shape: Shape) -> Slot:
    theirs = name
    for pattern, replacement in _VISION_NAMES.items():
        theirs = re.sub(pattern, replacement, theirs)
    their_shape = (shape[0], *_PATCH_SHAPE) if name == "vision.patch.weight" else shape
    return Slot(name, shape, (Piece(theirs, their_shape),))


def _read(theirs: TheirConfig) -> Qwen3VLConfig:
    content = theirs.take("text_config", dict)
    text = TheirConfig(_without_sections(content), prefix="text_config.")
    fields = read_decoder(text)
    fields["num_kv_heads"] = text.take("num_key_value_heads", int)
    fields["head_dim"] = text.take("head_dim", int, 128)
    fields["tied_embeddings"] = theirs.take("tie_word_embeddings", bool, fields["tied_embeddings"])
    text.refuse_unknown()
    vision = TheirConfig(theirs.take("vision_config", dict), prefix="vision_config.")
    model = Qwen3VLConfig(**fields, mrope_section=_section(content), vision=_read_vision(vision, fields["dim"]))
    theirs.skip(*_TOKEN_IDS)
    theirs.problems += text.problems + vision.problems
    return model


def _section(content: Mapping[str, Any]) -> tuple[int, int, int]:
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    time, height, width = rope.get("mrope_section", (24, 20, 20))
    return time, height, width


def _without_sections(content: Mapping[str, Any]) -> dict[str, Any]:
    """Their config with rotary options as every decoder has them; the sections always take turns in this family."""
    changed = dict(content)
    for key in content.keys() & {"rope_scaling", "rope_parameters"}:
        rope = content[key] or {}
        changed[key] = {name: rope[name] for name in rope if name not in ("mrope_section", "mrope_interleaved")}
    return changed


def _read_vision(theirs: TheirConfig, text_dim: int) -> VisionConfig:
    theirs.require("hidden_act", "gelu_pytorch_tanh")
    theirs.require("in_channels", 3)
    theirs.require("patch_size", PATCH_SIZE)
    theirs.require("temporal_patch_size", FRAMES)
    theirs.require("spatial_merge_size", MERGE)
    theirs.require("out_hidden_size", text_dim)
    theirs.require("rope_parameters", {"rope_theta": 10000.0, "rope_type": "axial"})
    num_positions = theirs.take("num_position_embeddings", int, 2304)
    if math.isqrt(num_positions) ** 2 != num_positions:
        theirs.problems.append(f"vision_config.num_position_embeddings is {num_positions}, which is not a square")
    vision = VisionConfig(
        dim=theirs.take("hidden_size", int),
        num_layers=theirs.take("depth", int),
        num_heads=theirs.take("num_heads", int),
        hidden_dim=theirs.take("intermediate_size", int),
        positions_per_side=math.isqrt(num_positions),
        deepstack_layers=tuple(theirs.take("deepstack_visual_indexes", list)),
    )
    theirs.refuse_unknown()
    return vision


def _obstacles(model: Qwen3VLConfig) -> list[str]:
    if isinstance(model, Qwen3VLMoEConfig):
        return ["model: Spurline does not write Qwen3-VL with experts in the form of Hugging Face"]
    return unlike(model, {"yarn.factor": 1.0}, _DENSE)


def _write(model: Qwen3VLConfig) -> dict[str, Any]:
    sections = {"rope_type": "default", "mrope_section": list(model.mrope_section), "mrope_interleaved": True}
    text = write_decoder(model) | {
        "model_type": "qwen3_vl_text",
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rope_scaling": sections,
    }
    vision = {
        "model_type": "qwen3_vl",
        "hidden_size": model.vision.dim,
        "depth": model.vision.num_layers,
        "num_heads": model.vision.num_heads,
        "intermediate_size": model.vision.hidden_dim,
        "num_position_embeddings": model.vision.positions_per_side**2,
        "deepstack_visual_indexes": list(model.vision.deepstack_layers),
        "out_hidden_size": model.dim,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "patch_size": PATCH_SIZE,
        "temporal_patch_size": FRAMES,
        "spatial_merge_size": MERGE,
    }
    return {
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": model.tied_embeddings,
        **_TOKEN_IDS,
    }


ARCHITECTURES = (_WithVision(_DENSE, "qwen3_vl", _read, _obstacles, _write, _TEXT_NAMES),)


def architecture_for(model: Qwen3VLConfig) -> Architecture:
    return ARCHITECTURES[0]
