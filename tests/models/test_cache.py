import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spurline.config import Compile, Parallelism
from spurline.models.agpt.configs import AGPTConfig
from spurline.models.common.cache import KVCache
from spurline.models.common.decoder import Decoder
from spurline.models.common.decoder_config import YarnConfig
from spurline.models.common.generate import generate, window_start
from spurline.models.common.init import initialize
from spurline.models.common.sampling import GREEDY, Sampling
from spurline.models.deepseek_v3.configs import DeepSeekV3Config
from spurline.models.glm4_moe.configs import Glm4MoEConfig
from spurline.models.gpt_oss.configs import GptOssConfig
from spurline.models.mixtral.configs import MixtralConfig
from spurline.models.moe_10b_2b.configs import moe_10b_2b_debugmodel
from spurline.models.olmoe.configs import OLMoEConfig
from spurline.models.qwen2_moe.configs import Qwen2MoEConfig
from spurline.models.qwen3.configs import Qwen3Config, Qwen3MoEConfig
from spurline.models.qwen3_vl.configs import Qwen3VLMoEConfig, VisionConfig
from spurline.moe import telemetry
from spurline.moe.config import MoEConfig
from spurline.parallel.model import parallelize_model
from spurline.parallel.world import joined_world
from spurline.testing import RankPool
from spurline.testing.params import slow_but

VOCAB = 60
SIZE: dict[str, Any] = {"vocab_size": VOCAB, "dim": 32, "num_layers": 3, "num_heads": 4, "dense_hidden_dim": 40}
HEADS = {"num_kv_heads": 2, "head_dim": 12}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10, "num_dense_layers": 1}
SIGMOID = MoEConfig(hidden_dim=16, num_experts=8, score_func="sigmoid", route_norm=True, num_shared_experts=1)
YARN = YarnConfig(factor=4.0, original_seq_len=16, beta_fast=2.0, beta_slow=0.5, mscale=1.5, mscale_all_dim=0.5)
MODELS = {
    "agpt": AGPTConfig(**SIZE, **HEADS),
    "qwen3": Qwen3Config(**SIZE, **HEADS, tied_embeddings=True),
    "qwen3-moe": Qwen3MoEConfig(**SIZE, **HEADS, moe=MoEConfig(hidden_dim=16, num_experts=8, route_norm=True)),
    "deepseek_v3": DeepSeekV3Config(**SIZE, **LATENT, q_lora_rank=12, moe=SIGMOID, yarn=YARN),
    "deepseek_v3-softmax": DeepSeekV3Config(**SIZE, **LATENT, moe=MoEConfig(hidden_dim=16, num_experts=8)),
    "deepseek_v3-groups": DeepSeekV3Config(**SIZE, **LATENT, moe=replace(SIGMOID, num_groups=4, num_limited_groups=2)),
    "moe_10b_2b": replace(moe_10b_2b_debugmodel().model, vocab_size=VOCAB),
    "gpt_oss": GptOssConfig(
        **SIZE,
        **HEADS,
        sliding_window=5,
        moe=MoEConfig(hidden_dim=16, num_experts=8, route_norm=True, gate_bias=True, experts="clamped_swiglu"),
    ),
    "mixtral-window": MixtralConfig(
        **SIZE, **HEADS, sliding_window=5, moe=MoEConfig(hidden_dim=16, num_experts=8, route_norm=True)
    ),
    "olmoe": OLMoEConfig(**SIZE, num_kv_heads=2, head_dim=8, moe=MoEConfig(hidden_dim=16, num_experts=8)),
    "qwen2_moe": Qwen2MoEConfig(
        **SIZE,
        num_kv_heads=2,
        head_dim=8,
        moe=MoEConfig(hidden_dim=16, num_experts=8, num_shared_experts=2, shared_gate=True),
    ),
    "glm4_moe": Glm4MoEConfig(**SIZE, num_kv_heads=2, head_dim=8, qk_norm=True, moe=SIGMOID),
    "qwen3_vl-moe": Qwen3VLMoEConfig(
        **SIZE,
        **HEADS,
        mrope_section=(2, 2, 2),
        vision=VisionConfig(
            dim=16, num_layers=2, num_heads=2, hidden_dim=20, positions_per_side=3, deepstack_layers=(0,)
        ),
        moe=MoEConfig(hidden_dim=16, num_experts=8, route_norm=True),
    ),
}
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5], [11, 12, 13, 14]]


