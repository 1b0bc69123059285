import math

import pytest
import torch
from torch import Tensor

from spurline.models.common.attention import LatentAttention
from spurline.models.common.context import BlockContext
from spurline.models.common.decoder_config import YarnConfig
from spurline.models.common.init import initialize
from spurline.models.common.rope import rope_frequencies, rope_tables

DIM, HEADS, RANK, NOPE, ROPE, VALUE, THETA, EPS = 12, 3, 8, 6, 4, 5, 50.0, 1e-5
YARN = YarnConfig(factor=4.0, original_seq_len=16, beta_fast=2.0, beta_slow=0.5, mscale=1.5, mscale_all_dim=0.5)


def make_attention(q_lora_rank: int, yarn: YarnConfig) -> LatentAttention:
    attention = LatentAttention(
        DIM,
        HEADS,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=RANK,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
        yarn=yarn,
        norm_eps=EPS,
    )
    initialize(attention, seed=3)
    with torch.no_grad():
        for parameter in attention.parameters():  # large enough for a softmax that is far from uniform
            parameter.mul_(15 if parameter.ndim == 2 else 1.5)
    return attention


def reference_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + EPS).sqrt() * weight


def reference_rotate(x_R: Tensor, position: int, yarn: YarnConfig) -> Tensor:
    rotated = []
    for pair, frequency in enumerate(rope_frequencies(len(x_R), THETA, x_R.device, yarn).tolist()):
        angle = position * frequency
        even, odd = x_R[2 * pair], x_R[2 * pair + 1]
        rotated += [even * math.cos(angle) - odd * math.sin(angle), even * math.sin(angle) + odd * math.cos(angle)]
    return torch.stack(rotated) * yarn.rotated_scale


def reference_attention(attention: LatentAttention, x_LD: Tensor, yarn: YarnConfig) -> Tensor:
    """The definition, one position and one head at a time."""
    weights = dict(attention.named_parameters())
    queries, keys, values = [], [], []
    for position, x_D in enumerate(x_LD):
        if "wq.weight" in weights:
            q = weights["wq.weight"] @ x_D
        else:
            q = weights["wq_b.weight"] @ reference_norm(weights["wq_a.weight"] @ x_D, weights["q_norm.weight"])
        down = weights["wkv_a.weight"] @ x_D
        shared_key_R = reference_rotate(down[RANK:], position, yarn)
        up = weights["wkv_b.weight"] @ reference_norm(down[:RANK], weights["kv_norm.weight"])
        for head in range(HEADS):
            q_head = q[head * (NOPE + ROPE) : (head + 1) * (NOPE + ROPE)]
            queries.append(torch.cat([q_head[:NOPE], reference_rotate(q_head[NOPE:], position, yarn)]))
            kv_head = up[head * (NOPE + VALUE) : (head + 1) * (NOPE + VALUE)]
            keys.append(torch.cat([kv_head[:NOPE], shared_key_R]))
            values.append(kv_head[NOPE:])
    outputs = []
    for position in range(len(x_LD)):
        heads = []
        for head in range(HEADS):
            seen = [past * HEADS + head for past in range(position + 1)]
            scores = torch.stack([queries[position * HEADS + head] @ keys[i] for i in seen])
            scores = scores / math.sqrt(NOPE + ROPE) * yarn.softmax_scale
            share = scores.exp() / scores.exp().sum()
            heads.append(sum(share[n] * values[i] for n, i in enumerate(seen)))
        outputs.append(weights["wo.weight"] @ torch.cat(heads))
    return torch.stack(outputs)


@pytest.mark.parametrize(("q_lora_rank", "yarn"), [(0, YarnConfig()), (7, YarnConfig()), (7, YARN)])
def test_equals_the_plain_definition_in_forward_and_every_gradient(q_lora_rank, yarn):
    attention = make_attention(q_lora_rank, yarn)
    generator = torch.Generator().manual_seed(0)
    x_BLD = torch.randn(2, 6, DIM, generator=generator, requires_grad=True)
    upstream_BLD = torch.randn(2, 6, DIM, generator=generator)
    inputs = [x_BLD, *attention.parameters()]

    out_BLD = attention(x_BLD, BlockContext(rope_tables(torch.arange(6), ROPE, THETA, yarn)))
    expected_BLD = torch.stack([reference_attention(attention, x_LD, yarn) for x_LD in x_BLD])
    torch.testing.assert_close(out_BLD, expected_BLD, rtol=1e-4, atol=1e-5)
    gradients = torch.autograd.grad(out_BLD, inputs, upstream_BLD)
    expected_gradients = torch.autograd.grad(expected_BLD, inputs, upstream_BLD)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4)


def test_shifting_all_positions_changes_nothing_and_stretching_them_does():
    def attended(positions_L: Tensor) -> Tensor:
        return attention(x_BLD, BlockContext(rope_tables(positions_L, ROPE, THETA)))

    attention = make_attention(7, YarnConfig())
    x_BLD = torch.randn(2, 6, DIM, generator=torch.Generator().manual_seed(0))
    out_BLD = attended(torch.arange(6))
    torch.testing.assert_close(attended(torch.arange(6) + 40), out_BLD, rtol=1e-4, atol=1e-4)
    assert (attended(torch.arange(6) * 2) - out_BLD).abs().max() > 1e-2
