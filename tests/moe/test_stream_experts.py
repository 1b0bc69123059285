"""Experts streamed over chunks of rows: what they keep, what they reuse, and in which precision they multiply."""

import gc
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spurline import MoE, MoEConfig
from spurline.moe.kernels import choose
from spurline.moe.kernels.cpu import stream, workspace
from spurline.moe.kernels.cpu.buffers import POOL
from spurline.ops import skinny_matmul
from spurline.testing.equivalence import errors_between, layer_results, reference_results
from spurline.testing.params import slow_but

CONFIG = MoEConfig(dim=12, hidden_dim=20, num_experts=4, top_k=2, num_shared_experts=1, experts_backend="stream")


def make(dtype: torch.dtype = torch.float32, **changes: object) -> MoE:
    torch.manual_seed(0)
    return MoE(MoEConfig(**(vars(CONFIG) | changes)), init_std=0.4).to(dtype)


@pytest.fixture(autouse=True)
def _no_blocks_of_other_tests():
    gc.collect()
    POOL.release()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("joined_rows", slow_but([0, 5], [0, 5, 1000]))
@pytest.mark.parametrize("chunk", slow_but([3, 1000], [1, 3, 1000]))
@pytest.mark.parametrize("many", [2, 1000], ids=["grouped", "part by part"])
def test_chunks_of_any_size_equal_the_reference(
    monkeypatch, many: int, chunk: int, joined_rows: int, before: bool
) -> None:
    monkeypatch.setattr(workspace, "CHUNK", chunk)
    monkeypatch.setattr(workspace, "JOINED", joined_rows * 12)
    monkeypatch.setattr(choose, "MANY_PARTS", many)
    moe, x = make(score_before_experts=before), torch.randn(3, 9, 12)
    errors = errors_between(layer_results(moe, x), reference_results(moe, x))
    assert max(errors.values()) < 1e-5, errors


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    most_rows=st.integers(1, 50),
    whole_experts=st.booleans(),
)
def test_chunks_hold_every_row_once_and_in_order(counts: list[int], most_rows: int, whole_experts: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "CHUNK", 7)
        patch.setattr(workspace, "JOINED", most_rows * 12)
        made = workspace.make_chunks(counts, 12, whole_experts)
    experts = [part.expert for chunk in made for part in chunk.parts for _ in range(part.size)]
    assert experts == [expert for expert, count in enumerate(counts) for _ in range(count)]
    for chunk in made:
        assert chunk.size == sum(part.size for part in chunk.parts)
        assert chunk.size <= most_rows or len(chunk.parts) == 1
        assert (chunk.end_e is not None) == (len(chunk.parts) >= choose.MANY_PARTS)
        if chunk.end_e is not None:
            assert chunk.end_e[-1] == chunk.size
    parts = [part for chunk in made for part in chunk.parts]
    assert all(part.size <= 7 for part in parts) or whole_experts
    with_rows = [expert for expert, count in enumerate(counts) if count]
    assert [part.expert for part in parts if part.is_first] == with_rows
    assert [part.expert for part in parts if part.is_last] == with_rows
    if whole_experts:
        assert len(parts) == len(with_rows)


@pytest.mark.parametrize("hidden_dim", [20, 19], ids=["fits PyTorch's grouped matmul", "does not"])
def test_few_rows_for_many_experts_some_with_none(monkeypatch, hidden_dim: int) -> None:
    calls, grouped_mm = [], torch.nn.functional.grouped_mm
    monkeypatch.setattr(workspace.F, "grouped_mm", lambda *args, **kw: calls.append(1) or grouped_mm(*args, **kw))
    moe, x = make(num_experts=40, hidden_dim=hidden_dim), torch.randn(1, 14, 12)
    rows_E = moe.router(x[0]).count_E
    assert not rows_E[rows_E.nonzero()[0] :].all()
    errors = errors_between(layer_results(moe, x), reference_results(moe, x))
    assert max(errors.values()) < 1e-5, errors
    assert bool(calls) == (hidden_dim == 20)