def built(config: Any) -> Decoder:
    model = config.build()
    initialize(model, 2)  # each of these models writes many tokens with this seed
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:  # far from uniform attention, and tokens that depend on more than the one before
                parameter.mul_(2 if name == "embedding.weight" else 12)
            elif "norm" not in name:  # biases and sinks, which are zeros
                parameter.normal_(std=0.3)
    return model.eval()


OFTEN = {"agpt", "qwen3", "qwen3-moe", "deepseek_v3", "moe_10b_2b", "gpt_oss", "glm4_moe"}


@pytest.fixture(params=slow_but(OFTEN, MODELS))
def model(request: pytest.FixtureRequest) -> Decoder:
    return built(MODELS[request.param])


def likeliest_tokens(model: Decoder, prompt: list[int], num_tokens: int, max_context: int) -> list[int]:
    """The definition: the model reads what it may see of one text, for each token anew."""
    text = list(prompt)
    for _ in range(num_tokens):
        seen_1L = torch.tensor([text[window_start(len(text), max_context) :]])
        text.append(int(model(seen_1L)[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("max_context", [64, 11])
@torch.no_grad()
def test_cached_tokens_are_those_of_each_text_read_alone_and_anew(model, max_context):
    expected = [likeliest_tokens(model, prompt, 20, max_context) for prompt in PROMPTS]
    assert len({token for tokens in expected for token in tokens}) > 10
    options = {"sampling": GREEDY, "max_context": max_context}
    assert generate(model, PROMPTS, 20, **options) == expected
    assert generate(model, PROMPTS, 20, cached=False, **options) == expected
    assert [generate(model, [prompt], 20, **options)[0] for prompt in PROMPTS] == expected


@torch.no_grad()
def test_drawn_tokens_are_the_same_with_a_cache_and_without(model):
    options = {"sampling": Sampling(temperature=1.0, top_k=10, top_p=0.9), "seed": 3, "max_context": 16}
    assert generate(model, PROMPTS, 25, **options) == generate(model, PROMPTS, 25, cached=False, **options)


@pytest.mark.parametrize("steps", [(9, 1, 1, 1), (5, 4, 3), (1, 6, 5)], ids=str)
@torch.no_grad()
def test_reading_in_pieces_equals_reading_at_once(model, steps):
    """Also for rows with padding in front, whose own tokens see nothing of it."""
    tokens_BL = torch.randint(VOCAB, (3, 12), generator=torch.Generator().manual_seed(0))
    padding = [0, 4, 2]
    cache = KVCache(3, 12, torch.tensor(padding))
    pieces = [model.last_hidden_state(piece_BL, cache) for piece_BL in tokens_BL.split(steps, dim=1)]
    in_pieces_BLD = torch.cat(pieces, dim=1)
    for row, num in enumerate(padding):
        alone_LD = model.last_hidden_state(tokens_BL[row : row + 1, num:])[0]
        torch.testing.assert_close(in_pieces_BLD[row, num:], alone_LD, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_only_the_last_of_the_tokens_is_scored_with_a_cache(model):
    tokens_BL = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
    cache = KVCache(3, 9)
    torch.testing.assert_close(model(tokens_BL, cache), model(tokens_BL)[:, -1:], rtol=1e-4, atol=1e-4)


def test_rows_without_padding_need_no_mask_but_for_several_tokens_with_a_past():
    cache, cpu = KVCache(1, 10, torch.tensor([0, 0])), torch.device("cpu")
    assert cache.advance(4, cpu).tolist() == [0, 1, 2, 3]
    assert cache.mask_B1LS is None
    assert cache.advance(1, cpu).tolist() == [4]
    assert cache.mask_B1LS is None
    assert cache.advance(2, cpu).tolist() == [5, 6]
    assert cache.mask_B1LS.tolist() == [[[[True] * 6 + [False], [True] * 7]]]


def test_positions_of_a_padded_row_count_from_its_first_token_which_sees_no_padding():
    cache, cpu = KVCache(1, 10, torch.tensor([0, 2])), torch.device("cpu")
    assert cache.advance(4, cpu).tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
    assert cache.mask_B1LS[1, 0, 2:].tolist() == [[False, False, True, False], [False, False, True, True]]
    assert cache.mask_B1LS[:, 0].any(dim=-1).all()  # padding sees itself: a softmax over nothing is not a number
    assert cache.advance(1, cpu).tolist() == [[4], [2]]
    assert cache.mask_B1LS[1].tolist() == [[[False, False, True, True, True]]]


class LargestTensor(TorchDispatchMode):
    """Notes the most numbers that an operation has returned in new memory."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view:
            self.numel = max(self.numel, out.numel())
        return out


def caches_of(model: Decoder, num_tokens: int, num_slots: int) -> Iterator[KVCache]:
    for B in (1, 3):
        cache = KVCache(3, num_slots)
        model(torch.zeros(B, num_tokens, dtype=torch.int64), cache)
        yield cache


@torch.no_grad()
def test_latent_attention_keeps_only_the_latent_and_the_shared_key():
    for cache in caches_of(built(MODELS["deepseek_v3"]), 5, 20):
        for layer in cache.layers:
            (buffer,) = layer._buffers
            assert buffer.shape[1:] == (20, LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"])


@torch.no_grad()
def test_grouped_query_attention_keeps_keys_and_values_of_the_shared_heads():
    for cache in caches_of(built(MODELS["qwen3"]), 5, 20):
        for layer in cache.layers:
            assert [buffer.shape[1:] for buffer in layer._buffers] == [(2, 20, 12), (2, 20, 12)]


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
@torch.no_grad()
def test_a_further_token_makes_nothing_of_the_past_but_a_score_for_each_head(name):
    model, length = built(MODELS[name]), 1000
    for cache in caches_of(model, length, length + 1):
        B = len(cache.layers[0]._buffers[0])
        with LargestTensor() as largest:
            model(torch.zeros(B, 1, dtype=torch.int64), cache)
        assert largest.numel == B * SIZE["num_heads"] * (length + 1)


@torch.no_grad()
def test_a_full_cache_is_refused():
    model = built(MODELS["agpt"])
    (cache, _) = caches_of(model, 5, 6)
    model(torch.tensor([[1]]), cache)
    with pytest.raises(AssertionError, match="6 \\+ 1 tokens in 6 slots"):
        model(torch.tensor([[1]]), cache)


def test_experts_with_equal_rows_are_served_from_fused_weights():
    """Eight texts, two experts each of eight: with forced balance every expert has two rows of each new token."""
    config = MODELS["qwen3-moe"]
    model = built(config.with_forced_balance())
    telemetry.reset()
    telemetry.enable()
    try:
        generate(model, [[1, 2]] * 8, 4, sampling=GREEDY, max_context=16)
    finally:
        telemetry.enable(False)
    assert config.moe.top_k == 2
    counted = telemetry.counters()
    assert counted["fused_weights.hits"] + counted["fused_weights.misses"] == 4 * config.num_layers
    assert "experts.loop" not in telemetry.counters()


@torch.no_grad()
def test_bfloat16_stays_close_with_a_cache(model):
    model.compute_dtype = torch.bfloat16
    tokens_BL = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    cache = KVCache(3, 12)
    pieces = [model.last_hidden_state(piece_BL, cache) for piece_BL in tokens_BL.split((11, 1), dim=1)]
    assert pieces[-1].dtype == torch.bfloat16
    in_pieces_BD, at_once_BD = pieces[-1][:, 0].float(), model.last_hidden_state(tokens_BL)[:, -1].float()
    assert (in_pieces_BD - at_once_BD).norm() / at_once_BD.norm() < 0.05


def generate_on_rank(rank: int, config: Any, degrees: dict[str, int]) -> list[list[int]]:
    with (
        mock.patch.dict(os.environ, {"WORLD_SIZE": str(dist.get_world_size())}),
        joined_world(Parallelism(**degrees)) as world,
    ):
        with torch.device("meta"):
            model = config.build()
        parallelize_model(model, world.meshes, "none", Compile())
        model.to_empty(device=world.device)
        initialize(model, 0)
        cached = generate(model, PROMPTS, 25, sampling=GREEDY, max_context=11)
        if "context_parallel_degree" in degrees:  # logits of all positions, on every rank
            assert generate(model, PROMPTS, 25, sampling=GREEDY, max_context=11, cached=False) == cached
        return cached


@pytest.mark.parametrize(
    "degrees",
    [{"tensor_parallel_degree": 2}, {"data_parallel_shard_degree": 2}, {"context_parallel_degree": 2}],
    ids=str,
)
@pytest.mark.parametrize("name", slow_but(["deepseek_v3"], ["qwen3-moe", "deepseek_v3"]))
def test_cached_tokens_of_split_and_of_sharded_models_are_those_of_one_rank(ranks: RankPool, name, degrees):
    model = MODELS[name].build()
    initialize(model, 0)
    expected = generate(model, PROMPTS, 25, sampling=GREEDY, max_context=11, cached=False)
    assert ranks.run(generate_on_rank, 2, MODELS[name], degrees) == [expected, expected]
