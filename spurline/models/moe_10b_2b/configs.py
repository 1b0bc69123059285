"""The 10B-A2B presets: the DeepSeek model with 36 experts per layer. No torch import.

Parameter counts include embedding and output head, which depend on the vocabulary: 9.41B in total and 1.98B active with
a vocabulary of 102,400; 10.0B and 2.61B with 256,128.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from spurline.config import RunConfig
from spurline.models.common.presets import debug_run, full_size_run
from spurline.models.deepseek_v3.configs import DeepSeekV3Config
from spurline.moe.config import MoEConfig

# Softmax scores, not renormalized, weigh the experts' outputs.
_MOE = MoEConfig(num_experts=36, top_k=3, num_shared_experts=2, bias_update_rate=1e-3)


def moe_10b_2b_debugmodel() -> RunConfig[DeepSeekV3Config]:
    """A tiny model with the same number of experts that learns in seconds on a CPU."""
    model = DeepSeekV3Config(
        dim=128,
        num_layers=3,
        dense_hidden_dim=384,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        moe=replace(_MOE, hidden_dim=32),
    )
    return debug_run(model)


def moe_10b_2b() -> RunConfig[DeepSeekV3Config]:
    """27 layers of width 2048 with 36 experts, 3 per token, and 2 shared ones."""
    model = DeepSeekV3Config(
        vocab_size=102_400,
        dim=2048,
        num_layers=27,
        num_dense_layers=1,
        dense_hidden_dim=10_944,
        num_heads=16,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        moe=replace(_MOE, hidden_dim=1408),
    )
    return full_size_run(model, lr=3e-4)


def moe_10b_2b_sdpa() -> RunConfig[DeepSeekV3Config]:
    """The same with a vocabulary of 256,128; attention is torch's scaled_dot_product_attention in both."""
    run = moe_10b_2b()
    return replace(run, model=replace(run.model, vocab_size=256_128))


CONFIGS: dict[str, Callable[[], RunConfig[Any]]] = {
    preset.__name__: preset for preset in (moe_10b_2b_debugmodel, moe_10b_2b, moe_10b_2b_sdpa)
}
