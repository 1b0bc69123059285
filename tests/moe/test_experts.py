import copy

import pytest
import torch

from spurline import MoEConfig
from spurline.moe import experts as experts_module
from spurline.moe import telemetry
from spurline.moe.experts import Experts, choose_backend, loop_experts, register_experts_backend

BACKENDS = ["loop", "grouped_mm", "bmm", "stream"]


def make(backend: str = "auto", **changes: int) -> Experts:
    sizes = {"dim": 8, "hidden_dim": 16, "num_experts": 4, "top_k": 1} | changes
    torch.manual_seed(0)
    experts = Experts(MoEConfig(**sizes, experts_backend=backend))
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return experts


def plain(experts: Experts, rows_RD: torch.Tensor, counts: list[int]) -> torch.Tensor:
    parts = [
        (torch.nn.functional.silu(part @ w1.t()) * (part @ w3.t())) @ w2.t()
        for part, w1, w3, w2 in zip(rows_RD.split(counts), experts.w1_EFD, experts.w3_EFD, experts.w2_EDF, strict=True)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("backend", ["loop", "grouped_mm", "stream"])
def test_an_expert_without_rows_gets_a_zero_gradient(backend: str) -> None:
    experts = make(backend)
    experts(torch.randn(5, 8), torch.tensor([2, 0, 3, 0])).sum().backward()
    for p in experts.parameters():
        assert p.grad is not None
        assert (p.grad[[1, 3]] == 0).all()
        assert (p.grad[[0, 2]] != 0).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("as_list", [False, True])
def test_no_rows_at_all_still_back_propagates(backend: str, as_list: bool) -> None:
    experts = make(backend)
    rows = torch.randn(0, 8, requires_grad=True)
    counts = [0, 0, 0, 0]
    y = experts(rows, counts if as_list else torch.tensor(counts))
    y.sum().backward()
    assert y.shape == rows.grad.shape == (0, 8)
    assert all((p.grad == 0).all() and p.grad.shape == p.shape for p in experts.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts_as_a_list_and_as_a_tensor_agree(backend: str) -> None:
    experts, rows = make(backend), torch.randn(12, 8)
    assert torch.equal(experts(rows, [3, 3, 3, 3]), experts(rows, torch.tensor([3, 3, 3, 3])))


def test_counts_that_do_not_add_up_are_noticed() -> None:
    with pytest.raises(AssertionError, match="add up to 4, but there are 5 rows"):
        make("loop")(torch.randn(5, 8), [1, 1, 1, 1])


def test_bmm_refuses_unequal_counts() -> None:
    with pytest.raises(ValueError, match="same number of rows for every expert"):
        make("bmm")(torch.randn(5, 8), [2, 1, 1, 1])


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float64, 8), (torch.float32, 6)])
def test_grouped_mm_refuses_what_pytorch_cannot_take(dtype: torch.dtype, dim: int) -> None:
    with pytest.raises(ValueError, match="choose 'loop' or 'auto'"):
        make("grouped_mm", dim=dim).to(dtype)(torch.randn(4, dim, dtype=dtype), [1, 1, 1, 1])


def test_a_backend_of_ones_own() -> None:
    def silent(rows_RD, w1_eFD, w3_eFD, w2_eDF, rows_per_expert):  # type: ignore[no-untyped-def]
        return torch.zeros_like(rows_RD)

    register_experts_backend("silent", silent)
    assert (make("silent")(torch.randn(4, 8), [1, 1, 1, 1]) == 0).all()