@pytest.mark.parametrize("widest_pair", slow_but([0, 12], [0, 12, 1000]))  # alone, pairs into the expert, pairs
@pytest.mark.parametrize("num_few", slow_but([1, 3], [1, 2, 3, 8]))
@pytest.mark.parametrize("counts", [[1], [0, 1, 1, 0, 2, 1], [3, 1, 0, 1, 9, 2, 1, 4], [1, 20, 1], [0, 0]], ids=str)
def test_few_rows_are_multiplied_with_the_matrix_on_the_left(
    monkeypatch, counts: list[int], num_few: int, widest_pair: int
) -> None:
    turned, skinny_products = [], workspace._skinny_products
    monkeypatch.setattr(workspace, "_skinny_products", lambda *args: turned.append(1) or skinny_products(*args))
    monkeypatch.setattr(skinny_matmul, "LARGE", 1)
    monkeypatch.setattr(choose, "LARGE", 1)
    monkeypatch.setattr(skinny_matmul, "WIDEST_PAIR", widest_pair)
    for name in ("MOST_ROWS", "MOST_ROWS_ON_ONE_THREAD"):
        monkeypatch.setattr(skinny_matmul, name, num_few)
    num_rows = sum(counts)
    w1, w3, w2 = (0.3 * torch.randn(len(counts), *shape) for shape in ((20, 12), (20, 12), (12, 20)))
    x, base, weight = torch.randn(30, 12), torch.randn(30, 12), torch.rand(num_rows)
    token = torch.randint(30, (num_rows,))
    experts = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    for inputs in ((x, base, weight, token), (x[:num_rows], None, None, None)):
        rows = inputs[0] if inputs[3] is None else x[token]
        hidden = torch.nn.functional.silu(torch.einsum("sd,sfd->sf", rows, w1[experts]))
        hidden = hidden * torch.einsum("sd,sfd->sf", rows, w3[experts])
        expected = torch.einsum("sf,sdf->sd", hidden, w2[experts])
        if inputs[3] is not None:
            expected = base.index_add(0, token, expected * weight.unsqueeze(1))
        tokens, onto, weights, index = inputs
        found, _ = stream.stream_experts(tokens, w1, w3, w2, weights, onto, index, torch.tensor(counts), False, False)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    of_few = sum(0 < count <= num_few for count in counts)
    assert bool(turned) == (num_rows > 0 and 2 * of_few >= sum(count > 0 for count in counts))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 5, 16])
def test_a_decoding_layer_equals_the_reference(monkeypatch, num_tokens: int, threads: int) -> None:
    turned, skinny_products = [], workspace._skinny_products
    monkeypatch.setattr(workspace, "_skinny_products", lambda *args: turned.append(1) or skinny_products(*args))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        moe, x = make(dim=256, hidden_dim=256, num_experts=12), torch.randn(1, num_tokens, 256)
        errors = errors_between(layer_results(moe, x), reference_results(moe, x))
    finally:
        torch.set_num_threads(before)
    assert max(errors.values()) < 1e-5, errors
    assert turned


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor[..., :3]], dim=-1)[..., : tensor.shape[-1]]


def turned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT.contiguous().mT


