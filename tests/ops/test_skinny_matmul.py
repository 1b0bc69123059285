"""Skinny matmuls, with the rows as the right operand: equal results, and used only where they are faster."""

import pytest
import torch
import torch.nn.functional as F

from spurline.ops import skinny_matmul


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def products(monkeypatch):
    """The shapes of what was multiplied the faster way."""
    shapes, mm = [], torch.mm
    monkeypatch.setattr(skinny_matmul.torch, "mm", lambda a, b: shapes.append((*a.shape, b.shape[1])) or mm(a, b))
    return shapes


@pytest.mark.parametrize("shape", [(1,), (1, 1), (2,), (3, 1), (1, 3), (4, 2), (7,)], ids=str)
@pytest.mark.parametrize("width", [256, 1100])
def test_few_rows_give_what_a_linear_layer_gives(threads, products, shape: tuple[int, ...], width: int) -> None:
    x, matrix = torch.randn(*shape, width), torch.randn(300, width)
    with torch.no_grad():
        found = skinny_matmul.linear(x, matrix)
    torch.testing.assert_close(found, F.linear(x, matrix), rtol=1e-5, atol=1e-4)
    assert found.is_contiguous()
    num_rows = x[..., 0].numel()
    if num_rows > {1: 3, 2: 8}[threads]:
        assert products == []
    else:
        alone = num_rows == 1 and threads == 1 and width > 1024
        assert products == [(300, width, 1 if alone else max(num_rows, 2))]


@pytest.mark.parametrize(
    ("rows", "matrix"),
    [
        (torch.randn(9, 256), torch.randn(256, 256)),
        (torch.randn(0, 256), torch.randn(256, 256)),
        (torch.randn(2, 256), torch.randn(255, 256)),
        (torch.randn(2, 256), torch.randn(256, 300).t()),
        (torch.randn(2, 256, dtype=torch.float64), torch.randn(256, 256, dtype=torch.float64)),
        (torch.randn(2, 256).bfloat16(), torch.randn(256, 256).bfloat16()),
    ],
    ids=["many rows", "no rows", "a small matrix", "columns", "float64", "bfloat16"],
)
def test_all_else_goes_as_usual(threads, products, rows: torch.Tensor, matrix: torch.Tensor) -> None:
    with torch.no_grad():
        assert torch.equal(skinny_matmul.linear(rows, matrix), F.linear(rows, matrix))
    assert not products


def test_gradients_and_graphs_go_as_usual(products) -> None:
    x, matrix = torch.randn(2, 256, requires_grad=True), torch.randn(256, 256)
    skinny_matmul.linear(x, matrix).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        compiled = torch.compile(skinny_matmul.linear, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x, matrix), F.linear(x, matrix))
    assert (256, 256, 2) not in products
