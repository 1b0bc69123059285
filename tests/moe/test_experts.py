import copy
import pickle

import pytest
import torch

from spurline import MoEConfig
from spurline.moe import Experts, RowCounts, Rows, register_experts_backend, telemetry
from spurline.moe.experts.swiglu import SwiGLUExperts
from spurline.moe.kernels import bmm
from spurline.moe.kernels.choose import choose_kernel, verdicts
from spurline.moe.kernels.kernel import Work

BACKENDS = ["loop", "grouped_mm", "bmm", "stream"]


def make(backend: str = "auto", **changes: int) -> Experts:
    sizes = {"dim": 8, "hidden_dim": 16, "num_experts": 4, "top_k": 1} | changes
    torch.manual_seed(0)
    experts = SwiGLUExperts(MoEConfig(**sizes, experts_backend=backend))
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return experts


def run(experts: Experts, rows_RD: torch.Tensor, counts: torch.Tensor | list[int]) -> torch.Tensor:
    """The experts on rows that lie in the order of experts."""
    on_host = counts if isinstance(counts, list) else None
    return experts(Rows(rows_RD, RowCounts(torch.as_tensor(counts), on_host))).x


def plain(experts: Experts, rows_RD: torch.Tensor, counts: list[int]) -> torch.Tensor:
    parts = [
        (torch.nn.functional.silu(part @ w1.t()) * (part @ w3.t())) @ w2.t()
        for part, w1, w3, w2 in zip(rows_RD.split(counts), experts.w1_EFD, experts.w3_EFD, experts.w2_EDF, strict=True)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("backend", ["loop", "grouped_mm", "stream"])
def test_an_expert_without_rows_gets_a_zero_gradient(backend: str) -> None:
    experts = make(backend)
    run(experts, torch.randn(5, 8), torch.tensor([2, 0, 3, 0])).sum().backward()
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
    if backend == "bmm" and not as_list:
        with pytest.raises(ValueError, match="known on the host"):
            run(experts, rows, torch.tensor(counts))
        return
    y = run(experts, rows, counts if as_list else torch.tensor(counts))
    y.sum().backward()
    assert y.shape == rows.grad.shape == (0, 8)
    assert all((p.grad == 0).all() and p.grad.shape == p.shape for p in experts.parameters())


@pytest.mark.parametrize("backend", ["loop", "grouped_mm", "stream"])
def test_counts_as_a_list_and_as_a_tensor_agree(backend: str) -> None:
    experts, rows = make(backend), torch.randn(12, 8)
    assert torch.equal(run(experts, rows, [3, 3, 3, 3]), run(experts, rows, torch.tensor([3, 3, 3, 3])))


def test_counts_that_do_not_add_up_are_noticed() -> None:
    with pytest.raises(AssertionError, match="add up to 4, but there are 5 rows"):
        run(make("loop"), torch.randn(5, 8), [1, 1, 1, 1])


def test_bmm_refuses_unequal_counts() -> None:
    with pytest.raises(ValueError, match="same number of rows for every expert"):
        run(make("bmm"), torch.randn(5, 8), [2, 1, 1, 1])


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float64, 8), (torch.float32, 6)])
def test_grouped_mm_refuses_what_pytorch_cannot_take(dtype: torch.dtype, dim: int) -> None:
    with pytest.raises(ValueError, match="choose 'loop' or 'auto'"):
        run(make("grouped_mm", dim=dim).to(dtype), torch.randn(4, dim, dtype=dtype), [1, 1, 1, 1])


def test_a_backend_of_ones_own() -> None:
    def silent(rows_RD, w1_eFD, w3_eFD, w2_eDF, rows_per_expert):  # type: ignore[no-untyped-def]
        return torch.zeros_like(rows_RD)

    register_experts_backend("silent", silent)
    assert (run(make("silent"), torch.randn(4, 8), [1, 1, 1, 1]) == 0).all()