@pytest.mark.parametrize("layout", [with_gaps, turned])
@pytest.mark.parametrize("large", [1, 1 << 16], ids=["few rows as columns", "rows"])
def test_many_experts_take_rows_weights_and_gradients_however_they_lie(monkeypatch, large: int, layout) -> None:
    moe = make(num_experts=16)
    count_e = torch.tensor([3, 0, 1, 2] * 4)
    dense = [torch.randn(24, 12), moe.experts.w1_EFD, moe.experts.w3_EFD, moe.experts.w2_EDF, torch.randn(24, 12)]

    def results(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        *inputs, grad = (tensor.detach() for tensor in tensors)
        for tensor in inputs:
            tensor.requires_grad_()
        y, _ = stream.stream_experts(*inputs, None, None, None, count_e, False, True)
        return [y, *torch.autograd.grad(y, inputs, grad)]

    laid_out = [layout(tensor) for tensor in dense]
    assert not any(tensor.is_contiguous() for tensor in laid_out)
    monkeypatch.setattr(skinny_matmul, "LARGE", 1 << 16)
    expected = results(dense)
    monkeypatch.setattr(skinny_matmul, "LARGE", large)
    for found, wanted in zip(results(laid_out), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_single_row_is_multiplied_with_its_neighbour(monkeypatch) -> None:
    monkeypatch.setattr(skinny_matmul, "LARGE", 1)
    monkeypatch.setattr(choose, "LARGE", 1)
    widths, mm = [], torch.mm
    monkeypatch.setattr(stream.torch, "mm", lambda a, b, **kw: widths.append(b.shape[1]) or mm(a, b, **kw))
    w1, w3, w2 = torch.randn(4, 20, 12), torch.randn(4, 20, 12), torch.randn(4, 12, 20)
    stream.stream_experts(torch.randn(5, 12), w1, w3, w2, None, None, None, torch.tensor([1, 2, 1, 1]), False, False)
    assert widths == [2, 2, 2, 1] * 3  # the last has none


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("joined_rows", [0, 1000])
@pytest.mark.parametrize("has_instructions", [False, True])
def test_bf16_is_as_close_to_the_truth_as_the_reference_in_bf16(
    monkeypatch, has_instructions: bool, joined_rows: int, before: bool
) -> None:
    monkeypatch.setattr(workspace, "JOINED", joined_rows * 12)
    monkeypatch.setattr(workspace, "cpu_multiplies_bfloat16", lambda: has_instructions)
    monkeypatch.setattr(workspace, "CHUNK", 5)
    moe = make(torch.bfloat16, score_before_experts=before)
    # Of one draw, either may be closer by chance: sum over several.
    errors: Counter[str] = Counter()
    of_reference: Counter[str] = Counter()
    for _ in range(8):
        x = torch.randn(5, 11, 12, dtype=torch.bfloat16)
        exact = reference_results(moe, x, torch.float64)
        errors.update(errors_between(layer_results(moe, x), exact))
        of_reference.update(errors_between(reference_results(moe, x), exact))
    assert max(errors.values()) < 8 * 2e-2, errors
    expert_results = [name for name in errors if "experts.w" in name or name in ("y", "x")]
    assert expert_results
    for name in expert_results:
        assert errors[name] < 1.1 * of_reference[name], (name, errors, of_reference)


def test_fp32_weights_meet_bf16_rows_unrounded(monkeypatch) -> None:
    monkeypatch.setattr(workspace, "cpu_multiplies_bfloat16", lambda: False)
    moe, x = make(num_shared_experts=0), torch.randn(40, 12).bfloat16()
    y, exact = moe(x).float(), moe(x.float())
    # Half a unit in the last of eight bits: only the result was rounded.
    assert ((y - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
    moe(x).sum().backward()
    assert moe.experts.w1_EFD.grad.dtype == torch.float32


def test_only_what_stands_before_the_activation_is_kept_for_backward() -> None:
    moe, x = make(num_shared_experts=0), torch.randn(64, 12, requires_grad=True)
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        moe(x)
    weights = {p.untyped_storage().data_ptr() for p in moe.parameters()} | {x.untyped_storage().data_ptr()}
    num_rows, small = 64 * 2, 64 * 4 * 4 * 8  # what the router keeps: a few tensors of (tokens, experts)
    assert sum(size for data, size in kept.items() if data not in weights) <= num_rows * 2 * 20 * 4 + small


def test_without_gradients_nothing_is_kept() -> None:
    moe, x = make(), torch.randn(6, 12)
    with torch.no_grad():
        y = moe(x)
    assert not y.requires_grad
    assert torch.equal(y, moe(x))


@pytest.mark.parametrize("frozen", [("w1_EFD",), ("w1_EFD", "w3_EFD", "w2_EDF")])
def test_frozen_weights_get_no_gradient_and_the_others_do(frozen: tuple[str, ...]) -> None:
    moe, other, x = make(), make(), torch.randn(6, 12, requires_grad=True)
    for name in frozen:
        getattr(moe.experts, name).requires_grad_(False)
    moe(x).square().sum().backward()
    dx, x.grad = x.grad, None
    other(x).square().sum().backward()
    assert torch.equal(dx, x.grad)
    for name, parameter in moe.experts.named_parameters():
        expected = getattr(other.experts, name).grad
        assert parameter.grad is None if name in frozen else torch.equal(parameter.grad, expected)


def test_a_weight_gradient_takes_the_memory_of_the_step_before() -> None:
    moe = make(dim=128, hidden_dim=512)  # a megabyte of weights in each matrix
    x = torch.randn(32, 128)

    def step() -> list[int]:
        moe(x).square().sum().backward()
        places = sorted(p.grad.untyped_storage().data_ptr() for p in moe.experts.parameters())
        moe.zero_grad()
        return places

    first = step()
    assert len(set(first)) == 3
    assert step() == first, "gradients were copied or freshly allocated"


def test_memory_in_use_is_never_handed_out_again() -> None:
    like = torch.empty(0)
    kept = [POOL.empty((512, 1024), like).fill_(number) for number in range(3)]
    view = POOL.empty((512, 1024), like).fill_(7.0)[100:200]
    gc.collect()
    others = [POOL.empty((512, 1024), like).fill_(-1.0) for _ in range(3)]
    assert all((tensor == number).all() for number, tensor in enumerate(kept))
    assert (view == 7).all()
    assert len({t.untyped_storage().data_ptr() for t in (*kept, view, *others)}) == 7


def test_memory_comes_back_in_any_dtype_and_aligned() -> None:
    first = POOL.empty((1 << 19,), torch.empty(0), torch.float64)
    place = first.data_ptr()
    assert place % 64 == 0
    del first
    again = POOL.empty((1 << 21,), torch.empty(0), torch.bfloat16)
    assert (again.data_ptr(), again.dtype, again.shape) == (place, torch.bfloat16, (1 << 21,))


def test_unused_memory_is_bounded_and_can_be_released(monkeypatch) -> None:
    monkeypatch.setattr(POOL, "limit", 5 << 20)
    del (tensors := [POOL.empty((2 << 20,), torch.empty(0), torch.uint8) for _ in range(4)])[:]
    del tensors
    assert 0 < POOL.unused_bytes <= 5 << 20
    POOL.release()
    assert POOL.unused_bytes == 0
