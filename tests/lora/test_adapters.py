"""Adapters on every kind of weight against the plain model with W + alpha / rank * B A, forward and every gradient."""

from typing import Any

import pytest
import torch
from dense import dense_results, randomize

from spurline.lora.adapters import is_adapter
from spurline.lora.attach import attach_adapters, fold_adapters
from spurline.models.common.cache import KVCache
from spurline.models.common.init import initialize, initialize_parameters
from spurline.models.deepseek_v3.configs import deepseek_v3_debugmodel
from spurline.models.gpt_oss.configs import GptOssConfig
from spurline.models.mixtral.configs import MixtralConfig
from spurline.models.qwen2_moe.configs import Qwen2MoEConfig
from spurline.moe.config import MoEConfig
from spurline.parallel.compile import apply_compile
from spurline.parallel.remat import apply_remat
from spurline.parallel.tensor import TensorParallel
from spurline.testing.equivalence import relative_error
from spurline.testing.tiny import tiny_model
from spurline.train.loss import make_loss_sum

ALL = ("*.attention.*|*.feed_forward.*|*.experts.*|*.shared_experts.*",)
SMALL: dict[str, Any] = {"vocab_size": 60, "dim": 16, "num_layers": 2, "num_heads": 4, "dense_hidden_dim": 24}
MODELS = {
    "latent": tiny_model(num_mtp_layers=1),
    "latent-score-before": tiny_model(moe={"score_before_experts": True, "num_shared_experts": 0}, q_lora_rank=0),
    "grouped-query": MixtralConfig(
        **SMALL, num_kv_heads=2, head_dim=4, moe=MoEConfig(hidden_dim=12, num_experts=4, top_k=2, route_norm=True)
    ),
    "biases-and-sinks": GptOssConfig(
        **SMALL,
        num_kv_heads=2,
        head_dim=4,
        moe=MoEConfig(hidden_dim=12, num_experts=4, experts="clamped_swiglu", gate_bias=True),
    ),
    "shared-gate": Qwen2MoEConfig(
        **SMALL,
        num_kv_heads=2,
        head_dim=4,
        moe=MoEConfig(hidden_dim=12, num_experts=4, num_shared_experts=2, shared_gate=True),
    ),
}
LOSS = make_loss_sum(TensorParallel())


def adapted(config: Any, targets: tuple[str, ...] = ALL, rank: int = 3, alpha: float = 6.0) -> Any:
    model = config.build()
    attach_adapters(model, rank, alpha, targets)
    initialize(model, 1)
    randomize(model)
    return model


def batch(config: Any, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(config.vocab_size, (2, 13), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def check(model: Any, config: Any, tolerance: float = 1e-5) -> None:
    tokens_BL, labels_BL = batch(config)
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    expected_loss, expected = dense_results(config, tensors, 2.0, tokens_BL, labels_BL, LOSS)
    loss = model(tokens_BL, labels_BL=labels_BL, loss_sum=LOSS)
    loss.backward()
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert found.keys() == expected.keys()
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    assert {name: error for name, error in errors.items() if error > tolerance} == {}
    assert all(gradient.abs().max() > 0 for gradient in expected.values())


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_dense_sum(name: str) -> None:
    model = adapted(MODELS[name])
    kinds = {"attention", "experts"} | ({"feed_forward"} if name.startswith("latent") else set())
    named = [name for name, _ in model.named_parameters() if is_adapter(name)]
    assert all(any(f".{kind}." in name for name in named) for kind in kinds)
    check(model, MODELS[name])


@pytest.mark.parametrize("kernel", ["loop", "grouped_mm"])
def test_every_kernel_that_multiplies_has_adapters(kernel: str) -> None:
    config = tiny_model(moe={"experts_backend": kernel}, dim=16)
    check(adapted(config, rank=4, alpha=8.0), config)


def test_kernel_that_computes_experts_as_a_whole_is_refused_by_name() -> None:
    model = adapted(tiny_model(moe={"experts_backend": "stream"}))
    with pytest.raises(ValueError, match="'stream' computes experts as a whole, and these have adapters"):
        model(batch(model.config)[0])


@pytest.mark.slow
def test_compiled_and_recomputed_blocks_have_the_same_gradients() -> None:
    config = MODELS["latent"]
    model = adapted(config)
    apply_remat(model, "selective")
    apply_compile(model, "aot_eager")
    check(model, config)


def test_training_begins_with_the_weights_as_they_are() -> None:
    config = MODELS["latent"]
    plain, model = config.build(), config.build()
    attach_adapters(model, 4, 16.0, ALL)
    initialize(plain, 1)
    initialize(model, 1)
    tokens_BL, _ = batch(config)
    assert torch.equal(plain.state_dict()["layers.1.moe.experts.w1_EFD"], model.layers["1"].moe.experts.w1_EFD)
    torch.testing.assert_close(model(tokens_BL), plain(tokens_BL), rtol=1e-5, atol=1e-6)
    a = model.layers["1"].moe.experts.w2_EDF_lora_a
    assert 0.9 * 16**-0.5 < a.abs().max() <= 16**-0.5  # of as many inputs as an expert is wide


def test_adapters_are_drawn_alone() -> None:
    model = adapted(MODELS["latent"])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    initialize_parameters(model, 1, only_adapters=True)
    after = model.state_dict()
    assert all(is_adapter(name) for name in before if not torch.equal(before[name], after[name]))
    assert not after["layers.0.attention.wo.weight_lora_b"].any()


@pytest.mark.parametrize("name", ["latent", "biases-and-sinks"])
def test_folded_model_computes_the_same_without_adapters(name: str) -> None:
    config = MODELS[name]
    model = adapted(config)
    tokens_BL, _ = batch(config)
    with torch.no_grad():
        before = model.eval()(tokens_BL)
        fold_adapters(model)
        after = model(tokens_BL)
    assert model.state_dict().keys() == config.build().state_dict().keys()
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)


def test_cached_generation_knows_the_adapters() -> None:
    """Latent attention to cached latents uses a weight itself, not a product with it."""
    config = MODELS["latent"]
    model = adapted(config).eval()
    tokens_BL, _ = batch(config)
    with torch.no_grad():
        cache = KVCache(config.num_layers, 16)
        model(tokens_BL[:, :5], cache)
        steps = [model(tokens_BL[:, [at]], cache)[:, 0] for at in range(5, 12)]
        torch.testing.assert_close(torch.stack(steps, 1), model(tokens_BL)[:, 5:], rtol=1e-4, atol=1e-5)


def test_only_targets_get_adapters_and_only_adapters_are_trained() -> None:
    with torch.device("meta"):
        model = deepseek_v3_debugmodel().model.build()
    attach_adapters(model, 2, 4.0, ("layers.1.*.w1_EFD", "*.wq_a.weight"))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    blocks = [f"layers.{layer}.attention.wq_a.weight" for layer in model.layers]
    assert trained == {f"{name}_lora_{m}" for name in ("layers.1.moe.experts.w1_EFD", *blocks) for m in "ab"}


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("*.q_proj.*", "'\\*.q_proj.\\*': it matches no weight; names look like .*layers.2.attention.wq_b.weight"),
        ("*.router.*", "it matches no weight that can have an adapter"),
        ("embedding.weight", "it matches no weight that can have an adapter"),
    ],
)
def test_target_that_matches_nothing_is_one_line(target: str, says: str) -> None:
    with torch.device("meta"):
        model = MODELS["latent"].build()
    with pytest.raises(ValueError, match=says) as raised:
        attach_adapters(model, 2, 4.0, ("*.attention.*", target))
    assert "\n" not in str(raised.value)
