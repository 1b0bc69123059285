from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from spurline.models.deepseek_v3.configs import DeepSeekV3Config
from spurline.moe.config import MoEConfig


@pytest.fixture
def small_config() -> Callable[..., DeepSeekV3Config]:
    """Makes a model of three blocks, the first of them dense; `moe` is a dict of changes to the MoE layers."""

    def make(moe: dict[str, Any] | None = None, **changes: Any) -> DeepSeekV3Config:
        experts = MoEConfig(hidden_dim=24, num_experts=4, top_k=2, num_shared_experts=1)
        return DeepSeekV3Config(
            **{
                "vocab_size": 50,
                "dim": 32,
                "num_layers": 3,
                "num_dense_layers": 1,
                "dense_hidden_dim": 40,
                "num_heads": 2,
                "q_lora_rank": 12,
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 4,
                "v_head_dim": 10,
                "moe": replace(experts, **(moe or {})),
                **changes,
            }
        )

    return make
