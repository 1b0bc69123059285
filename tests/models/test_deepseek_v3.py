import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from spurline.accelerator import cpu_stands_in_for
from spurline.models import family_configs
from spurline.models.common.context import BlockContext
from spurline.models.common.init import initialize
from spurline.models.common.loss import positions_per_chunk
from spurline.testing.equivalence import relative_error
from spurline.testing.params import slow_but
from spurline.train.loss import IGNORE_INDEX, cross_entropy_sum


def built(config, scale=1.0):
    """`scale` widens the matrices, so that the blocks matter as much as in a trained model."""
    model = config.build()
    initialize(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale if parameter.ndim > 1 else 1.0)
    return model


def random_tokens(config, *shape, seed=0):
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_shared_experts", [0, 1, 2])
@pytest.mark.parametrize("num_dense_layers", [0, 1, 3])
@pytest.mark.parametrize("q_lora_rank", [0, 12])
def test_config_counts_the_parameters_of_the_model(small_config, q_lora_rank, num_dense_layers, num_shared_experts):
    config = small_config(
        q_lora_rank=q_lora_rank, num_dense_layers=num_dense_layers, moe={"num_shared_experts": num_shared_experts}
    )
    with torch.device("meta"):
        model = config.build()
    assert sum(parameter.numel() for parameter in model.parameters()) == config.num_params()
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("name", family_configs("deepseek_v3"))
def test_every_preset_is_sound_and_counts_its_parameters(name):
    config = family_configs("deepseek_v3")[name]()
    assert config.problems() == []
    with torch.device("meta"):
        model = config.model.build()
    assert sum(parameter.numel() for parameter in model.parameters()) == config.model.num_params()


def test_active_parameters_are_those_that_one_token_meets(small_config):
    config = small_config()
    two_of_four_experts = 2 * 3 * config.dim * config.moe.hidden_dim
    assert config.num_params() - config.num_active_params() == 2 * two_of_four_experts


def test_first_blocks_are_dense_and_the_others_have_experts(small_config):
    model = small_config(num_dense_layers=2).build()
    assert list(model.layers) == ["0", "1", "2"]
    assert [block.moe is None for block in model.layers.values()] == [True, True, False]
    assert [block.feed_forward is None for block in model.layers.values()] == [False, False, True]
    assert model.layers["2"].moe.config == model.config.layer_moe()


@pytest.mark.parametrize("layer", ["0", "2"], ids=["dense", "moe"])
def test_block_adds_each_branch_to_the_residual_stream(small_config, layer):
    model = built(small_config(), scale=5)
    block, context = model.layers[layer], BlockContext(model.rope(torch.arange(5)))
    x_BLD = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    middle_BLD = x_BLD + block.attention(block.attention_norm(x_BLD), context)
    expected_BLD = middle_BLD + (block.feed_forward or block.moe)(block.ffn_norm(middle_BLD))
    torch.testing.assert_close(block(x_BLD, context), expected_BLD)


def test_state_dict_has_readable_names_and_no_tables(small_config):
    names = small_config(num_dense_layers=3, num_layers=3).build().state_dict().keys()
    layers = {name.removeprefix("layers.0.") for name in names if name.startswith("layers.0.")}
    assert {name for name in names if not name.startswith("layers.")} == {
        "embedding.weight",
        "norm.weight",
        "output.weight",
    }
    assert layers == {
        "attention_norm.weight",
        "attention.wq_a.weight",
        "attention.q_norm.weight",
        "attention.wq_b.weight",
        "attention.wkv_a.weight",
        "attention.kv_norm.weight",
        "attention.wkv_b.weight",
        "attention.wo.weight",
        "ffn_norm.weight",
        "feed_forward.w1.weight",
        "feed_forward.w3.weight",
        "feed_forward.w2.weight",
    }


def test_config_without_moe_layers_needs_no_expert_width(small_config):
    assert small_config(num_dense_layers=3, moe={"hidden_dim": 0}).problems() == []
    assert "moe.hidden_dim" in small_config(moe={"hidden_dim": 0}).problems()[0]


def test_problems_name_every_bad_field(small_config):
    found = small_config(dim=0, rope_theta=0.0, q_lora_rank=-1, qk_rope_head_dim=3, num_dense_layers=9).problems()
    for field in ("dim", "rope_theta", "q_lora_rank", "qk_rope_head_dim", "num_dense_layers"):
        assert any(problem.startswith(f"{field} ") for problem in found), field


