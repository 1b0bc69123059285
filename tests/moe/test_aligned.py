"""Rows of each expert padded to a multiple: the arithmetic, and a layer on one device against the reference."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spurline import MoE, MoEConfig, accelerator
from spurline.moe import telemetry
from spurline.moe.dispatch.aligned import AlignedPermutation, align_counts, most_places, round_up
from spurline.moe.dispatch.permute import SegmentPermutation, UniformPermutation
from spurline.moe.rows import RowCounts
from spurline.testing.equivalence import errors_between, layer_results, reference_results

CONFIG = MoEConfig(dim=8, hidden_dim=12, num_experts=6, top_k=2, num_shared_experts=1, row_multiple=4)

counts_of_segments = st.integers(1, 4).flatmap(
    lambda e: st.lists(st.lists(st.integers(0, 9), min_size=e, max_size=e), min_size=1, max_size=4)
)


def sentinel_layout(count_Pe: list[list[int]], multiple: int) -> tuple[list[int], list[int]]:
    """Plain re-derivation: for each place its row, or the number of rows; and the places of each expert.

    Rows lie rank after rank, from each rank expert after expert.
    """
    num_rows = sum(map(sum, count_Pe))
    places, of_expert = [], []
    for expert in range(len(count_Pe[0])):
        mine, row = [], 0
        for counts in count_Pe:
            for other, count in enumerate(counts):
                if other == expert:
                    mine += range(row, row + count)
                row += count
        while len(mine) % multiple:
            mine.append(num_rows)
        places += mine
        of_expert.append(len(mine))
    return places, of_expert


def aligned(count_Pe: list[list[int]], multiple: int) -> tuple[AlignedPermutation, RowCounts]:
    segments = torch.tensor(count_Pe)
    counts = RowCounts(segments.sum(0), segments.sum(0).tolist())
    places, num_places = align_counts(counts, multiple)
    permutation = SegmentPermutation.make(segments, int(segments.sum()))
    return AlignedPermutation.around(permutation, counts, places, num_places), places


@given(counts_of_segments, st.sampled_from([1, 2, 3, 8, 32]))
def test_the_layout_is_that_of_a_sentinel_row(count_Pe: list[list[int]], multiple: int) -> None:
    check_layout(count_Pe, multiple)


@pytest.mark.parametrize(
    ("count_Pe", "multiple"),
    [
        ([[0, 0, 0]], 4),  # no rows at all
        ([[0, 0], [0, 0]], 1),
        ([[0, 7, 0], [0, 9, 0]], 8),  # one expert has everything
        ([[3, 1], [2, 5]], 1),  # multiples of 1: nothing to pad
        ([[4, 8], [4, 0]], 8),  # counts exactly at the multiple
        ([[1], [1]], 32),
    ],
)
def test_the_edges_of_the_layout(count_Pe: list[list[int]], multiple: int) -> None:
    check_layout(count_Pe, multiple)


def check_layout(count_Pe: list[list[int]], multiple: int) -> None:
    permutation, places = aligned(count_Pe, multiple)
    expected, of_expert = sentinel_layout(count_Pe, multiple)
    assert permutation.num_places == len(expected)
    assert permutation.place_R.tolist() == [expected.index(row) for row in range(sum(map(sum, count_Pe)))]
    assert places.count_e.tolist() == places.host_e == of_expert

    # The published behavior: a row of zeros is put behind the rows, the index applied, and the way back writes by it.
    R = sum(map(sum, count_Pe))
    rows_RD = torch.arange(1.0, 2 * R + 1).view(R, 2).requires_grad_()
    with_zeros = torch.cat([rows_RD.detach(), torch.zeros(1, 2)])
    padded_AD = permutation.forward(rows_RD)
    assert torch.equal(padded_AD, with_zeros[expected])
    out_AD = torch.randn(len(expected), 2, requires_grad=True)
    back = torch.empty(R + 1, 2)
    back[expected] = out_AD.detach()
    assert torch.equal(permutation.inverse(out_AD), back[:-1])
    assert torch.equal(permutation.inverse(padded_AD), rows_RD)

    # Gradients go the same ways: none reaches a place that holds the sentinel.
    (grad_RD,) = torch.autograd.grad(padded_AD, rows_RD, out_AD.detach())
    assert torch.equal(grad_RD, back[:-1])
    (grad_AD,) = torch.autograd.grad(permutation.inverse(out_AD), out_AD, rows_RD.detach())
    assert torch.equal(grad_AD, with_zeros[expected])


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.sampled_from([1, 2, 7, 16]))
def test_places_that_are_enough_whoever_has_the_rows(counts: list[int], multiple: int) -> None:
    enough = most_places(sum(counts), len(counts), multiple)
    needed = [round_up(count, multiple) for count in counts]
    assert sum(needed) <= enough < sum(counts) + len(counts) * multiple + 1
    places, num_places = align_counts(RowCounts(torch.tensor(counts)), multiple, enough)  # only a device knows them
    assert (places.host_e, num_places) == (None, enough)
    assert places.count_e.tolist() == [*needed[:-1], needed[-1] + enough - sum(needed)]
    assert (places.count_e % multiple == 0).all()


def test_a_view_of_rank_major_rows_is_refused() -> None:
    counts = RowCounts(torch.tensor([4, 4]), [4, 4])
    with pytest.raises(ValueError, match="UniformPermutation, which is a view of rank-major rows and has no index"):
        AlignedPermutation.around(UniformPermutation(2, 2), counts, counts, 8)
    index_R = torch.arange(8)
    for index, inverse in ((index_R.view(2, 4), index_R.view(2, 4)), (index_R, index_R[:4])):
        with pytest.raises(ValueError, match="an index of one dimension and its inverse"):
            AlignedPermutation.around(SegmentPermutation(index, inverse), counts, counts, 8)


def make_layer(**changes: object) -> MoE:
    torch.manual_seed(0)
    moe = MoE(dataclasses.replace(CONFIG, **changes), init_std=0.4)
    moe.router.expert_bias_E.uniform_(-0.2, 0.2)
    return moe


@pytest.mark.parametrize("backend", ["stream", "loop", "grouped_mm"])
@pytest.mark.parametrize("changes", [{}, {"score_before_experts": True}, {"num_shared_experts": 0}], ids=str)
def test_a_layer_equals_the_reference(backend: str, changes: dict[str, object]) -> None:
    for tokens in (0, 1, 13):
        moe, x = make_layer(experts_backend=backend, **changes), torch.randn(tokens, 8)
        errors = errors_between(layer_results(moe, x), reference_results(moe, x))
        assert max(errors.values()) < 1e-5, errors


def test_a_layer_on_an_accelerator_equals_the_reference_with_the_places_that_are_enough() -> None:
    moe, x = make_layer(experts_backend="grouped_mm"), torch.randn(13, 8)
    with accelerator.cpu_stands_in_for("xpu"):
        plan = moe.dispatcher.plan(moe.router(x))
        rows = plan.dispatch(x)
        assert rows.counts.host_e is None
        assert rows.x.shape[0] == most_places(26, 6, 4)
        assert max(errors_between(layer_results(moe, x), reference_results(moe, x)).values()) < 1e-5


def test_experts_see_multiples_and_padding_is_counted() -> None:
    moe, x = make_layer(), torch.randn(13, 8)
    telemetry.reset()
    telemetry.enable()
    try:
        rows = moe.dispatcher.plan(moe.router(x)).dispatch(x)
    finally:
        telemetry.enable(False)
    assert all(count % 4 == 0 for count in rows.counts.host_e)
    padding = sum(rows.counts.host_e) - 26
    assert padding > 0
    assert telemetry.counters()["permute.aligned.padding_rows"] == padding
    assert telemetry.counters()["permute.aligned"] == 1
    assert int((rows.x == 0).all(1).sum()) == padding


def test_padding_reaches_no_gradient_even_through_biases() -> None:
    """With biases, experts make something of the sentinel; nobody may learn from it."""
    gradients = []
    for multiple in (1, 8):
        moe = make_layer(row_multiple=multiple, experts="clamped_swiglu", num_shared_experts=0, experts_backend="loop")
        with torch.no_grad():
            for name, parameter in moe.experts.named_parameters():
                if parameter.dim() == 2:
                    parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
                assert name
        gradients.append(layer_results(moe, torch.randn(13, 8, generator=torch.Generator().manual_seed(1))))
    errors = errors_between(gradients[1], gradients[0])
    assert max(errors.values()) < 1e-6, errors


def test_a_compiled_layer_is_one_graph_for_any_routing() -> None:
    moe = make_layer(experts_backend="loop")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = torch.compile(moe, fullgraph=True, backend="aot_eager")
    for seed in range(4):
        x: Tensor = torch.randn(13, 8, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(run(x), moe(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_multiple_must_be_positive() -> None:
    with pytest.raises(ValueError, match="row_multiple must be positive, got 0"):
        MoE(dataclasses.replace(CONFIG, row_multiple=0))