class TestPackedWeights:
    """Without gradients and with equal counts, packed copies of the weights serve; never stale ones."""

    @pytest.fixture(autouse=True)
    def _counted(self):  # type: ignore[no-untyped-def]
        telemetry.reset()
        telemetry.enable()
        yield
        telemetry.enable(False)
        telemetry.reset()

    def check(self, experts: Experts, rows: torch.Tensor | None = None) -> None:
        rows = torch.randn(12, 8) if rows is None else rows
        before = telemetry.counters().get("experts.fused_weights", 0)
        with torch.no_grad():
            torch.testing.assert_close(experts(rows, [3, 3, 3, 3]), plain(experts, rows, [3, 3, 3, 3]))
        assert telemetry.counters()["experts.fused_weights"] == before + 1

    @pytest.mark.parametrize("backend", ["auto", "bmm"])
    def test_equals_the_plain_way_and_is_made_once(self, backend: str) -> None:
        experts = make(backend)
        self.check(experts)
        packed = experts.fused_weights._w13_eDX
        self.check(experts)
        assert experts.fused_weights._w13_eDX is packed

    @pytest.mark.parametrize("name", ["w1_EFD", "w3_EFD", "w2_EDF"])
    def test_an_edit_in_place_is_noticed(self, name: str) -> None:
        experts = make()
        self.check(experts)
        with torch.no_grad():
            getattr(experts, name)[1].mul_(-2)
        self.check(experts)

    @pytest.mark.parametrize("name", ["w1_EFD", "w3_EFD", "w2_EDF"])
    def test_a_new_tensor_is_noticed(self, name: str) -> None:
        experts = make()
        self.check(experts)
        for _ in range(5):  # a freed block is likely to be handed out again at the same address
            setattr(experts, name, torch.nn.Parameter(torch.randn_like(getattr(experts, name))))
            self.check(experts)

    def test_swapped_data_is_noticed(self) -> None:
        experts = make()
        self.check(experts)
        for _ in range(5):
            experts.w1_EFD.data = torch.randn_like(experts.w1_EFD)
            self.check(experts)

    def test_a_change_of_dtype_is_noticed(self) -> None:
        experts = make()
        self.check(experts)
        self.check(experts.double(), torch.randn(12, 8, dtype=torch.float64))
        self.check(experts.float())

    def test_loading_a_state_dict_is_noticed(self) -> None:
        experts = make()
        self.check(experts)
        experts.load_state_dict({name: -value for name, value in experts.state_dict().items()})
        self.check(experts)

    @pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"foreach": False}])
    def test_an_optimizer_step_is_noticed(self, how: dict[str, bool]) -> None:
        experts = make()
        optimizer = torch.optim.AdamW(experts.parameters(), lr=0.5, **how)
        self.check(experts)
        for p in experts.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        self.check(experts)

    def test_rows_of_another_dtype_get_weights_of_it(self) -> None:
        experts = make()
        self.check(experts)
        with torch.no_grad():
            y = experts(torch.randn(12, 8).bfloat16(), [3, 3, 3, 3])
        assert y.dtype == torch.bfloat16
        self.check(experts)

    def test_rows_that_are_not_contiguous(self) -> None:
        self.check(make(), torch.randn(8, 12).t())

    def test_weights_made_in_inference_mode_are_not_cached(self) -> None:
        with torch.inference_mode():
            experts = make()
            rows = torch.randn(12, 8)
            for _ in range(2):
                experts.w1_EFD.mul_(-1.5)
                torch.testing.assert_close(experts(rows, [3, 3, 3, 3]), plain(experts, rows, [3, 3, 3, 3]))

    def test_inference_mode_over_ordinary_weights(self) -> None:
        experts = make()
        with torch.inference_mode():
            self.check(experts)

    def test_unequal_and_zero_counts_take_the_ordinary_way(self) -> None:
        experts = make()
        with torch.no_grad():
            for counts in ([0, 0, 0, 0], [4, 4, 4, 3]):
                rows = torch.randn(sum(counts), 8)
                torch.testing.assert_close(experts(rows, counts), plain(experts, rows, counts))
        assert "experts.fused_weights" not in telemetry.counters()

    def test_a_forced_loop_stays_a_loop(self) -> None:
        with torch.no_grad():
            make("loop")(torch.randn(12, 8), [3, 3, 3, 3])
        assert telemetry.counters() == {"experts.loop": 1}

    def test_is_in_no_state_dict_and_no_copy(self) -> None:
        experts = make()
        self.check(experts)
        assert set(experts.state_dict()) == {"w1_EFD", "w3_EFD", "w2_EDF"}
        clone = copy.deepcopy(experts)
        with torch.no_grad():
            clone.w1_EFD.mul_(3)
        self.check(clone)
        self.check(experts)

    def test_is_freed_when_training_starts(self) -> None:
        experts = make().eval()
        self.check(experts)
        experts.train()
        assert experts.fused_weights._w13_eDX is None
        self.check(experts.eval())
        experts(torch.randn(12, 8), [3, 3, 3, 3])
        assert experts.fused_weights._w13_eDX is None
        assert experts.fused_weights._sources == ()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_backend_returns_a_view(backend):
    # FSDP, whose units experts may be, warns of modules that do.
    out_RD = make(backend)(torch.randn(12, 8), [3, 3, 3, 3])
    assert not out_RD._is_view()


@pytest.mark.parametrize(("dim", "hidden_dim"), [(16, 18), (18, 16)])
def test_a_device_without_a_grouped_matmul_for_these_widths_gets_the_loop(dim: int, hidden_dim: int) -> None:
    assert choose_backend(torch.empty(6, dim, device="meta"), hidden_dim, [1, 5]) is loop_experts
    chosen = choose_backend(torch.empty(6, 16, device="meta"), 16, [1, 5])
    assert chosen is experts_module.grouped_mm_experts


@pytest.mark.parametrize(("backend", "most", "packed"), [("auto", 3, True), ("auto", 2, False), ("bmm", 2, True)])
def test_weights_are_packed_for_few_rows_or_if_asked_for(monkeypatch, backend: str, most: int, packed: bool) -> None:
    monkeypatch.setattr(experts_module, "MOST_FUSED_ROWS", most)
    experts, rows_RD = make(backend), torch.randn(12, 8)
    telemetry.enable()
    telemetry.reset()
    try:
        with torch.no_grad():
            found = experts(rows_RD, [3, 3, 3, 3])
        assert ("experts.fused_weights" in telemetry.counters()) == packed
    finally:
        telemetry.enable(False)
    torch.testing.assert_close(found, plain(experts, rows_RD, [3, 3, 3, 3]).detach())
