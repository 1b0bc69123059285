"""data.mask_documents: what is packed into one window is computed as if each document stood alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask

from spurline.accelerator import cpu_stands_in_for
from spurline.comm.sequence import HeadTailShard
from spurline.config import Data
from spurline.data import open_data
from spurline.models.agpt.configs import AGPTConfig
from spurline.models.common.init import initialize
from spurline.models.common.mask import BLOCK, dense_mask, document_blocks, document_mask
from spurline.models.deepseek_v3.configs import DeepSeekV3Config
from spurline.models.qwen3.configs import Qwen3MoEConfig
from spurline.models.qwen3_vl.configs import qwen3_vl_debugmodel_moe
from spurline.moe.config import MoEConfig
from spurline.parallel.compile import apply_compile
from spurline.parallel.remat import apply_remat
from spurline.testing.equivalence import relative_error
from spurline.testing.params import slow_but
from spurline.train.loss import IGNORE_INDEX, cross_entropy_sum

VOCAB, BOUNDARY = 60, 0
SIZE: dict[str, Any] = {"vocab_size": VOCAB, "dim": 32, "num_layers": 3, "num_heads": 4, "dense_hidden_dim": 40}
HEADS = {"num_kv_heads": 2, "head_dim": 12}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10, "num_dense_layers": 1}
EXPERTS = MoEConfig(hidden_dim=16, num_experts=8)
DEEPSEEK = DeepSeekV3Config(**SIZE, **LATENT, moe=EXPERTS)
MODELS = {
    "agpt": AGPTConfig(**SIZE, **HEADS),
    "qwen3-moe": Qwen3MoEConfig(**SIZE, **HEADS, moe=EXPERTS),
    "deepseek_v3": DEEPSEEK,
    "qwen3_vl": replace(qwen3_vl_debugmodel_moe().model, vocab_size=VOCAB),
}
SIZES = [5, 1, 9, 3]
"""Tokens of the documents in a window; the first has begun before it."""


def built(config: Any) -> Any:
    model = config.build()
    initialize(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # far from uniform attention
                parameter.mul_(6)
    return model


def packed() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and documents of one window, (1, L) each."""
    window_BL = torch.randint(1, VOCAB, (1, sum(SIZES) + 1), generator=torch.Generator().manual_seed(4))
    starts = torch.tensor(SIZES).cumsum(0)
    window_BL[0, starts] = BOUNDARY
    tokens_BL = window_BL[:, :-1]
    return tokens_BL, window_BL[:, 1:], (tokens_BL == BOUNDARY).cumsum(1)


@pytest.mark.parametrize("name", MODELS)
def test_each_document_is_scored_as_if_it_stood_alone(name: str) -> None:
    model = built(MODELS[name]).eval()
    tokens_BL, _, documents_BL = packed()
    assert torch.bincount(documents_BL[0]).tolist() == SIZES
    with torch.no_grad():
        together_BLV = model(tokens_BL, documents_BL=documents_BL)
        alone_BLV = torch.cat([model(part_BL) for part_BL in tokens_BL.split(SIZES, dim=1)], dim=1)
        unmasked_BLV = model(tokens_BL)
    assert relative_error(together_BLV, alone_BLV) < 1e-5
    first = SIZES[0]
    assert relative_error(unmasked_BLV[:, :first], alone_BLV[:, :first]) < 1e-5
    assert relative_error(unmasked_BLV[:, first:], alone_BLV[:, first:]) > 1e-2


