import math

import pytest
import torch
from torch import Tensor

from spurline.models.common.context import BlockContext
from spurline.models.common.decoder_config import AttentionFeatures, GroupedQueryConfig, YarnConfig
from spurline.models.common.grouped_query import GroupedQueryAttention
from spurline.models.common.init import initialize
from spurline.models.common.rope import rope_frequencies, rope_tables

HEADS, KV_HEADS, WIDTH, THETA, EPS = 6, 2, 8, 50.0, 1e-5
YARN = YarnConfig(factor=4.0, original_seq_len=16, beta_fast=2.0, beta_slow=0.5, mscale=1.5, mscale_all_dim=0.5)


def make_attention(qk_norm: bool, yarn: YarnConfig) -> GroupedQueryAttention:
    config = GroupedQueryConfig(
        dim=12,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=WIDTH,
        rope_theta=THETA,
        norm_eps=EPS,
        yarn=yarn,
    )
    attention = GroupedQueryAttention(config, AttentionFeatures(qk_norm="head" if qk_norm else "none"))
    initialize(attention, seed=3)
    with torch.no_grad():
        for parameter in attention.parameters():  # large enough for a softmax that is far from uniform
            parameter.mul_(15 if parameter.ndim == 2 else torch.linspace(0.5, 2, WIDTH))
    return attention


def reference_heads(
    attention: GroupedQueryAttention, x_D: Tensor, name: str, position: int, yarn: YarnConfig
) -> list[Tensor]:
    """Each head's query or key at one position, one pair of channels at a time."""
    weights = dict(attention.named_parameters())
    frequency_P = rope_frequencies(WIDTH, THETA, torch.device("cpu"), yarn)
    heads = []
    for head_R in (weights[f"w{name}.weight"] @ x_D).split(WIDTH):
        if f"{name}_norm.weight" in weights:
            head_R = head_R / (head_R.square().mean() + EPS).sqrt() * weights[f"{name}_norm.weight"]
        rotated: list[Tensor] = [torch.empty(0)] * WIDTH
        for pair, frequency in enumerate(frequency_P.tolist()):
            one, other, angle = head_R[pair], head_R[pair + WIDTH // 2], position * frequency
            rotated[pair] = one * math.cos(angle) - other * math.sin(angle)
            rotated[pair + WIDTH // 2] = one * math.sin(angle) + other * math.cos(angle)
        heads.append(torch.stack(rotated) * yarn.rotated_scale)
    return heads


def reference_attention(attention: GroupedQueryAttention, x_LD: Tensor, yarn: YarnConfig) -> Tensor:
    """The definition, one position and one head at a time."""
    queries = [reference_heads(attention, x_D, "q", position, yarn) for position, x_D in enumerate(x_LD)]
    keys = [reference_heads(attention, x_D, "k", position, yarn) for position, x_D in enumerate(x_LD)]
    values = [(attention.wv.weight @ x_D).split(WIDTH) for x_D in x_LD]
    outputs = []
    for position in range(len(x_LD)):
        heads = []
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            seen = range(position + 1)
            scores = torch.stack([queries[position][head] @ keys[past][shared] for past in seen])
            scores = scores / math.sqrt(WIDTH) * yarn.softmax_scale
            share = scores.exp() / scores.exp().sum()
            heads.append(sum(share[past] * values[past][shared] for past in seen))
        outputs.append(attention.wo.weight @ torch.cat(heads))
    return torch.stack(outputs)


@pytest.mark.parametrize(("qk_norm", "yarn"), [(False, YarnConfig()), (True, YarnConfig()), (True, YARN)])
def test_equals_the_plain_definition_in_forward_and_every_gradient(qk_norm, yarn):
    attention = make_attention(qk_norm, yarn)
    generator = torch.Generator().manual_seed(0)
    x_BLD = torch.randn(2, 6, 12, generator=generator, requires_grad=True)
    upstream_BLD = torch.randn(2, 6, 12, generator=generator)
    inputs = [x_BLD, *attention.parameters()]

    out_BLD = attention(x_BLD, BlockContext(rope_tables(torch.arange(6), WIDTH, THETA, yarn)))
    expected_BLD = torch.stack([reference_attention(attention, x_LD, yarn) for x_LD in x_BLD])
    torch.testing.assert_close(out_BLD, expected_BLD, rtol=1e-4, atol=1e-5)
    gradients = torch.autograd.grad(out_BLD, inputs, upstream_BLD)
    expected_gradients = torch.autograd.grad(expected_BLD, inputs, upstream_BLD)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4)


def test_keeps_no_matrix_of_positions_by_positions():
    attention, saved = make_attention(True, YarnConfig()), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        attention(torch.randn(1, 37, 12), BlockContext(rope_tables(torch.arange(37), WIDTH, THETA))).sum().backward()
    assert saved
    assert not [shape for shape in saved if tuple(shape[-2:]) == (37, 37)]
