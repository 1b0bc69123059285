"""Our models against those of `transformers` with the same random weights: logits, loss and every gradient.

B sequences of L tokens; E experts, F hidden width, D model width.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from spurline.hf.families import architecture_for, read_model_config
from spurline.models.agpt.configs import AGPTConfig
from spurline.models.common.decoder_config import DecoderConfig, YarnConfig
from spurline.models.deepseek_v3.configs import DeepSeekV3Config
from spurline.models.qwen3.configs import Qwen3Config, Qwen3MoEConfig
from spurline.moe.config import MoEConfig
from spurline.testing.equivalence import relative_error

VOCABULARY, LENGTH = 40, 48
FAMILIES = {AGPTConfig: "agpt", Qwen3Config: "qwen3", Qwen3MoEConfig: "qwen3", DeepSeekV3Config: "deepseek_v3"}


def by_our_names(theirs: dict[str, Tensor], ours: nn.Module, config: DecoderConfig) -> dict[str, Tensor]:
    """Their weights, or gradients, as ours; what they have none of is left out."""
    shapes = {name: tuple(tensor.shape) for name, tensor in ours.state_dict().items()}
    found = {}
    for slot in architecture_for(FAMILIES[type(config)], config).slots(shapes, theirs):
        pieces = [theirs[piece.name].flatten()[piece.start :][: slot.piece_size] for piece in slot.pieces]
        if pieces:
            found[slot.name] = torch.cat(pieces).view(slot.shape)
    return found


def randomize(model: nn.Module) -> None:
    """Away from the start, where norms are ones, biases zeros and attention is all but uniform."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("norm.weight"):
                tensor.copy_(1 + 0.3 * noise)
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(0.2 * noise)
            elif "inv_freq" not in name:
                tensor.copy_(noise * tensor.shape[-1] ** -0.5)


SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
}
OURS = {"vocab_size": VOCABULARY, "dim": 32, "num_layers": 3, "num_heads": 4, "dense_hidden_dim": 48, "norm_eps": 1e-6}
YARN = YarnConfig(factor=8.0, original_seq_len=32, beta_fast=4.0, beta_slow=0.5)
YARN_OF_DEEPSEEK = replace(YARN, mscale=0.7, mscale_all_dim=0.4)


