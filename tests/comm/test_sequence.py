import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spurline.comm.sequence import HeadTailShard, SequenceShard

LENGTH = st.integers(0, 40)
SIZE = st.integers(1, 12)


def shards(length: int, size: int) -> list[SequenceShard]:
    return [SequenceShard(length, size, rank) for rank in range(size)]


@given(LENGTH, SIZE)
def test_shards_cover_the_sequence_in_order(length: int, size: int) -> None:
    x = torch.arange(length)
    assert torch.equal(torch.cat([s.shard(x, 0) for s in shards(length, size)]), x)
    assert [s.start for s in shards(length, size)][1:] == [s.stop for s in shards(length, size)][:-1]


@given(LENGTH, SIZE)
def test_counts_add_up(length: int, size: int) -> None:
    everyone = shards(length, size)
    assert {s.per_rank for s in everyone} == {-(-length // size)}
    assert all(s.num_real >= 0 and s.num_virtual >= 0 for s in everyone)
    assert all(s.num_real + s.num_virtual == s.per_rank for s in everyone)
    assert sum(s.num_real for s in everyone) == length
    assert sum(s.num_real + s.num_virtual for s in everyone) == everyone[0].padded_length


@given(LENGTH, SIZE)
def test_only_the_tail_is_virtual(length: int, size: int) -> None:
    everyone = shards(length, size)
    virtual = [i >= s.num_real for s in everyone for i in range(s.per_rank)]
    assert virtual == sorted(virtual)
    # The fewest positions a rank that could do: with one less, some would be left over.
    assert (everyone[0].per_rank - 1) * size < length or length == 0


@given(LENGTH, SIZE, st.integers(1, 3), st.sampled_from([0, 1, 2, -1, -2, -3]))
def test_padded_shards_trim_back_to_the_sequence(length: int, size: int, width: int, dim: int) -> None:
    x = torch.randn(width, length, width + 1).movedim(1, dim)
    padded = [s.pad(s.shard(x, dim), dim) for s in shards(length, size)]
    assert all(p.size(dim) == shards(length, size)[0].per_rank for p in padded)
    gathered = torch.cat(padded, dim)
    for s in shards(length, size):
        assert torch.equal(s.trim(gathered, dim), x)
    assert not gathered.narrow(dim, length, gathered.size(dim) - length).any()


def test_two_tokens_on_four_ranks() -> None:
    x_BLD = torch.randn(3, 2, 5)
    parts = [s.shard(x_BLD, 1) for s in shards(2, 4)]
    assert [p.shape[1] for p in parts] == [1, 1, 0, 0]
    assert [s.pad(p, 1).shape for s, p in zip(shards(2, 4), parts, strict=True)] == [(3, 1, 5)] * 4


def test_shard_is_a_view_and_what_needs_no_change_comes_back_itself() -> None:
    x_BLD = torch.randn(2, 6, 3)
    half = SequenceShard(6, 2, 1)
    assert half.shard(x_BLD, 1)._base is x_BLD
    assert half.trim(x_BLD, 1) is x_BLD
    own = half.shard(x_BLD, 1)
    assert half.pad(own, 1) is own
    alone = SequenceShard(6, 1, 0)
    assert alone.shard(x_BLD, 1) is alone.pad(x_BLD, 1) is alone.trim(x_BLD, 1) is x_BLD


def test_gradient_reaches_real_positions_only() -> None:
    shard = SequenceShard(5, 2, 1)
    x_BLD = torch.randn(2, 5, 3, requires_grad=True)
    weight = torch.randn(2, 3, 3)
    (shard.pad(shard.shard(x_BLD, 1), 1) * weight).sum().backward()
    expected = torch.zeros(2, 5, 3)
    expected[:, 3:] = weight[:, :2]
    torch.testing.assert_close(x_BLD.grad, expected)


def test_wrong_tensor_is_noticed() -> None:
    shard = SequenceShard(5, 2, 1)
    with pytest.raises(AssertionError, match="is not the length 5"):
        shard.shard(torch.ones(1, 6), 1)
    with pytest.raises(AssertionError, match="is not num_real 2"):
        shard.pad(torch.ones(1, 3), 1)
    with pytest.raises(AssertionError, match="is not 6"):
        shard.trim(torch.ones(1, 5), 1)
    with pytest.raises(AssertionError, match="rank 2 is not one of 2"):
        SequenceShard(5, 2, 2)


@pytest.mark.parametrize("rank", [0, 3])
def test_traces_in_one_graph_for_any_length(rank: int) -> None:
    def there_and_back(x_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shard = SequenceShard(x_BLD.size(1), 4, rank)
        own = shard.shard(x_BLD, 1)
        padded = shard.pad(own * 2, 1)
        return own, padded, shard.trim(torch.cat([padded] * 4, 1), 1)

    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def count_graphs(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(there_and_back, backend=count_graphs, fullgraph=True, dynamic=True)
    for length in range(8, 40):
        x_BLD = torch.randn(2, length, 3)
        for actual, expected in zip(compiled(x_BLD), there_and_back(x_BLD), strict=True):
            assert torch.equal(actual, expected)
    # One for lengths that 4 divides and one for the others; 0 and 1 real positions are special to the tracer.
    assert len(graphs) <= (2 if rank == 0 else 4)


def head_tail_shards(length: int, size: int, cut: int = 0) -> list[HeadTailShard]:
    """Of all ranks, for a sequence that was shortened by `cut` positions."""
    whole = [HeadTailShard(length + cut, size, rank) for rank in range(size)]
    return [shard.shortened(cut) for shard in whole] if cut else whole


@given(LENGTH, SIZE, st.integers(0, 5))
def test_head_and_tail_chunks_have_every_position_once_and_in_rising_order(length: int, size: int, cut: int) -> None:
    everyone = head_tail_shards(length, size, cut)
    positions = [shard.positions(torch.device("cpu")) for shard in everyone]
    assert sorted(torch.cat(positions).tolist()) == list(range(length))
    x = torch.arange(100, 100 + length)
    for shard, position_l in zip(everyone, positions, strict=True):
        assert len(position_l) == shard.num_real
        assert position_l.tolist() == sorted(position_l.tolist())
        assert torch.equal(shard.shard(x, 0), x[position_l])


@given(LENGTH, SIZE, st.integers(0, 5))
def test_padded_head_tail_shards_of_all_ranks_are_the_sequence_again(length: int, size: int, cut: int) -> None:
    x_2L3 = torch.randn(2, length, 3)
    everyone = head_tail_shards(length, size, cut)
    padded = [shard.pad(shard.shard(x_2L3, 1), 1) for shard in everyone]
    assert {part.shape[1] for part in padded} == {2 * everyone[0].per_chunk}
    for shard, part in zip(everyone, padded, strict=True):
        assert torch.equal(shard.in_order(torch.cat(padded, 1), 1), x_2L3)
        assert torch.equal(shard.by_rank(x_2L3, -2), torch.cat(padded, 1))
        assert torch.equal(shard.trim(part, 1), shard.shard(x_2L3, 1))


@given(st.integers(1, 50), st.integers(1, 16))
def test_every_rank_has_a_position_if_there_are_as_many(more: int, size: int) -> None:
    assert all(shard.num_real for shard in head_tail_shards(size + more - 1, size))


@given(st.integers(1, 8), SIZE)
def test_causal_work_is_the_same_on_all_ranks(per_chunk: int, size: int) -> None:
    work = [int(shard.positions(torch.device("cpu")).sum()) for shard in head_tail_shards(2 * size * per_chunk, size)]
    assert len(set(work)) == 1


def test_a_shortened_sequence_leaves_a_rank_the_first_of_its_positions() -> None:
    for shard in head_tail_shards(13, 3):
        kept = shard.shortened(4).positions(torch.device("cpu")).tolist()
        assert kept == [p for p in shard.positions(torch.device("cpu")).tolist() if p < 9]
