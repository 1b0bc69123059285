"""Each collective and its gradient against the same computation in one process.

A call on ranks starts from one seed, so that every rank can make the inputs of all of them and compute what it expects.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh

from spurline.comm.collectives import (
    all_gather_counts,
    all_gather_sequence,
    all_reduce_sum,
    all_to_all_heads,
    copy_to_group,
    reduce_scatter_sequence,
)
from spurline.comm.exchange import exchange_rows
from spurline.comm.sequence import SequenceShard
from spurline.testing import RankPool
from spurline.testing.params import slow_but

SIZES = pytest.mark.parametrize("size", [2, 4])


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def check(
    rank: int, actual: Callable[[Tensor], Tensor], expected: Callable[[list[Tensor]], list[Tensor]], xs: list[Tensor]
) -> None:
    """Compare this rank's output, and the gradient of all ranks' losses, for four kinds of incoming gradient."""
    for kind in ("dense", "stride 0", "transposed", "used twice"):

        def loss(y: Tensor, of_rank: int, kind: str = kind) -> Tensor:
            direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(of_rank)).to(y.dtype)
            if kind == "stride 0":
                return y.sum() * (of_rank + 1)
            if kind == "transposed":
                return (y.mT * direction.mT.contiguous()).sum()
            return (y * direction).sum()

        x = xs[rank].clone().requires_grad_()
        all_x = [x.clone().requires_grad_() for x in xs]
        y, all_y = actual(x), expected(all_x)
        torch.testing.assert_close(y, all_y[rank])
        if kind == "used twice":
            y, all_y = y * actual(x), [y * y for y in all_y]
        loss(y, rank).backward()
        total = torch.stack([loss(y, r) for r, y in enumerate(all_y)]).sum()
        total.backward()
        torch.testing.assert_close(x.grad, all_x[rank].grad, msg=lambda text, kind=kind: f"{kind} gradient: {text}")


def exchange_heads(rank: int, shape: tuple[int, ...]) -> None:
    xs = [torch.randn(dist.get_world_size(), *shape) for _ in range(dist.get_world_size())]
    check(rank, lambda x: all_to_all_heads(x, world()), lambda xs: list(torch.stack(xs).transpose(0, 1)), xs)


@SIZES
def test_all_to_all_gives_each_rank_its_part_of_all(ranks: RankPool, size: int) -> None:
    ranks.run(exchange_heads, size, (3, 2))
    ranks.run(exchange_heads, size, (2, 0))


def gather(rank: int, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    xs = list(torch.randn(dist.get_world_size(), *shape).to(dtype))
    check(rank, lambda x: all_gather_sequence(x, world(), dim), lambda xs: [torch.cat(xs, dim)] * len(xs), xs)


def reduce_scatter(rank: int, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    size = dist.get_world_size()
    xs = list(torch.randn(size, *shape).to(dtype).repeat_interleave(size, dim=dim + (dim >= 0)))
    check(
        rank,
        lambda x: reduce_scatter_sequence(x, world(), dim),
        lambda xs: list(torch.stack(xs).sum(0).chunk(size, dim)),
        xs,
    )


SHAPES_AND_DIMS = pytest.mark.parametrize(
    ("shape", "dim"), [((4, 3), 0), ((2, 3, 5), 1), ((1, 3, 5), 1), ((2, 3, 5), -1), ((2, 2, 3, 2), 2)]
)


@SIZES
@SHAPES_AND_DIMS
@pytest.mark.parametrize("function", [gather, reduce_scatter])
def test_sequence_collectives(
    ranks: RankPool, function: Callable[..., None], shape: tuple, dim: int, size: int
) -> None:
    ranks.run(function, size, shape, dim, torch.float32)


@pytest.mark.parametrize("function", [gather, reduce_scatter])
def test_gather_and_reduce_scatter_in_bfloat16(ranks: RankPool, function: Callable[..., None]) -> None:
    ranks.run(function, 2, (2, 3, 5), 1, torch.bfloat16)


def gather_nothing(rank: int) -> None:
    x = torch.ones(2, 0, 3, requires_grad=True)
    y = all_gather_sequence(x, world(), 1)
    z = reduce_scatter_sequence(y, world(), 1)
    assert y.shape == z.shape == (2, 0, 3)
    z.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_empty_sequence(ranks: RankPool) -> None:
    ranks.run(gather_nothing, 2)


def gather_virtual_padding(rank: int, length: int) -> None:
    size = dist.get_world_size()
    whole_BLD = torch.randn(3, length, 2, requires_grad=True)
    direction = torch.randn(3, length, 2)
    shard = SequenceShard(length, size, rank)
    own = shard.shard(whole_BLD, 1).detach().requires_grad_()
    y_BLD = shard.trim(all_gather_sequence(shard.pad(own, 1), world(), 1), 1)
    assert torch.equal(y_BLD, whole_BLD)
    (y_BLD * direction).sum().backward()
    torch.testing.assert_close(own.grad, size * shard.shard(direction, 1))


@SIZES
@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_padded_shards_gather_to_the_whole(ranks: RankPool, size: int, length: int) -> None:
    ranks.run(gather_virtual_padding, size, length)


def all_reduce(rank: int) -> None:
    xs = torch.randn(dist.get_world_size(), 2, 3)
    direction = torch.randn(3, 2)
    x = xs[rank].clone().requires_grad_()
    y = all_reduce_sum(x, world())
    torch.testing.assert_close(y, xs.sum(0))
    # Every rank computes the same loss, which counts once.
    (y.mT * direction).sum().backward()
    torch.testing.assert_close(x.grad, direction.mT)


def copy(rank: int) -> None:
    x = torch.randn(2, 3, requires_grad=True)
    directions = torch.randn(dist.get_world_size(), 3, 2)
    y = copy_to_group(x, world())
    assert torch.equal(y, x)
    (y.mT * directions[rank]).sum().backward()
    torch.testing.assert_close(x.grad, directions.sum(0).mT)
    x.grad = None
    copy_to_group(x, world()).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2, 3), float(len(directions))))


@SIZES
@pytest.mark.parametrize("function", [all_reduce, copy])
def test_sum_and_copy(ranks: RankPool, function: Callable[..., None], size: int) -> None:
    ranks.run(function, size)


def exchange(rank: int, num_rows: list[list[int]], shape: tuple[int, ...]) -> None:
    """num_rows[i][j] rows go from rank i to rank j."""
    xs = [torch.randn(sum(row), *shape) for row in num_rows]
    received = [row[rank] for row in num_rows]

    def expected(xs: list[Tensor]) -> list[Tensor]:
        parts = [x.split(row) for x, row in zip(xs, num_rows, strict=True)]
        return [torch.cat(column) for column in zip(*parts, strict=True)]

    splits_2P = torch.tensor([num_rows[rank], received])
    check(rank, lambda x: exchange_rows(x, splits_2P, world()), expected, xs)
    if len({n for row in num_rows for n in row}) == 1:
        check(rank, lambda x: exchange_rows(x, None, world()), expected, xs)


TWO = [[[1, 2], [3, 1]], [[0, 2], [0, 0]], [[0, 0], [0, 0]], [[2, 2], [2, 2]], [[3, 0], [0, 2]]]
FOUR = [
    [[1, 2, 0, 3], [0, 0, 0, 0], [4, 0, 1, 1], [2, 2, 2, 2]],  # a rank that sends nothing
    [[0, 0, 3, 0]] * 4,  # everything to one rank
    [[3] * 4] * 4,
    [[0] * 4] * 4,
]


@pytest.mark.parametrize("num_rows", TWO + FOUR, ids=str)
@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_exchange_rows(ranks: RankPool, num_rows: list[list[int]], shape: tuple[int, ...]) -> None:
    ranks.run(exchange, len(num_rows), num_rows, shape)


def gather_counts(rank: int) -> None:
    size = dist.get_world_size()
    counts = torch.arange(size * 6).view(size, 2, 3)
    assert torch.equal(all_gather_counts(counts[rank], world()), counts)
    assert torch.equal(all_gather_counts(counts[rank].mT, world()), counts.mT)
    assert torch.equal(all_gather_counts(torch.tensor(rank), world()), torch.arange(size))
    assert not all_gather_counts(torch.ones(2, requires_grad=True), world()).requires_grad


@SIZES
def test_all_gather_counts(ranks: RankPool, size: int) -> None:
    ranks.run(gather_counts, size)


def identities(rank: int) -> None:
    x = torch.randn(2, 3, 4, requires_grad=True)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("two", "one"))
    group = mesh.get_group("one")
    assert all_gather_sequence(x, group, 1) is x
    assert reduce_scatter_sequence(x, group, 1) is x
    assert all_reduce_sum(x, group) is x
    assert copy_to_group(x, group) is x
    assert exchange_rows(x, torch.tensor([[2], [2]]), group) is x
    assert exchange_rows(x, None, group) is x
    assert torch.equal(all_gather_counts(x, group), x[None])


def test_group_of_one_rank_is_the_identity(ranks: RankPool) -> None:
    ranks.run(identities, 2)


def refused(rank: int) -> None:
    x = torch.ones(2, 3)
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match=r"group must be a ProcessGroup .* got DeviceMesh"):
        all_reduce_sum(x, mesh)
    with pytest.raises(ValueError, match="2 ranks can't share the 3 positions of dim 1"):
        reduce_scatter_sequence(x, world(), 1)
    with pytest.raises(ValueError, match="3 rows can't be split equally over 2 ranks"):
        exchange_rows(torch.ones(3, 1), None, world())


def test_bad_input_is_refused_before_anything_is_sent(ranks: RankPool) -> None:
    ranks.run(refused, 2)


def exchange_counted(x_RD: Tensor, input_count: Tensor) -> Tensor:
    num_rows = all_gather_counts(input_count, world())
    output_count = num_rows[:, dist.get_rank()]
    splits_2P = torch.stack([input_count, output_count])
    return exchange_rows(x_RD * 2, splits_2P, world(), output_count.sum().item()).sin()


def exchange_equally(x_RD: Tensor) -> Tensor:
    return exchange_rows(x_RD * 2, None, world()).sin()


def gather_and_scatter(x_BLD: Tensor) -> Tensor:
    y_BLD = all_gather_sequence(x_BLD * 2, world(), 1).sin()
    return reduce_scatter_sequence(all_reduce_sum(y_BLD, world()), world(), 1)


def copy_and_count(x_BLD: Tensor) -> Tensor:
    count = all_gather_counts((x_BLD > 0).sum((0, 1)), world())
    return copy_to_group(x_BLD, world()) * count.sum()


def compare_compiled(function: Callable[..., Tensor], inputs: list[tuple[Tensor, ...]]) -> int:
    """Compare with eager, output and gradient; return how many graphs there are."""
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=graphs, fullgraph=True)
    for x, *others in inputs:
        results = []
        for variant in (compiled, function):
            leaf = x.clone().requires_grad_()
            y = variant(leaf, *others)
            y.sum().backward()
            results.append((y, leaf.grad))
        torch.testing.assert_close(*results)
    return graphs.frame_count


def compile_dense(rank: int, function: Callable[[Tensor], Tensor], shapes: list[tuple[int, ...]]) -> int:
    return compare_compiled(function, [(torch.randn(shape),) for shape in shapes])


def compile_exchange(rank: int) -> int:
    size = dist.get_world_size()
    rows_of_calls = [torch.randint(low, high, (size, size)) for low, high in ((2, 9), (1, 5), (3, 4), (0, 30))]
    inputs = [(torch.randn(int(n[rank].sum()), 3), n[rank].clone()) for n in rows_of_calls]
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        return compare_compiled(exchange_counted, inputs)


@pytest.mark.parametrize("size", slow_but([2], [2, 4]))
def test_exchange_compiles_to_one_graph_for_all_splits(ranks: RankPool, size: int) -> None:
    # The first graph takes the number of rows for fixed; the second serves any number.
    assert max(ranks.run(compile_exchange, size)) <= 2


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (exchange_equally, [(4, 3), (6, 3), (10, 3), (20, 3)]),
        (gather_and_scatter, [(2, length, 3) for length in (4, 5, 7, 12)]),
        (copy_and_count, [(2, length, 3) for length in (4, 5, 7, 12)]),
    ],
)
def test_sequence_collectives_compile_to_one_graph_for_all_lengths(
    ranks: RankPool, function: Callable[[Tensor], Tensor], shapes: list[tuple[int, ...]]
) -> None:
    assert max(ranks.run(compile_dense, 2, function, shapes)) <= 2
