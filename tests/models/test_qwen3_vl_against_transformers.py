"""Qwen3-VL against that of `transformers` with the same random weights: logits, loss and every gradient."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spurline.data.batch import IGNORE_INDEX, Images, Spot
from spurline.data.patches import PATCH_DIM
from spurline.models.qwen3_vl.configs import Qwen3VLConfig, Qwen3VLMoEConfig, VisionConfig
from spurline.moe.config import MoEConfig
from spurline.testing.equivalence import relative_error

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH, PICTURE_TOKEN = 40, 32, 39
# Two pictures in one sequence, one in the next, none in the last; all of different shapes.
SPOTS = (Spot(0, 3, 4, 6), Spot(0, 12, 2, 2), Spot(1, 20, 8, 4))
SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "mrope_section": [2, 2, 2]},
}
VISION = {
    "hidden_size": 24,
    "depth": 4,
    "num_heads": 2,
    "intermediate_size": 40,
    "out_hidden_size": 32,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
OURS = {
    "vocab_size": VOCABULARY,
    "dim": 32,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 12,
    "dense_hidden_dim": 48,
    "norm_eps": 1e-6,
    "rope_theta": 1e3,
    "mrope_section": (2, 2, 2),
    "vision": VisionConfig(
        dim=24, num_layers=4, num_heads=2, hidden_dim=40, positions_per_side=5, deepstack_layers=(0, 2)
    ),
}


def dense(tied: bool) -> tuple[nn.Module, Qwen3VLConfig]:
    theirs = transformers.Qwen3VLConfig(
        text_config=SHARED | {"tie_word_embeddings": tied},
        vision_config=VISION,
        image_token_id=PICTURE_TOKEN,
        tie_word_embeddings=tied,
    )
    return transformers.Qwen3VLForConditionalGeneration(theirs), Qwen3VLConfig(**OURS, tied_embeddings=tied)


def sparse(tied: bool) -> tuple[nn.Module, Qwen3VLConfig]:
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "tie_word_embeddings": tied}
    theirs = transformers.Qwen3VLMoeConfig(
        text_config=SHARED | experts,
        vision_config=VISION,
        image_token_id=PICTURE_TOKEN,
        tie_word_embeddings=tied,
    )
    moe = MoEConfig(hidden_dim=20, num_experts=8, top_k=3, route_norm=True)
    ours = Qwen3VLMoEConfig(**OURS, moe=moe, tied_embeddings=tied)
    return transformers.Qwen3VLMoeForConditionalGeneration(theirs), ours


OUR_NAMES = {
    "model.language_model.embed_tokens": "embedding",
    "model.language_model.norm": "norm",
    "model.language_model.layers": "layers",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn": "attention",
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "mlp.gate.weight": "moe.router.gate_ED",
    "mlp.experts.gate_up_proj": "moe.experts.gate_up_proj",
    "mlp.experts.down_proj": "moe.experts.w2_EDF",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "model.visual.patch_embed.proj": "vision.patch",
    "model.visual.pos_embed": "vision.positions",
    "model.visual.blocks": "vision.layers",
    "model.visual.merger": "vision.merger",
    "model.visual.deepstack_merger_list": "vision.deepstack",
    "norm1": "attention_norm",
    "norm2": "ffn_norm",
    "attn.qkv": "attention.wqkv",
    "attn.proj": "attention.wo",
    "mlp.linear_fc1": "w1",
    "mlp.linear_fc2": "w2",
    "linear_fc1": "w1",
    "linear_fc2": "w2",
}
# The longer name first, and only whole parts between dots.
_PATTERN = re.compile("|".join(rf"(?<![^.]){re.escape(n)}(?![^.])" for n in sorted(OUR_NAMES, key=len, reverse=True)))


def by_our_names(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their weights, or gradients, as ours."""
    ours = {}
    for name, tensor in theirs.items():
        our_name = _PATTERN.sub(lambda match: OUR_NAMES[match[0]], name)
        if our_name.endswith("gate_up_proj"):
            prefix = our_name.removesuffix("gate_up_proj")
            ours[f"{prefix}w1_EFD"], ours[f"{prefix}w3_EFD"] = tensor.chunk(2, dim=1)
        else:
            ours[our_name] = tensor.flatten(1) if our_name == "vision.patch.weight" else tensor
    return ours


