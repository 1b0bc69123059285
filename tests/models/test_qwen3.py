from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from spurline.models.common.context import BlockContext
from spurline.models.common.init import initialize
from spurline.models.qwen3.configs import Qwen3Config, Qwen3MoEConfig
from spurline.moe.config import MoEConfig

DENSE = Qwen3Config(vocab_size=50, dim=32, num_layers=2, dense_hidden_dim=40, num_heads=4, head_dim=12)
TIED = replace(DENSE, tied_embeddings=True)
SPARSE = Qwen3MoEConfig(
    vocab_size=50,
    dim=32,
    num_layers=2,
    num_heads=4,
    head_dim=12,
    moe=MoEConfig(hidden_dim=24, num_experts=4, top_k=2, route_norm=True),
)
CONFIGS = pytest.mark.parametrize("config", [DENSE, TIED, SPARSE], ids=["dense", "tied", "moe"])


def built(config):
    model = config.build()
    initialize(model, 0)
    return model


def random_tokens(*shape, seed=0):
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(seed))


@CONFIGS
def test_config_counts_the_parameters_of_the_model(config):
    assert config.problems() == []
    with torch.device("meta"):
        model = config.build()
    assert sum(parameter.numel() for parameter in model.parameters()) == config.num_params()


def test_every_layer_of_the_sparse_model_has_experts_and_of_the_dense_one_none():
    assert [block.moe is None for block in built(SPARSE).layers.values()] == [False, False]
    assert [block.moe is None for block in built(DENSE).layers.values()] == [True, True]
    assert SPARSE.num_params() - SPARSE.num_active_params() == 2 * 2 * 3 * 32 * 24
    assert DENSE.num_params() == DENSE.num_active_params()


def test_tied_model_has_one_matrix_for_both_ends_of_it():
    model = built(TIED)
    assert "output.weight" not in model.state_dict()
    assert DENSE.num_params() - TIED.num_params() == 50 * 32
    # The embedding is read, not multiplied: what the head costs is the same.
    assert TIED.flops_per_token(64) == DENSE.flops_per_token(64)

    seen = []
    model.norm.register_forward_hook(lambda module, args, out: seen.append(out))
    logits_BLV = model(random_tokens(2, 7))
    torch.testing.assert_close(logits_BLV, seen[0] @ model.embedding.weight.T)


def test_gradient_of_a_tied_embedding_is_the_sum_of_both_uses():
    tied, untied = built(TIED), built(DENSE)
    untied.load_state_dict(tied.state_dict() | {"output.weight": tied.embedding.weight})
    tokens_BL, labels_BL = random_tokens(2, 9), random_tokens(2, 9, seed=1)
    for model in (tied, untied):
        F.cross_entropy(model(tokens_BL).flatten(0, 1), labels_BL.flatten()).backward()
    expected = untied.embedding.weight.grad + untied.output.weight.grad
    torch.testing.assert_close(tied.embedding.weight.grad, expected)


def test_tied_model_built_on_meta_gets_the_values_of_the_plain_one():
    with torch.device("meta"):
        model = TIED.build()
    model.to_empty(device="cpu")
    initialize(model, 0)
    for name, value in built(TIED).state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert torch.equal(model.embedding.weight, built(DENSE).embedding.weight)


@CONFIGS
def test_every_parameter_learns(config):
    model = built(config)
    F.cross_entropy(model(random_tokens(2, 32)).flatten(0, 1), random_tokens(64, seed=1)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name


def test_block_compiles_in_one_graph_and_equals_eager():
    torch.compiler.reset()
    model = built(DENSE)
    block = model.layers["0"]
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for length in (8, 11):
        x_BLD = torch.randn(2, length, 32, generator=torch.Generator().manual_seed(length), requires_grad=True)
        inputs = [x_BLD, *block.parameters()]
        context = BlockContext(model.rope(torch.arange(length)))
        expected_BLD, out_BLD = block(x_BLD, context), compiled(x_BLD, context)
        torch.testing.assert_close(out_BLD, expected_BLD)
        expected = torch.autograd.grad(expected_BLD.square().sum(), inputs)
        for one, other in zip(torch.autograd.grad(out_BLD.square().sum(), inputs), expected, strict=True):
            torch.testing.assert_close(one, other)


def test_bfloat16_compute_leaves_parameters_and_gradients_in_float32():
    model = built(TIED)
    exact = model(random_tokens(2, 16))
    model.compute_dtype = torch.bfloat16
    logits = model(random_tokens(2, 16))
    assert logits.dtype == torch.bfloat16
    assert 0 < (logits.float() - exact).norm() / exact.norm() < 0.03
    logits.float().logsumexp(-1).sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


def test_problems_of_attention_and_experts_are_told_together():
    bad = replace(
        SPARSE, num_kv_heads=3, head_dim=7, moe=replace(SPARSE.moe, top_k=9), yarn=replace(SPARSE.yarn, factor=0.5)
    )
    found = bad.problems()
    assert [problem.split()[0] for problem in found] == ["yarn.factor", "num_kv_heads", "head_dim", "moe.top_k"]
    assert "num_kv_heads 3 does not divide num_heads 4" in found


def test_unused_dense_width_may_be_anything():
    assert replace(SPARSE, dense_hidden_dim=0).problems() == []
    assert replace(DENSE, dense_hidden_dim=0).problems() == ["dense_hidden_dim must be positive, got 0"]


def test_facts_for_parallelism():
    facts = SPARSE.parallel_facts()
    assert (facts.num_heads, facts.num_kv_heads, facts.num_experts, facts.expert_hidden_dim) == (4, 2, 4, 24)
    assert facts.split_widths == (("vocab_size", 50),)
    facts = DENSE.parallel_facts()
    assert (facts.num_heads, facts.num_kv_heads, facts.num_experts) == (4, 2, 0)
    assert facts.split_widths == (("vocab_size", 50), ("dense_hidden_dim", 40))


def test_forced_balance_reaches_the_experts_and_leaves_a_dense_model_as_it_is():
    assert SPARSE.with_forced_balance().moe_of_layer(0).force_load_balance
    assert DENSE.with_forced_balance() == DENSE
