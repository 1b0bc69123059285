import pytest
import torch

from spurline import MoE, MoEConfig
from spurline.moe import update_expert_bias
from spurline.moe.balance import set_token_weight, take_balance_loss
from spurline.moe.reference import reference_balance_loss


def make(**changes: object) -> MoE:
    torch.manual_seed(0)
    config = MoEConfig(**({"dim": 6, "hidden_dim": 8, "num_experts": 4, "top_k": 2} | changes))
    return MoE(config, init_std=0.5)


def tensors(moe: MoE) -> dict[str, torch.Tensor]:
    return dict(moe.named_parameters()) | dict(moe.named_buffers())


@pytest.mark.parametrize("aux_loss", ["none", "batch", "sequence"])
@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
def test_recorded_loss_equals_the_reference(aux_loss: str, score_func: str) -> None:
    moe = make(aux_loss=aux_loss, score_func=score_func, z_loss_weight=0.1)
    x = torch.randn(3, 5, 6)
    moe(x)
    torch.testing.assert_close(take_balance_loss(moe), reference_balance_loss(x, tensors(moe), moe.config).detach())
    assert take_balance_loss(moe) == 0


def test_an_even_router_has_loss_one_and_a_collapsed_one_has_loss_e() -> None:
    moe = make(aux_loss="batch", aux_loss_weight=1.0, top_k=1, force_load_balance=True)
    moe.router.gate_ED.data.zero_()
    moe(torch.randn(8, 6))
    assert take_balance_loss(moe).item() == pytest.approx(1.0)
    moe = make(aux_loss="batch", aux_loss_weight=1.0, top_k=1)
    moe.router.gate_ED.data.zero_()[2] = 50.0
    moe(torch.rand(8, 6) + 1)
    assert take_balance_loss(moe).item() == pytest.approx(4.0)


def test_token_weight_makes_micro_batches_add_up_to_the_whole() -> None:
    moe = make(aux_loss="sequence", z_loss_weight=0.1)
    x = torch.randn(6, 5, 6)

    def gate_gradient(micro_batches: tuple[torch.Tensor, ...]) -> torch.Tensor:
        moe.zero_grad()
        for micro in micro_batches:
            (moe(micro) * 0).sum().backward()
        return moe.router.gate_ED.grad

    expected = torch.autograd.grad(reference_balance_loss(x, tensors(moe), moe.config), moe.router.gate_ED)[0]
    torch.testing.assert_close(gate_gradient((x,)), expected)
    set_token_weight(moe, 1 / 30)
    torch.testing.assert_close(gate_gradient(x.split([1, 2, 3])), expected)


def test_losses_leave_the_output_alone() -> None:
    x = torch.randn(2, 5, 6)
    assert torch.equal(make(aux_loss="batch", z_loss_weight=1.0)(x), make()(x))


def test_evaluation_has_no_balance_loss() -> None:
    moe = make(aux_loss="batch").eval()
    (moe(torch.randn(2, 5, 6)) * 0).sum().backward()
    assert (moe.router.gate_ED.grad == 0).all()
    assert take_balance_loss(moe) == 0


def test_bias_moves_towards_the_rare_experts_and_stays_centred() -> None:
    model = torch.nn.Sequential(make(bias_update_rate=0.01), make(), make(num_experts=6, bias_update_rate=0.1))
    for moe, counts in zip(model, ([4, 0, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1, 1, 1]), strict=True):
        moe.router.row_count_E.copy_(torch.tensor(counts))
    counts = update_expert_bias(model)
    assert [c.tolist() for c in counts.values()] == [[4, 0, 1, 1], [1, 1, 1, 1], [1] * 6]
    assert list(counts) == ["0", "1", "2"]
    # mean 1.5: moves -1, 1, 1, 1; centred by their mean 0.5
    torch.testing.assert_close(model[0].router.expert_bias_E, 0.01 * torch.tensor([-1.5, 0.5, 0.5, 0.5]))
    assert (model[1].router.expert_bias_E == 0).all()
    assert (model[2].router.expert_bias_E == 0).all()
    assert all(m.router.row_count_E.sum() == 0 for m in model)


def test_bias_balances_a_skewed_router() -> None:
    moe = make(num_experts=8, top_k=2, score_func="sigmoid", bias_update_rate=0.005)
    moe.router.gate_ED.data[0] += 1.0
    x = torch.randn(256, 6) + 0.5

    def load() -> float:
        moe(x)
        count_E = update_expert_bias(moe)[""].float()
        return (count_E.max() / count_E.mean()).item()

    first = load()
    for _ in range(200):
        last = load()
    assert first > 2.0
    assert last < 1.3