@pytest.mark.parametrize(
    ("remat", "compiled"),
    slow_but(
        [("none", False), ("full", False), ("selective", False), ("selective", True)],
        [(remat, compiled) for remat in ("none", "full", "selective") for compiled in (False, True)],
    ),
)
def test_loss_and_gradients_are_those_of_the_documents_alone(remat: str, compiled: bool) -> None:
    model, expected = built(DEEPSEEK), built(DEEPSEEK)
    tokens_BL, labels_BL, documents_BL = packed()
    apply_remat(model, remat)
    if compiled:
        apply_compile(model, "aot_eager")
    loss = model(tokens_BL, labels_BL=labels_BL, loss_sum=cross_entropy_sum, documents_BL=documents_BL)
    loss.backward()
    parts = zip(tokens_BL.split(SIZES, dim=1), labels_BL.split(SIZES, dim=1), strict=True)
    losses = [expected(part, labels_BL=labels, loss_sum=cross_entropy_sum) for part, labels in parts]
    torch.stack(losses).sum().backward()
    assert loss.item() == pytest.approx(sum(losses).item(), rel=1e-5)
    wanted = dict(expected.named_parameters())
    for parameter_name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, wanted[parameter_name].grad) < 1e-5, parameter_name


def test_prediction_modules_do_not_look_into_the_document_before() -> None:
    model = built(replace(DEEPSEEK, num_mtp_layers=2))
    tokens_BL, labels_BL, documents_BL = packed()
    # Module k reads token i + k at position i: what the last positions of a document predict is of the next one.
    labels_BL = labels_BL.masked_fill(documents_BL == 0, IGNORE_INDEX)
    labels_BL[:, SIZES[0] : SIZES[0] + 3] = IGNORE_INDEX
    other_BL = tokens_BL.clone()
    other_BL[:, : SIZES[0]] = other_BL[:, : SIZES[0]] % (VOCAB - 1) + 1
    losses = [
        model(tokens, labels_BL=labels_BL, loss_sum=cross_entropy_sum, **extras).item()
        for tokens in (tokens_BL, other_BL)
        for extras in ({"documents_BL": documents_BL}, {})
    ]
    masked, unmasked, other_masked, other_unmasked = losses
    assert masked == pytest.approx(other_masked, rel=1e-6)
    assert unmasked != pytest.approx(other_unmasked, rel=1e-3)


def test_mask_lets_a_position_see_its_document_up_to_itself() -> None:
    mask_B1LL = document_mask(torch.tensor([[0, 0, 1], [0, 1, 2]]))
    assert mask_B1LL.int().tolist() == [
        [[[1, 0, 0], [1, 1, 0], [0, 0, 1]]],
        [[[1, 0, 0], [0, 1, 0], [0, 0, 1]]],
    ]


@pytest.mark.parametrize("mask_documents", [False, True])
def test_option_gives_batches_their_documents(tmp_path: Path, mask_documents: bool) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * (1 + i % 7)}) + "\n" for i in range(40)))
    data = open_data(Data(path=str(path), mask_documents=mask_documents, validation_fraction=0.2), seq_len=10, seed=0)
    assert data.validation is not None
    for batch in (data.train.batch(0, 3), next(data.validation.batches(2, 1))):
        if not mask_documents:
            assert batch.extras == {}
            continue
        is_boundary_BL = batch.tokens_BL == data.tokenizer.boundary_id
        assert is_boundary_BL.sum() > 2
        assert torch.equal(batch.extras["documents_BL"], is_boundary_BL.cumsum(1))
        assert torch.equal(batch.take([1, 0]).extras["documents_BL"], is_boundary_BL.cumsum(1)[[1, 0]])


def long_documents(length: int) -> Tensor:
    """Three sequences, (3, L): many documents, one, and one boundary at a block's edge."""
    place_L = torch.arange(length)
    return torch.stack([(place_L % 37 == 5).cumsum(0), torch.zeros_like(place_L), (place_L >= BLOCK).long()])


