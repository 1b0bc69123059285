import pytest
import torch

from spurline import MoE, MoEConfig
from spurline.moe import Router, set_token_weight, update_expert_bias
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
    expected = reference_balance_loss(x, tensors(moe), moe.config).detach()
    torch.testing.assert_close(moe.router.balance_loss, expected)
    moe(x)
    torch.testing.assert_close(moe.router.balance_loss, 2 * expected)
    moe.router.reset_metrics()
    assert moe.router.balance_loss == 0


def test_an_even_router_has_loss_one_and_a_collapsed_one_has_loss_e() -> None:
    moe = make(aux_loss="batch", aux_loss_weight=1.0, top_k=1, force_load_balance=True)
    moe.router.gate_ED.data.zero_()
    moe(torch.randn(8, 6))
    assert moe.router.balance_loss.item() == pytest.approx(1.0)
    moe = make(aux_loss="batch", aux_loss_weight=1.0, top_k=1)
    moe.router.gate_ED.data.zero_()[2] = 50.0
    moe(torch.rand(8, 6) + 1)
    assert moe.router.balance_loss.item() == pytest.approx(4.0)


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


@pytest.mark.parametrize("aux_loss", ["none", "sequence"])
def test_token_weight_gives_the_same_gradient_with_accumulation_and_loss_scaling(aux_loss: str) -> None:
    moe, x = make(aux_loss=aux_loss, z_loss_weight=0.1), torch.randn(4, 5, 6)

    def auxiliary_part(num_micro_batches: int, loss_scale: float) -> torch.Tensor:
        """What balance and z losses add to the gate's gradient, after the step has divided it by the loss scale."""
        gradients = []
        for training in (True, False):  # evaluation has no such losses
            moe.train(training).zero_grad()
            for micro in x.chunk(num_micro_batches):
                (moe(micro).square().mean() / num_micro_batches * loss_scale).backward()
            gradients.append(moe.router.gate_ED.grad.clone() / loss_scale)
        return gradients[0] - gradients[1]

    whole = auxiliary_part(1, 1.0)
    assert whole.norm() > 0.01
    for num_micro_batches, loss_scale in ((1, 1.0), (4, 1.0), (1, 1024.0), (4, 1024.0)):
        set_token_weight(moe, loss_scale / 20)
        torch.testing.assert_close(auxiliary_part(num_micro_batches, loss_scale), whole, rtol=1e-4, atol=1e-6)


def test_losses_leave_the_output_alone() -> None:
    x = torch.randn(2, 5, 6)
    assert torch.equal(make(aux_loss="batch", z_loss_weight=1.0)(x), make()(x))


def test_evaluation_has_no_balance_loss() -> None:
    moe = make(aux_loss="batch").eval()
    (moe(torch.randn(2, 5, 6)) * 0).sum().backward()
    assert (moe.router.gate_ED.grad == 0).all()
    assert moe.router.balance_loss == 0


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


def test_routers_of_one_module_are_counted_and_balanced_apart() -> None:
    config = make(bias_update_rate=0.01).config
    model = torch.nn.ModuleDict({"pair": torch.nn.ModuleList([Router(config), Router(config)]), "moe": MoE(config)})
    for number, router in enumerate([*model["pair"], model["moe"].router]):
        router.row_count_E[number] = 4
    counts = {layer: count_E.tolist() for layer, count_E in update_expert_bias(model).items()}
    assert counts == {"pair.0": [4, 0, 0, 0], "pair.1": [0, 4, 0, 0], "moe": [0, 0, 4, 0]}
    assert all(router.expert_bias_E.any() for router in model["pair"])


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
