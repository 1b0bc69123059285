"""What a family gives to Decoder, and the parts of a forward pass that can be called by themselves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spurline.models.agpt.configs import AGPTConfig
from spurline.models.common.context import BlockContext
from spurline.models.common.decoder import Decoder
from spurline.models.common.grouped_query import GroupedQueryAttention
from spurline.models.common.init import initialize
from spurline.models.common.loss import chunked_loss_sum
from spurline.parallel.compile import apply_compile
from spurline.parallel.remat import apply_remat
from spurline.train.loss import cross_entropy_sum

CONFIG = AGPTConfig(vocab_size=50, dim=32, num_layers=4, dense_hidden_dim=40, num_heads=4, num_kv_heads=2, head_dim=8)
WINDOW = 3


class WindowAttention(GroupedQueryAttention):
    """Sees the last WINDOW positions only."""

    def forward(self, x_BLD: Tensor, context: BlockContext) -> Tensor:
        ones_LL = torch.ones(x_BLD.shape[1], x_BLD.shape[1], dtype=torch.bool)
        mask_B1LL = (ones_LL.tril() & ones_LL.triu(1 - WINDOW)).expand(1, 1, -1, -1)
        return super().forward(x_BLD, BlockContext(context.rope, context.length, mask_B1LL))


class Alternating(Decoder):
    """Every second layer has a sliding window."""

    def make_attention(self, layer: int) -> nn.Module:
        kind = WindowAttention if layer % 2 else GroupedQueryAttention
        return kind(self.config, output_std=self.output_std)


def built(kind: type[Decoder] = Alternating) -> Decoder:
    model = kind(CONFIG)
    initialize(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1)
    return model


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(50, (2, 11), generator=torch.Generator().manual_seed(seed))


def test_attention_is_made_for_each_layer_by_its_number() -> None:
    kinds = [type(block.attention) for block in built().layers.values()]
    assert kinds == [GroupedQueryAttention, WindowAttention] * 2


def test_layers_with_a_window_see_no_further_than_it() -> None:
    model = built()
    x_BLD = torch.randn(2, 11, 32, generator=torch.Generator().manual_seed(0))
    context = model.block_context(tokens())
    for layer, reach in (("0", 11), ("1", WINDOW)):
        changed_BLD = x_BLD.clone()
        changed_BLD[:, 2] += 1
        differs_BL = (model.layers[layer](x_BLD, context) - model.layers[layer](changed_BLD, context)).abs().amax(-1)
        assert (differs_BL[0] > 1e-4).tolist() == [2 <= position < 2 + reach for position in range(11)]


def test_weights_that_write_into_the_residual_stream_start_smaller() -> None:
    model = Alternating(CONFIG)
    initialize(model, 0)
    for block in model.layers.values():
        assert block.attention.wo.std == model.output_std == pytest.approx(0.02 / 8**0.5)
        assert block.attention.wq.std == 0.02


@pytest.mark.parametrize(
    ("remat", "compiled"),
    [
        *(("none", False), ("full", False), ("selective", False), ("selective", True)),
        *(pytest.param(remat, True, marks=pytest.mark.slow) for remat in ("none", "full")),
    ],
)
def test_layers_that_differ_compile_and_recompute(remat: str, compiled: bool) -> None:
    torch.compiler.reset()
    model, expected = built(), built()
    apply_remat(model, remat)
    if compiled:
        apply_compile(model, "aot_eager")
    for length in (11, 7):
        for one in (model, expected):
            one.zero_grad()
            one(tokens()[:, :length], labels_BL=tokens(1)[:, :length], loss_sum=cross_entropy_sum).backward()
        for (name, parameter), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, wanted.grad, msg=lambda m, name=name: f"{name}: {m}")


def test_parts_of_the_forward_pass_compose_to_logits_and_loss() -> None:
    model, tokens_BL, labels_BL = built(), tokens(), tokens(1)
    context = model.block_context(tokens_BL)
    x_BLD = F.embedding(tokens_BL, model.embedding.weight)
    for block in model.layers.values():
        x_BLD = block(x_BLD, context)
    normed_BLD = x_BLD / (x_BLD.square().mean(-1, keepdim=True) + CONFIG.norm_eps).sqrt() * model.norm.weight
    logits_BLV = normed_BLD @ model.output.weight.T
    torch.testing.assert_close(model(tokens_BL), logits_BLV)
    torch.testing.assert_close(model.hidden_states(tokens_BL), x_BLD)
    torch.testing.assert_close(model.last_hidden_state(tokens_BL), normed_BLD)
    torch.testing.assert_close(model.run_blocks(model.embed(tokens_BL), context), x_BLD)
    torch.testing.assert_close(model.logits(model.final_norm(x_BLD, 11)), logits_BLV)

    expected = F.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten(), reduction="sum")
    by_model = model(tokens_BL, labels_BL=labels_BL, loss_sum=cross_entropy_sum)
    by_hand = chunked_loss_sum(normed_BLD, labels_BL, lambda x: x @ model.output.weight.T, cross_entropy_sum, 50)
    torch.testing.assert_close(by_model, expected)
    torch.testing.assert_close(by_hand, expected)