def blocks_of(mask: BlockMask, dense_BlL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which blocks are seen as a whole, and which in part, (B, m, n); and the dense mask by blocks."""
    B, num_queries, num_keys = dense_BlL.shape
    m, n = -(-num_queries // BLOCK), -(-num_keys // BLOCK)
    whole, partly = torch.zeros(B, m, n, dtype=torch.bool), torch.zeros(B, m, n, dtype=torch.bool)
    for b in range(B):
        for q in range(m):
            whole[b, q, mask.full_kv_indices[b, 0, q, : mask.full_kv_num_blocks[b, 0, q]].long()] = True
            partly[b, q, mask.kv_indices[b, 0, q, : mask.kv_num_blocks[b, 0, q]].long()] = True
    padded = torch.nn.functional.pad(dense_BlL, (0, n * BLOCK - num_keys, 0, m * BLOCK - num_queries))
    return whole, partly, padded.view(B, m, BLOCK, n, BLOCK).transpose(2, 3)


@pytest.mark.parametrize("length", [300, 1000, 2048])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_blocks_of_one_ranks_queries_see_what_the_dense_mask_sees(length: int, rank: int) -> None:
    documents_BL = long_documents(length)
    query_l = HeadTailShard(length, 3, rank).positions(torch.device("cpu"))
    dense_BlL = document_mask(documents_BL)[:, 0].index_select(1, query_l)
    assert torch.equal(document_mask(documents_BL, query_l)[:, 0], dense_BlL)
    mask = document_blocks(documents_BL, query_l)
    assert torch.equal(dense_mask(mask)[:, 0], dense_BlL)
    whole, partly, blocks = blocks_of(mask, dense_BlL)
    assert not (whole & partly).any()
    assert not (blocks.any(-1).any(-1) & ~(whole | partly)).any()  # none that is seen is left out
    # In those that are seen as a whole, every query sees every key.
    assert blocks[whole].sum() == sum(min(BLOCK, len(query_l) - q * BLOCK) * BLOCK for q in whole.nonzero()[:, 1])


@pytest.mark.parametrize("length", [1, 127, 128, 300, 512])
def test_blocks_see_what_the_dense_mask_sees(length: int) -> None:
    documents_BL = long_documents(length)
    n = -(-length // BLOCK)
    whole, partly, blocks = blocks_of(document_blocks(documents_BL), document_mask(documents_BL)[:, 0])
    assert torch.equal(whole | partly, blocks.any(-1).any(-1))  # nothing is left out, and nothing looked at in vain
    assert not (whole & partly).any()
    inside = blocks[whole]
    assert inside[:, : length - (n - 1) * BLOCK if n else 0].all()


@pytest.mark.parametrize("name", ["agpt", "deepseek_v3"])
def test_attention_by_blocks_equals_attention_under_the_dense_mask(name: str) -> None:
    model = built(MODELS[name]).eval()
    documents_BL = long_documents(300)
    tokens_BL = torch.randint(1, VOCAB, documents_BL.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected_BLV = model(tokens_BL, documents_BL=documents_BL)
        with cpu_stands_in_for("accelerator"):
            assert isinstance(model.block_context(tokens_BL, documents_BL=documents_BL).mask, BlockMask)
            found_BLV = model(tokens_BL, documents_BL=documents_BL)
    assert relative_error(found_BLV, expected_BLV) < 1e-5


@pytest.mark.parametrize("remat", ["none", "selective"])
def test_training_by_blocks_equals_training_under_the_dense_mask(remat: str) -> None:
    documents_BL = long_documents(140)
    tokens_BL = torch.randint(1, VOCAB, documents_BL.shape, generator=torch.Generator().manual_seed(0))
    models = built(DEEPSEEK), built(DEEPSEEK)
    apply_remat(models[0], remat)
    with cpu_stands_in_for("accelerator"):
        models[0](tokens_BL, documents_BL=documents_BL).square().mean().backward()
    models[1](tokens_BL, documents_BL=documents_BL).square().mean().backward()
    wanted = dict(models[1].named_parameters())
    for parameter_name, parameter in models[0].named_parameters():
        assert relative_error(parameter.grad, wanted[parameter_name].grad) < 1e-5, parameter_name


def test_no_mask_by_blocks_has_a_number_for_every_pair_of_positions() -> None:
    with FakeTensorMode(), cpu_stands_in_for("accelerator"):
        mask = document_mask(torch.zeros(2, 4096, dtype=torch.int64))
    assert isinstance(mask, BlockMask)
    tensors = [part for part in mask.as_tuple() if isinstance(part, Tensor)]
    assert max(part.numel() for part in tensors) == 2 * (4096 // BLOCK) ** 2
