"""What a config says its parts cost, against the parameters of the modules that it builds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from spurline.models import family_configs, family_names
from spurline.models.agpt.configs import AGPTConfig
from spurline.models.deepseek_v3.configs import DeepSeekV3Config
from spurline.moe.config import MoEConfig
from spurline.testing.params import slow_but

PRESETS = [(family, name) for family in family_names() for name in family_configs(family)]
DENSE = AGPTConfig(vocab_size=50, dim=32, num_layers=3, dense_hidden_dim=40, num_heads=4, num_kv_heads=4, head_dim=8)
MTP = DeepSeekV3Config(num_layers=3, num_dense_layers=1, num_mtp_layers=2, moe=MoEConfig(hidden_dim=24))


def num_params(*modules: nn.Module | None) -> int:
    return sum(parameter.numel() for module in modules if module is not None for parameter in module.parameters())


def check_params(config: Any) -> None:
    with torch.device("meta"):
        model = config.build()
    costs = config.costs(seq_len=64)
    assert [cost.params for cost in costs.layers] == [num_params(block) for block in model.layers.values()]
    assert costs.embed.params == num_params(model.embedding, getattr(model, "vision", None))
    assert costs.head.params == num_params(model.norm, model.output, getattr(model, "mtp", None))


@pytest.mark.parametrize(("family", "name"), slow_but([preset for preset in PRESETS if "debug" in preset[1]], PRESETS))
def test_parts_of_every_preset_have_the_parameters_of_their_modules_and_add_up(family: str, name: str) -> None:
    config = family_configs(family)[name]().model
    check_params(config)
    costs = config.costs(seq_len=512)
    parts = [costs.embed, *costs.layers, costs.head]
    assert len(costs.layers) == config.num_layers
    assert sum(part.params for part in parts) == config.num_params()
    assert sum(part.active_params for part in parts) == config.num_active_params()
    assert sum(part.flops_per_token for part in parts) == config.flops_per_token(512)


@pytest.mark.parametrize("config", [MTP, replace(MTP, tied_embeddings=True), replace(MTP, num_dense_layers=3)])
def test_prediction_modules_belong_to_the_head(config: DeepSeekV3Config) -> None:
    check_params(config)


def test_layers_with_experts_are_active_in_part() -> None:
    dense, *sparse = MTP.costs(seq_len=0).layers
    assert dense.active_params == dense.params
    assert all(cost.params - cost.active_params == 6 * 3 * 256 * 24 for cost in sparse)  # 2 of 8 experts
    assert all(cost.flops_per_token == 6 * cost.active_params for cost in (dense, *sparse))


@pytest.mark.parametrize("tied", [False, True])
def test_flops_of_each_part_are_those_that_torch_counts(tied: bool) -> None:
    """But for causal attention, of which torch counts the masked half too, and norms, of which it counts nothing."""
    config, B, L = replace(DENSE, tied_embeddings=tied), 2, 16
    model, costs = config.build(), config.costs(L)
    context = model.block_context(torch.zeros(B, L, dtype=torch.int64))

    def counted(function: Any, x_BLD: torch.Tensor) -> float:
        x_BLD = x_BLD.detach().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            function(x_BLD).sum().backward()
        return counter.get_total_flops() / (B * L)

    attention = 3 * config.num_heads * 2 * config.head_dim * L
    norm = 6 * config.dim
    x_BLD = torch.randn(B, L, config.dim)
    found = counted(lambda x_BLD: model.layers["0"](x_BLD, context), x_BLD)
    assert found == costs.layers[0].flops_per_token - 2 * norm + attention
    found = counted(lambda x_BLD: model.logits(model.final_norm(x_BLD, L)), x_BLD)
    assert found == costs.head.flops_per_token - norm
    assert costs.embed.flops_per_token == 0
