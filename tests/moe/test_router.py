import dataclasses

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from spurline import MoE, MoEConfig
from spurline.moe import Router
from spurline.moe.reference import reference_choice, reference_scores

CONFIG = MoEConfig(dim=6, hidden_dim=8, num_experts=8, top_k=3)


def make(**changes: object) -> Router:
    torch.manual_seed(0)
    return MoE(dataclasses.replace(CONFIG, **changes), init_std=0.5).router


def test_ties_go_to_the_lower_expert() -> None:
    router = make(num_experts=64, top_k=5)
    router.gate_ED.data.zero_()
    assert router(torch.randn(40, 6)).expert_TK.tolist() == [[0, 1, 2, 3, 4]] * 40


def test_tied_groups_go_to_the_lower_group() -> None:
    router = make(num_groups=4, num_limited_groups=2)
    router.gate_ED.data.zero_()
    assert router(torch.randn(9, 6)).expert_TK.tolist() == [[0, 1, 2]] * 9


def test_bias_selects_but_does_not_weigh() -> None:
    router = make(score_func="sigmoid")
    x_TD = torch.randn(20, 6)
    score_TE = torch.sigmoid(x_TD @ router.gate_ED.t())
    router.expert_bias_E[5] = 10.0
    routing = router(x_TD)
    assert (routing.expert_TK[:, 0] == 5).all()
    torch.testing.assert_close(routing.weight_TK, score_TE.gather(1, routing.expert_TK))


def test_bias_gets_no_gradient_and_is_saved() -> None:
    router = make()
    assert not router.expert_bias_E.requires_grad
    assert set(router.state_dict()) == {"gate_ED", "expert_bias_E"}


@pytest.mark.parametrize("limited", [1, 2, 3])
def test_only_the_best_groups_are_eligible(limited: int) -> None:
    router = make(num_experts=12, num_groups=4, num_limited_groups=limited)
    router.expert_bias_E.uniform_(-1, 1)
    x_TD = torch.randn(50, 6)
    weights = {"router.gate_ED": router.gate_ED}
    score_TE = reference_scores(x_TD, weights, router.config)[1]
    expected = [reference_choice(score_TE[t], t, router.expert_bias_E, router.config) for t in range(50)]
    chosen_TK = router(x_TD).expert_TK
    assert chosen_TK.tolist() == expected
    assert all(len(set(row)) <= limited for row in (chosen_TK // 3).tolist())


def test_negative_bias_never_lets_a_closed_group_in() -> None:
    router = make(num_groups=2, num_limited_groups=1, top_k=4)
    router.expert_bias_E.fill_(-50.0)
    assert all(len(set(row)) == 1 for row in (router(torch.randn(30, 6)).expert_TK // 4).tolist())


@pytest.mark.parametrize("tokens", [0, 1, 5, 8, 13])
def test_forced_balance_counts_are_known_without_counting(tokens: int) -> None:
    router = make(force_load_balance=True)
    routing = router(torch.randn(tokens, 6))
    counted = torch.bincount(routing.expert_TK.flatten(), minlength=8)
    assert routing.expert_TK.flatten().tolist() == [i % 8 for i in range(tokens * 3)]
    assert routing.count_E.tolist() == routing.host_count_E == counted.tolist()
    assert sum(c > tokens * 3 // 8 for c in routing.host_count_E) == tokens * 3 % 8


def test_route_norm_then_scale() -> None:
    routing = make(route_norm=True, route_scale=2.5, score_func="sigmoid")(torch.randn(10, 6))
    torch.testing.assert_close(routing.weight_TK.sum(-1), torch.full((10,), 2.5))


def test_gate_runs_in_fp32_in_a_bf16_model() -> None:
    router = make().bfloat16()
    x_TD = torch.randn(200, 6).bfloat16()
    routing = router(x_TD)
    exact = (x_TD.float() @ router.gate_ED.float().t()).softmax(-1)
    assert routing.weight_TK.dtype == torch.float32
    torch.testing.assert_close(routing.weight_TK, exact.gather(1, routing.expert_TK), rtol=1e-6, atol=1e-6)


def test_accumulators_survive_a_change_of_dtype() -> None:
    router = make()
    router.expert_bias_E.fill_(1.001)
    router = router.bfloat16().to("cpu")
    assert router.expert_bias_E.dtype == torch.float32
    assert router.expert_bias_E[0] == torch.tensor(1.001)
    assert router.gate_ED.dtype == torch.bfloat16


def test_each_training_micro_batch_counts_once() -> None:
    moe = MoE(CONFIG)
    x = torch.randn(2, 5, 6)
    for _ in range(3):
        moe(x).sum().backward()
    assert moe.router.row_count_E.sum() == 3 * 10 * 3


def test_evaluation_does_not_count() -> None:
    moe = MoE(CONFIG)
    with torch.no_grad():
        moe(torch.randn(4, 6))
    moe.eval()(torch.randn(4, 6))
    assert moe.router.row_count_E.sum() == 0


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_counts_every_micro_batch_once(compiled: bool, reentrant: bool) -> None:
    moe = MoE(dataclasses.replace(CONFIG, aux_loss="batch"))
    run = torch.compile(moe, fullgraph=True, backend="aot_eager") if compiled else moe
    x = torch.randn(7, 6, requires_grad=True)
    run(x)
    rows_E, loss = moe.router.row_count_E.clone(), moe.router.balance_loss.clone()
    assert rows_E.sum() == 7 * 3
    moe.router.init_buffers()
    # Two forwards before the first backward, as in a pipeline; with an evaluation in between.
    both = [checkpoint(run, x, use_reentrant=reentrant) for _ in range(2)]
    with torch.no_grad():
        moe.eval()(x)
    moe.train()
    for y in both:
        y.sum().backward()
    assert torch.equal(moe.router.row_count_E, 2 * rows_E)
    torch.testing.assert_close(moe.router.balance_loss, 2 * loss)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k": 9}, "top_k 9 is larger than num_experts 8"),
        ({"num_groups": 3, "num_limited_groups": 1}, "num_groups 3 does not divide num_experts 8"),
        ({"num_groups": 8, "num_limited_groups": 1}, "leaves 1 expert a group"),
        ({"num_groups": 4}, "needs num_limited_groups"),
        ({"num_groups": 4, "num_limited_groups": 5}, "between 1 and num_groups 4"),
        ({"num_groups": 4, "num_limited_groups": 1}, "top_k 3 is larger than the 2 experts that stay eligible"),
        ({"num_limited_groups": 2}, "needs num_groups above 1"),
        ({"dim": 0}, "dim must be positive"),
        ({"score_func": "tanh"}, "score_func must be one of"),
        ({"dispatcher": "pigeon"}, "dispatcher 'pigeon' is not known"),
        ({"experts_backend": "abacus"}, "experts_backend 'abacus' is not known"),
    ],
)
def test_impossible_layers_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MoE(dataclasses.replace(CONFIG, **changes))


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"dim must be positive.*top_k must be positive"):
        MoE(dataclasses.replace(CONFIG, dim=-1, top_k=0))
