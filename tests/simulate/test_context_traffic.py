"""What context parallelism moves between ranks, counted in simulated steps."""

from dataclasses import replace
from typing import Any

import pytest

from spurline.config import Parallelism, RunConfig, Training
from spurline.hardware import hardware_named
from spurline.models.deepseek_v3.configs import deepseek_v3_671b
from spurline.models.qwen3.configs import qwen3_235b_a22b
from spurline.moe.config import MoEConfig
from spurline.simulate.run import simulate_step

B, L, CP = 1, 4096, 4


def small(model: Any, num_layers: int = 2) -> Any:
    """With the attention of the whole model, few layers and few experts."""
    moe = MoEConfig(hidden_dim=256, num_experts=8, top_k=2)
    changes = {"num_layers": num_layers, "num_dense_layers": 0, "moe": moe, "vocab_size": 1024}
    return replace(model, **changes | ({"num_mtp_layers": 0} if hasattr(model, "num_mtp_layers") else {}))


def bytes_over_cp(model: Any, kind: Any) -> dict[str, list[int]]:
    """The sizes of the collectives of one step's forward pass over cp, by their kind."""
    config: RunConfig[Any] = RunConfig(
        model=small(model),
        training=Training(seq_len=L, local_batch_size=B, dtype="bfloat16"),
        parallelism=Parallelism(context_parallel_degree=CP, context_parallel_kind=kind),
    )
    found: dict[str, list[int]] = {}
    for one in simulate_step(config, 8, hardware_named("h100")).trace.collectives:
        if one.collective.axis == "cp" and one.phase == "forward" and one.collective.dtype == "bfloat16":
            found.setdefault(one.collective.kind, []).append(one.collective.num_bytes)
    return found


@pytest.mark.parametrize("kind", ["all_gather", "ulysses"])
def test_latent_attention_gathers_the_latent_and_grouped_query_attention_keys_and_values(kind: str) -> None:
    latent, grouped = deepseek_v3_671b().model, qwen3_235b_a22b().model
    of_latent, of_grouped = bytes_over_cp(latent, kind), bytes_over_cp(grouped, kind)
    latent_bytes = 2 * (latent.kv_lora_rank + latent.qk_rope_head_dim)
    assert of_latent["all-gather"] == 2 * [B * L * latent_bytes]
    keys_and_values = 2 * 2 * grouped.num_kv_heads * grouped.head_dim
    if kind == "all_gather":
        assert of_grouped == {"all-gather": 2 * [B * L * keys_and_values]}
        # 128 heads of keys and values would be 71 times as much; 4 heads of Qwen3 235B are not even twice.
        of_all_heads = 2 * latent.num_heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim + latent.v_head_dim)
        assert (latent_bytes, keys_and_values, of_all_heads) == (1152, 2048, 81920)
    else:
        own = B * L // CP  # positions of a rank: of each of them all heads are sent
        queries_and_outputs = 2 * own * 2 * grouped.num_heads * grouped.head_dim
        assert sum(of_grouped["all-to-all"]) == 2 * (own * keys_and_values + queries_and_outputs)
