"""Every backend and every routing option against the reference, forward and in every gradient."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline import MoE, MoEConfig
from spurline.testing.equivalence import errors_between, layer_results, reference_results

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def assert_equals_reference(moe: MoE, x: torch.Tensor) -> None:
    if x.dtype != torch.bfloat16:
        errors = errors_between(layer_results(moe, x), reference_results(moe, x))
        assert max(errors.values()) < TOLERANCE[x.dtype], errors
        return
    # bf16 is judged by fp32 arithmetic on the same values. Where a result is a small difference of large numbers,
    # no bf16 arithmetic stays within a hundredth; there, the layer may err as much as the reference in bf16 does.
    exact = reference_results(moe, x, torch.float32)
    errors = errors_between(layer_results(moe, x), exact)
    unavoidable = errors_between(reference_results(moe, x), exact)
    for name, error in errors.items():
        assert error < max(TOLERANCE[x.dtype], 1.5 * unavoidable[name]), (name, errors, unavoidable)


def make(config: MoEConfig, dtype: torch.dtype, seed: int) -> MoE:
    torch.manual_seed(seed)
    moe = MoE(config, init_std=0.4).to(dtype)
    moe.router.expert_bias_E.uniform_(-0.2, 0.2)
    return moe


@st.composite
def layers(draw: st.DrawFn) -> tuple[MoEConfig, tuple[int, ...]]:
    num_groups = draw(st.sampled_from([1, 1, 2, 3]))
    num_experts = num_groups * draw(st.integers(2, 4)) if num_groups > 1 else draw(st.integers(1, 9))
    num_limited_groups = draw(st.integers(1, num_groups)) if num_groups > 1 else None
    eligible = num_experts if num_limited_groups is None else num_limited_groups * (num_experts // num_groups)
    top_k = draw(st.integers(1, eligible))
    config = MoEConfig(
        dim=draw(st.integers(1, 19)),
        hidden_dim=draw(st.integers(1, 17)),
        num_experts=num_experts,
        top_k=top_k,
        num_shared_experts=draw(st.integers(0, 2)),
        score_func=draw(st.sampled_from(["softmax", "sigmoid"])),
        # With one expert a token, a normalized weight is always 1: the gate's gradient is nothing but rounding (below).
        route_norm=top_k > 1 and draw(st.booleans()),
        route_scale=draw(st.sampled_from([1.0, 2.5])),
        score_before_experts=draw(st.booleans()),
        num_groups=num_groups,
        num_limited_groups=num_limited_groups,
        force_load_balance=draw(st.booleans()),
        aux_loss=draw(st.sampled_from(["none", "batch", "sequence"])),
        z_loss_weight=draw(st.sampled_from([0.0, 1e-2])),
        experts_backend=draw(st.sampled_from(["loop", "stream"])),
    )
    return config, (draw(st.integers(1, 3)), draw(st.sampled_from([0, 1, 2, 5, 11])), config.dim)


@settings(max_examples=100)
@given(layers(), st.sampled_from([torch.float32, torch.float64]), st.integers(0, 99))
def test_any_layer_equals_the_reference(
    layer: tuple[MoEConfig, tuple[int, ...]], dtype: torch.dtype, seed: int
) -> None:
    config, shape = layer
    moe = make(config, dtype, seed)
    assert_equals_reference(moe, torch.randn(shape, dtype=dtype))


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
def test_a_biased_gate_and_gated_shared_experts_equal_the_reference(score_func) -> None:
    config = MoEConfig(
        8, 12, num_experts=5, top_k=2, num_shared_experts=2, shared_gate=True, gate_bias=True, score_func=score_func
    )
    moe = make(config, torch.float32, 0)
    torch.nn.init.uniform_(moe.router.gate_bias_E, -1, 1)
    assert_equals_reference(moe, torch.randn(2, 11, 8))


@pytest.mark.parametrize("backend", ["loop", "stream"])
def test_one_expert_a_token_with_normalized_weights_leaves_the_gate_alone(backend: str) -> None:
    config = MoEConfig(8, 12, num_experts=3, top_k=1, route_norm=True, score_func="sigmoid", experts_backend=backend)
    moe = make(config, torch.float32, 0)
    results = layer_results(moe, torch.randn(20, 8))
    assert results["router.gate_ED"].abs().max() < 1e-5
    assert results["experts.w1_EFD"].abs().max() > 0.1


@settings(max_examples=25)
@given(
    st.sampled_from([8, 16, 24]),
    st.sampled_from([8, 32]),
    st.integers(2, 6),
    st.integers(0, 17),
    st.booleans(),
    st.integers(0, 99),
)
def test_grouped_mm_equals_the_reference(
    dim: int, hidden_dim: int, num_experts: int, num_tokens: int, before: bool, seed: int
) -> None:
    config = MoEConfig(dim, hidden_dim, num_experts, top_k=2, score_before_experts=before, experts_backend="grouped_mm")
    assert_equals_reference(make(config, torch.float32, seed), torch.randn(num_tokens, dim))


@pytest.mark.parametrize("backend", ["loop", "grouped_mm", "stream"])
@pytest.mark.parametrize("before", [False, True])
def test_bf16_errs_no_more_than_the_reference_over_many_draws(backend: str, before: bool) -> None:
    """One draw can't tell: its two errors are random, and a gate's few numbers differ by up to 2.3 times."""
    squares: dict[str, list[float]] = {}
    for seed in range(60):
        draw = random.Random(seed)
        dim, hidden_dim, num_experts = draw.choice([8, 16, 24]), draw.choice([8, 32]), draw.randint(2, 6)
        how = {"score_before_experts": before, "experts_backend": backend}
        config = MoEConfig(dim, hidden_dim, num_experts, top_k=2, **how)
        moe, x = make(config, torch.bfloat16, seed), torch.randn(draw.randint(1, 17), dim, dtype=torch.bfloat16)
        exact = reference_results(moe, x, torch.float32)
        for kind, results in enumerate((layer_results(moe, x), reference_results(moe, x))):
            for name, error in errors_between(results, exact).items():
                squares.setdefault(name, [0.0, 0.0])[kind] += error**2
    ratios = {name: (layer / reference) ** 0.5 for name, (layer, reference) in squares.items()}
    assert max(ratios.values()) < 1.1, ratios


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(12, 4, 2), (1, 3, 3), (0, 4, 2)])
def test_bmm_equals_the_reference(dtype: torch.dtype, before: bool, tokens: int, num_experts: int, top_k: int) -> None:
    config = MoEConfig(
        9, 7, num_experts, top_k, score_before_experts=before, experts_backend="bmm", force_load_balance=True
    )
    assert_equals_reference(make(config, dtype, 0), torch.randn(tokens, 9, dtype=dtype))


@pytest.mark.parametrize("backend", ["loop", "grouped_mm", "stream"])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
def test_bf16_stays_within_a_hundredth(backend: str, before: bool, score_func: str) -> None:
    config = MoEConfig(
        dim=32, hidden_dim=48, num_experts=6, top_k=3, num_shared_experts=1, score_func=score_func,
        score_before_experts=before, experts_backend=backend,
    )  # fmt: skip
    assert_equals_reference(make(config, torch.bfloat16, 3), torch.randn(4, 10, 32, dtype=torch.bfloat16))


@pytest.mark.parametrize("backend", ["loop", "grouped_mm", "stream"])
def test_all_tokens_on_one_expert(backend: str) -> None:
    moe = make(MoEConfig(8, 16, num_experts=4, top_k=1, experts_backend=backend), torch.float32, 0)
    moe.router.expert_bias_E.copy_(torch.tensor([0.0, 0.0, 9.0, 0.0]))
    x = torch.randn(13, 8)
    assert moe.router(x).count_E.tolist() == [0, 0, 13, 0]
    assert_equals_reference(moe, x)


def test_inputs_that_are_not_contiguous() -> None:
    moe = make(MoEConfig(6, 10, num_experts=3, top_k=2, num_shared_experts=1), torch.float32, 0)
    assert_equals_reference(moe, torch.randn(6, 5, 4).transpose(0, 2))
    assert_equals_reference(moe, torch.randn(9, 12)[::2, ::2])


def test_weights_that_are_not_contiguous() -> None:
    for backend in ("loop", "grouped_mm", "stream"):
        moe = make(MoEConfig(8, 16, num_experts=3, top_k=2, experts_backend=backend), torch.float32, 0)
        for name in ("w1_EFD", "w3_EFD", "w2_EDF"):
            weight = getattr(moe.experts, name).detach()
            setattr(moe.experts, name, torch.nn.Parameter(weight.transpose(0, 2).contiguous().transpose(0, 2)))
        assert_equals_reference(moe, torch.randn(7, 8))


def test_parameters_in_fp32_with_bf16_activations() -> None:
    moe = make(MoEConfig(16, 24, num_experts=4, top_k=2, num_shared_experts=1), torch.float32, 0)
    with torch.no_grad():
        for p in moe.parameters():
            p.copy_(p.bfloat16())
    assert_equals_reference(moe, torch.randn(30, 16).bfloat16())


def test_gradients_of_gradients() -> None:
    moe = make(MoEConfig(4, 6, num_experts=3, top_k=2, num_shared_experts=1), torch.float64, 1)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(moe, (x,))
    assert torch.autograd.gradgradcheck(moe, (x,))
