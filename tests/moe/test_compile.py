import copy
import dataclasses

import pytest
import torch

from spurline import MoE, MoEConfig

CONFIG = MoEConfig(
    dim=16, hidden_dim=24, num_experts=8, top_k=3, num_shared_experts=1, aux_loss="sequence", z_loss_weight=1e-3
)


@pytest.fixture(autouse=True)
def _fresh_compiler():  # type: ignore[no-untyped-def]
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def step(run, moe: MoE, x: torch.Tensor) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    x = x.detach().requires_grad_()
    y = run(x)
    direction = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return [y, *torch.autograd.grad((y * direction).sum(), [x, *moe.parameters()])]


CHANGES: list[dict[str, object]] = [
    {},
    {"experts_backend": "grouped_mm"},
    {"score_before_experts": True, "num_groups": 4, "num_limited_groups": 2},
    {"force_load_balance": True},
]


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        *((torch.float32, changes) for changes in CHANGES),
        (torch.bfloat16, {}),
        *(pytest.param(torch.bfloat16, changes, marks=pytest.mark.slow) for changes in CHANGES[1:]),
    ],
)
def test_compiled_equals_eager_and_stops_recompiling(dtype: torch.dtype, changes: dict[str, object]) -> None:
    torch.manual_seed(0)
    moe = MoE(dataclasses.replace(CONFIG, **changes), init_std=0.4).to(dtype)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    graphs = []
    for length in (7, 9, 12, 33, 64):
        x = torch.randn(2, length, 16, dtype=dtype)
        for actual, expected in zip(step(compiled, moe, x), step(moe, moe, x), strict=True):
            assert torch.equal(actual, expected)
        graphs.append(num_graphs())
    assert graphs[1:] == [graphs[1]] * 4
    assert moe.router.row_count_E.sum() == 2 * 3 * 2 * (7 + 9 + 12 + 33 + 64)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_generated_code_equals_eager(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    moe = MoE(CONFIG, init_std=0.4).to(dtype)
    compiled = torch.compile(moe, fullgraph=True, dynamic=True)
    for length in (7, 9, 12):
        x = torch.randn(2, length, 16, dtype=dtype)
        for actual, expected in zip(step(compiled, moe, x), step(moe, moe, x), strict=True):
            error = (actual.float() - expected.float()).norm() / expected.float().norm()
            assert error < (1e-5 if dtype == torch.float32 else 1e-2)


def test_compiled_without_gradients() -> None:
    moe = MoE(CONFIG, init_std=0.4).eval()
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for length in (7, 9):
            x = torch.randn(2, length, 16)
            torch.testing.assert_close(compiled(x), moe(x))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("backend", ["auto", "grouped_mm"])
def test_the_exported_layer_computes_the_same(training: bool, backend: str) -> None:
    moe = MoE(dataclasses.replace(CONFIG, experts_backend=backend), init_std=0.4).train(training)
    length = torch.export.Dim("length", min=2, max=512)
    exported = torch.export.export(copy.deepcopy(moe), (torch.randn(4, 7, 16),), dynamic_shapes={"x": {1: length}})
    for n in (2, 7, 31):
        x = torch.randn(4, n, 16)
        torch.testing.assert_close(exported.module()(x), moe(x))