class TestFusedWeights:
    """Without gradients and with equal counts, fused copies of the weights serve; never stale ones."""

    @pytest.fixture(autouse=True)
    def _counted(self):  # type: ignore[no-untyped-def]
        telemetry.reset()
        telemetry.enable()
        yield
        telemetry.enable(False)
        telemetry.reset()

    def check(self, experts: Experts, rows: torch.Tensor | None = None) -> None:
        rows = torch.randn(12, 8) if rows is None else rows
        before = served()
        with torch.no_grad():
            torch.testing.assert_close(run(experts, rows, [3, 3, 3, 3]), plain(experts, rows, [3, 3, 3, 3]))
        assert served() == before + 1

    @pytest.mark.parametrize("backend", ["auto", "bmm"])
    def test_equals_the_plain_way_and_is_made_once(self, backend: str) -> None:
        experts = make(backend)
        self.check(experts)
        self.check(experts)
        assert telemetry.counters()["fused_weights.misses"] == telemetry.counters()["fused_weights.hits"] == 1

    @pytest.mark.parametrize("name", ["w1_EFD", "w3_EFD", "w2_EDF"])
    def test_an_edit_in_place_is_noticed(self, name: str) -> None:
        experts = make()
        self.check(experts)
        with torch.no_grad():
            getattr(experts, name)[1].mul_(-2)
        self.check(experts)

    def test_copies_and_pickles_are_without_them(self) -> None:
        experts = make()
        size_before = len(pickle.dumps(experts))
        self.check(experts)
        assert len(pickle.dumps(experts)) == size_before
        for copied in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
            assert copied.fused_weights.key is None
            with torch.no_grad():
                copied.w1_EFD.mul_(2)
            self.check(copied)
        self.check(experts)
        assert telemetry.counters()["fused_weights.hits"] == 1  # the original's

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
            y = run(experts, torch.randn(12, 8).bfloat16(), [3, 3, 3, 3])
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
                torch.testing.assert_close(run(experts, rows, [3, 3, 3, 3]), plain(experts, rows, [3, 3, 3, 3]))

    def test_inference_mode_over_ordinary_weights(self) -> None:
        experts = make()
        with torch.inference_mode():
            self.check(experts)

    def test_unequal_and_zero_counts_take_the_ordinary_way(self) -> None:
        experts = make()
        with torch.no_grad():
            for counts in ([0, 0, 0, 0], [4, 4, 4, 3]):
                rows = torch.randn(sum(counts), 8)
                torch.testing.assert_close(run(experts, rows, counts), plain(experts, rows, counts))
        assert not served()

    def test_a_forced_loop_stays_a_loop(self) -> None:
        with torch.no_grad():
            run(make("loop"), torch.randn(12, 8), [3, 3, 3, 3])
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
        assert experts.fused_weights.key is None
        self.check(experts.eval())
        run(experts, torch.randn(12, 8), [3, 3, 3, 3])
        assert experts.fused_weights.key is None
        assert experts.fused_weights._sources == ()
        assert experts.fused_weights._fused is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_backend_returns_a_view(backend):
    # FSDP, whose units experts may be, warns of modules that do.
    out_RD = run(make(backend), torch.randn(12, 8), [3, 3, 3, 3])
    assert not out_RD._is_view()


def work(**changes: object) -> Work:
    return Work(
        **({"experts": "swiglu", "device": "meta", "dtype": torch.float32, "width": 16, "hidden": 16} | changes)
    )


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, "grouped_mm"),
        ({"width": 18}, "loop"),
        ({"hidden": 18}, "loop"),
        ({"dtype": torch.float64}, "loop"),
        ({"equal_rows": 3}, "bmm"),
        ({"device": "cpu"}, "stream"),
        ({"device": "cpu", "equal_rows": 3}, "stream"),
        ({"device": "cpu", "equal_rows": 3, "grad": False}, "bmm"),
        ({"device": "cpu", "equal_rows": 0, "grad": False}, "stream"),
        ({"device": "cpu", "equal_rows": bmm.MOST_FUSED_ROWS + 1, "grad": False}, "stream"),
        ({"device": "cpu", "equal_rows": 3, "grad": False, "cacheable": False}, "stream"),
        ({"device": "cpu", "experts": "of one's own"}, "loop"),
    ],
    ids=str,
)
def test_the_kernel_that_auto_chooses(changes: dict[str, object], chosen: str) -> None:
    assert choose_kernel(work(**changes)).name == chosen
    found = verdicts(work(**changes))
    assert next(iter(found)) == chosen
    assert all(verdict.why for verdict in found.values())


@pytest.mark.parametrize(
    ("backend", "changes", "why"),
    [
        ("stream", {}, "runs on CPUs, not on meta"),
        ("stream", {"device": "cpu", "experts": "mine"}, "computes SwiGLU experts, not 'mine' ones"),
        ("bmm", {}, "needs the same number of rows for every expert"),
        ("grouped_mm", {"width": 18}, "multiples of 16 bytes, not torch.float32 with dim 18"),
    ],
)
def test_a_kernel_that_can_not_do_the_work_says_why(backend: str, changes: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=f"experts_backend '{backend}' .*{why}.*: choose 'loop' or 'auto'"):
        choose_kernel(work(**changes), backend)


@pytest.mark.parametrize(("backend", "most", "fused"), [("auto", 3, True), ("auto", 2, False), ("bmm", 2, True)])
def test_weights_are_fused_for_few_rows_or_if_asked_for(monkeypatch, backend: str, most: int, fused: bool) -> None:
    monkeypatch.setattr(bmm, "MOST_FUSED_ROWS", most)
    choose_kernel.__globals__["_choose"].cache_clear()
    experts, rows_RD = make(backend), torch.randn(12, 8)
    telemetry.enable()
    telemetry.reset()
    try:
        with torch.no_grad():
            found = run(experts, rows_RD, [3, 3, 3, 3])
        assert bool(served()) == fused
    finally:
        telemetry.enable(False)
        choose_kernel.__globals__["_choose"].cache_clear()
    torch.testing.assert_close(found, plain(experts, rows_RD, [3, 3, 3, 3]).detach())


def served() -> int:
    """How often fused weights were used."""
    return sum(amount for path, amount in telemetry.counters().items() if path.startswith("fused_weights."))