def randomize(model: nn.Module) -> None:
    """Away from the start, where norms are ones, biases zeros and attention is all but uniform."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                tensor.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                tensor.copy_(0.3 * noise)
            else:
                tensor.copy_(noise * tensor[0].numel() ** -0.5)


def make_inputs(spots: tuple[Spot, ...]) -> tuple[Tensor, Tensor, Images]:
    """Tokens (B, L), with the token that stands for pictures at their spots; labels (B, L); the pictures."""
    generator = torch.Generator().manual_seed(1)
    tokens_BL, labels_BL = torch.randint(PICTURE_TOKEN, (2, 3, LENGTH), generator=generator)
    for spot in spots:
        stop = spot.start + spot.num_features
        tokens_BL[spot.row, spot.start : stop] = PICTURE_TOKEN
        labels_BL[spot.row, spot.start : stop] = IGNORE_INDEX
    num_patches = sum(spot.num_patches for spot in spots)
    return tokens_BL, labels_BL, Images(torch.randn(num_patches, PATCH_DIM, generator=generator), spots)


def compare(theirs: nn.Module, config: Qwen3VLConfig, spots: tuple[Spot, ...]) -> tuple[float, float, dict[str, float]]:
    """Largest absolute difference of the logits, difference of the loss, relative difference of each gradient."""
    randomize(theirs)
    weights = by_our_names(theirs.state_dict())
    if config.tied_embeddings:
        assert torch.equal(weights.pop("output.weight"), weights["embedding.weight"])
    ours = config.build()
    no_bias = {name: bias for name, bias in ours.named_buffers() if name.endswith("expert_bias_E")}
    ours.load_state_dict(no_bias | weights)

    tokens_BL, labels_BL, images = make_inputs(spots)
    seen = {}
    if spots:
        seen = {
            "pixel_values": images.patches_NC,
            "image_grid_thw": torch.tensor([(1, spot.height, spot.width) for spot in spots]),
            "mm_token_type_ids": (tokens_BL == PICTURE_TOKEN).int(),
        }
    expected_BLV = theirs(tokens_BL, **seen).logits
    logits_BLV = ours(tokens_BL, images=images) if spots else ours(tokens_BL)
    assert expected_BLV.std() > 0.5
    expected_loss, loss = (
        F.cross_entropy(logits.flatten(0, 1), labels_BL.flatten(), ignore_index=IGNORE_INDEX)
        for logits in (expected_BLV, logits_BLV)
    )
    expected_loss.backward()
    loss.backward()
    expected = by_our_names({name: p.grad for name, p in theirs.named_parameters() if p.grad is not None})
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters() if parameter.grad is not None}
    assert gradients.keys() == expected.keys()
    assert any(name.startswith("vision.") for name in gradients) == bool(spots)
    return (
        (logits_BLV - expected_BLV).abs().max().item(),
        abs(loss.item() - expected_loss.item()),
        {name: relative_error(gradients[name], gradient) for name, gradient in expected.items()},
    )


@pytest.mark.parametrize("spots", [SPOTS, ()], ids=["pictures", "text"])
@pytest.mark.parametrize(("make", "tied"), [(dense, True), (sparse, False)], ids=["dense", "moe"])
def test_logits_loss_and_gradients_are_those_of_transformers(make, tied, spots):
    logits, loss, gradients = compare(*make(tied), spots)
    assert logits < 1e-4
    assert loss < 1e-5
    assert max(gradients.values()) < 1e-4, max(gradients, key=gradients.__getitem__)