def test_a_token_changes_no_logits_before_it(small_config):
    model = built(small_config(), scale=5)
    tokens_BL = random_tokens(model.config, 2, 9)
    changed_BL = tokens_BL.clone()
    changed_BL[:, 5] = (changed_BL[:, 5] + 1) % model.config.vocab_size
    before, after = model(tokens_BL), model(changed_BL)
    torch.testing.assert_close(after[:, :5], before[:, :5], rtol=0, atol=1e-5)
    for position in range(5, 9):
        assert (after[:, position] - before[:, position]).abs().max() > 1e-2


def test_loss_on_random_tokens_starts_near_that_of_a_uniform_guess(small_config):
    model = built(small_config(dim=64))
    logits_BLV = model(random_tokens(model.config, 4, 64))
    labels_BL = random_tokens(model.config, 4, 64, seed=1)
    loss = F.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten())
    assert loss.item() == pytest.approx(math.log(model.config.vocab_size), abs=0.1)


def test_bfloat16_compute_is_close_and_leaves_parameters_and_gradients_in_float32(small_config):
    # Every token visits every expert: rounding can't send it elsewhere.
    model = built(small_config(moe={"top_k": 4}), scale=5)
    tokens_BL = random_tokens(model.config, 2, 32)
    exact = model(tokens_BL)
    model.compute_dtype = torch.bfloat16
    logits = model(tokens_BL)
    assert logits.dtype == torch.bfloat16
    error = (logits.float() - exact).norm() / exact.norm()
    assert 0 < error < 0.03  # 0.007 is usual
    logits.float().logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name


def test_every_parameter_learns(small_config):
    model = built(small_config())
    F.cross_entropy(model(random_tokens(model.config, 2, 32)).flatten(0, 1), random_tokens(model.config, 64)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("layer", slow_but(["2"], ["0", "2"]), ids=["dense", "moe"])
def test_block_compiles_in_one_graph_and_equals_eager(small_config, layer):
    torch.compiler.reset()
    model = built(small_config())
    block = model.layers[layer]
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for length in (8, 11, 5):
        x_BLD = torch.randn(2, length, 32, generator=torch.Generator().manual_seed(length), requires_grad=True)
        inputs = [x_BLD, *block.parameters()]
        context = BlockContext(model.rope(torch.arange(length)))
        expected_BLD, out_BLD = block(x_BLD, context), compiled(x_BLD, context)
        torch.testing.assert_close(out_BLD, expected_BLD)
        expected = torch.autograd.grad(expected_BLD.square().sum(), inputs)
        for one, other in zip(torch.autograd.grad(out_BLD.square().sum(), inputs), expected, strict=True):
            torch.testing.assert_close(one, other)


def test_forced_balance_reaches_the_moe_layers(small_config):
    assert small_config().with_forced_balance().layer_moe() == replace(
        small_config().layer_moe(), force_load_balance=True
    )


@pytest.mark.parametrize("max_logits", [1, 5 * 264, 1 << 26])
def test_loss_by_chunks_equals_the_loss_of_all_logits(monkeypatch, max_logits: int) -> None:
    monkeypatch.setattr("spurline.models.common.loss.CPU_CHUNK_BYTES", 12 * max_logits)
    config = family_configs("deepseek_v3")["deepseek_v3_debugmodel"]().model
    model, whole = built(config), built(config)
    tokens_BL, labels_BL = random_tokens(config, 2, 3, 7)
    labels_BL[1, 2:5] = IGNORE_INDEX
    largest = []

    def loss_sum(logits_BLV: torch.Tensor, labels_BL: torch.Tensor) -> torch.Tensor:
        largest.append(logits_BLV.numel())
        return cross_entropy_sum(logits_BLV, labels_BL)

    loss = model(tokens_BL, labels_BL=labels_BL, loss_sum=loss_sum)
    loss.backward()
    expected = cross_entropy_sum(whole(tokens_BL), labels_BL)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, whole.get_parameter(name).grad) < 1e-5, name
    assert max(largest) <= max(max_logits, 264)


def test_chunks_of_logits_follow_the_memory_of_the_device() -> None:
    cpu, vocab = torch.device("cpu"), 129_280
    assert positions_per_chunk(cpu, torch.float32, vocab) == (1 << 26) // vocab
    with cpu_stands_in_for("accelerator", memory_bytes=80 << 30):
        large = positions_per_chunk(cpu, torch.bfloat16, vocab)
        assert large * vocab * 16 <= (80 << 30) / 64 < (large + 1) * vocab * 16
        assert positions_per_chunk(cpu, torch.bfloat16, vocab // 8) == pytest.approx(8 * large, rel=0.02)
    with cpu_stands_in_for("accelerator", memory_bytes=1 << 20):
        assert positions_per_chunk(cpu, torch.bfloat16, vocab) == 1