def rope(theta: float, yarn: YarnConfig | None = None) -> dict[str, object]:
    if yarn is None:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    scaling = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_seq_len,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }
    if yarn.mscale_all_dim:
        scaling |= {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    return {"rope_parameters": scaling}


def llama(tied: bool) -> tuple[nn.Module, DecoderConfig]:
    theirs = transformers.LlamaConfig(**SHARED, **rope(500.0), num_key_value_heads=2, tie_word_embeddings=tied)
    ours = AGPTConfig(**OURS, num_kv_heads=2, head_dim=8, rope_theta=500.0, tied_embeddings=tied)
    return transformers.LlamaForCausalLM(theirs), ours


def qwen3(tied: bool, yarn: YarnConfig | None = None) -> tuple[nn.Module, DecoderConfig]:
    heads = {"num_key_value_heads": 2, "head_dim": 12}
    theirs = transformers.Qwen3Config(**SHARED, **rope(1e4, yarn), **heads, tie_word_embeddings=tied)
    ours = Qwen3Config(**OURS, num_kv_heads=2, head_dim=12, tied_embeddings=tied, yarn=yarn or YarnConfig())
    return transformers.Qwen3ForCausalLM(theirs), ours


def qwen3_moe(expert_hidden_dim: int, route_norm: bool) -> tuple[nn.Module, DecoderConfig]:
    theirs = transformers.Qwen3MoeConfig(
        **SHARED,
        **rope(1e4),
        num_key_value_heads=2,
        head_dim=12,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=expert_hidden_dim,
        norm_topk_prob=route_norm,
        tie_word_embeddings=False,
    )
    moe = MoEConfig(hidden_dim=expert_hidden_dim, num_experts=8, top_k=3, route_norm=route_norm)
    return transformers.Qwen3MoeForCausalLM(theirs), Qwen3MoEConfig(**OURS, num_kv_heads=2, head_dim=12, moe=moe)


def deepseek_v3(q_lora_rank: int, yarn: YarnConfig | None, num_groups: int) -> tuple[nn.Module, DecoderConfig]:
    heads = {"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
    theirs = transformers.DeepseekV3Config(
        **SHARED,
        **rope(1e4, yarn),
        **heads,
        num_key_value_heads=4,
        q_lora_rank=q_lora_rank or None,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=2,
        moe_intermediate_size=32,
        n_group=num_groups,
        topk_group=max(num_groups // 2, 1),
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        tie_word_embeddings=False,
    )
    moe = MoEConfig(
        hidden_dim=32,
        num_experts=8,
        top_k=3,
        num_shared_experts=2,
        score_func="sigmoid",
        route_norm=True,
        route_scale=2.5,
        num_groups=num_groups,
        num_limited_groups=num_groups // 2 if num_groups > 1 else None,
    )
    ours = DeepSeekV3Config(**OURS, **heads, q_lora_rank=q_lora_rank, yarn=yarn or YarnConfig(), moe=moe)
    return transformers.DeepseekV3ForCausalLM(theirs), ours


def compare(theirs: nn.Module, config: DecoderConfig) -> tuple[float, float, dict[str, float]]:
    """Largest absolute difference of the logits, difference of the loss, relative difference of each gradient."""
    randomize(theirs)
    ours = config.build()
    no_bias = {name: bias for name, bias in ours.named_buffers() if name.endswith("expert_bias_E")}
    ours.load_state_dict(no_bias | by_our_names(theirs.state_dict(), ours, config))

    tokens_BL, labels_BL = torch.randint(VOCABULARY, (2, 3, LENGTH), generator=torch.Generator().manual_seed(1))
    expected_BLV, logits_BLV = theirs(tokens_BL).logits, ours(tokens_BL)
    assert expected_BLV.std() > 0.5
    expected_loss, loss = (
        F.cross_entropy(logits.flatten(0, 1), labels_BL.flatten()) for logits in (expected_BLV, logits_BLV)
    )
    expected_loss.backward()
    loss.backward()
    their_gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    their_buffers = {name: buffer for name, buffer in theirs.named_buffers() if name not in their_gradients}
    expected = by_our_names(their_buffers | their_gradients, ours, config)
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert gradients.keys() <= expected.keys()
    return (
        (logits_BLV - expected_BLV).abs().max().item(),
        abs(loss.item() - expected_loss.item()),
        {name: relative_error(gradient, expected[name]) for name, gradient in gradients.items()},
    )


CASES = [
    pytest.param(llama, (False,), id="llama"),
    pytest.param(llama, (True,), id="llama-tied"),
    pytest.param(qwen3, (False,), id="qwen3"),
    pytest.param(qwen3, (True,), id="qwen3-tied"),
    pytest.param(qwen3, (False, YARN), id="qwen3-yarn"),
    pytest.param(qwen3_moe, (24, True), id="qwen3_moe"),
    # With F = D, a transposed weight would keep its shape.
    pytest.param(qwen3_moe, (32, False), id="qwen3_moe-square-experts"),
    pytest.param(deepseek_v3, (0, None, 1), id="deepseek_v3-full-queries"),
    pytest.param(deepseek_v3, (16, None, 4), id="deepseek_v3-groups"),
    pytest.param(deepseek_v3, (16, YARN_OF_DEEPSEEK, 4), id="deepseek_v3-groups-yarn"),
]


@pytest.mark.parametrize(("make", "arguments"), CASES)
def test_logits_loss_and_gradients_are_those_of_transformers(make, arguments):
    logits, loss, gradients = compare(*make(*arguments))
    assert logits < 1e-4
    assert loss < 1e-5
    assert max(gradients.values()) < 1e-4, max(gradients, key=gradients.__getitem__)


@pytest.mark.parametrize(("make", "arguments"), CASES)
def test_their_config_is_read_as_the_same_model(make, arguments):
    theirs, ours = make(*arguments)
    architecture = architecture_for(FAMILIES[type(ours)], ours)
    assert read_model_config(architecture, theirs.config.to_dict(), "config.json") == ours
