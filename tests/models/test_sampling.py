import pytest
import torch
from torch import nn

from spurline.models.common.generate import generate
from spurline.models.common.init import initialize


@pytest.fixture
def model(small_config):
    model = small_config().build()
    initialize(model, 0)
    with torch.no_grad():
        model.output.weight.mul_(20)  # a distribution with clear favourites
    return model


PROMPT_BL = torch.tensor([[1, 2, 3], [4, 5, 6]])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_seed_gives_the_same_tokens_and_another_seed_others(model):
    first, again, other = (generate(model, PROMPT_BL, 12, generator=seeded(s), max_context=64) for s in (0, 0, 1))
    assert first.shape == (2, 15)
    assert torch.equal(first[:, :3], PROMPT_BL)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_greedy_takes_the_argmax_of_the_forward_pass(model):
    tokens_BL = generate(model, PROMPT_BL, 8, temperature=0, max_context=64)
    model.eval()
    predicted_BL = model(tokens_BL).argmax(-1)
    assert torch.equal(tokens_BL[:, 3:], predicted_BL[:, 2:-1])


class FixedLogits(nn.Module):
    """Answers every token with the same logits over a vocabulary of 60."""

    logits_V = torch.linspace(0, 3, 60)[torch.randperm(60, generator=torch.Generator().manual_seed(0))]

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        return self.logits_V.expand(*tokens_BL.shape, -1)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 1000])
def test_tokens_are_drawn_from_the_softmax_of_the_best_top_k(top_k, temperature):
    prompt_BL = torch.zeros(20_000, 1, dtype=torch.int64)
    drawn = generate(
        FixedLogits(), prompt_BL, 1, temperature=temperature, top_k=top_k, generator=seeded(0), max_context=1
    )[:, 1]
    weight_V = (FixedLogits.logits_V / temperature).exp()
    allowed = weight_V.argsort(descending=True)[: top_k or 60]
    expected_V = torch.zeros(60)
    expected_V[allowed] = weight_V[allowed] / weight_V[allowed].sum()
    share_V = drawn.bincount(minlength=60) / len(prompt_BL)
    assert share_V[expected_V == 0].sum() == 0
    assert (share_V - expected_V).abs().sum() < 0.08


def test_model_never_sees_more_than_max_context(model):
    lengths = []
    model.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    tokens_BL = generate(model, PROMPT_BL, 4, temperature=0, max_context=5)
    assert lengths == [3, 4, 5, 5]
    assert torch.equal(tokens_BL[:, 6], model(tokens_BL[:, 1:6])[:, -1].argmax(-1))


@pytest.mark.parametrize("training", [True, False])
def test_training_mode_is_restored_even_after_an_error(model, training):
    model.train(training)
    modes = []
    hook = model.register_forward_pre_hook(lambda module, args: modes.append(module.training))
    tokens_BL = generate(model, PROMPT_BL, 1, max_context=8)
    assert modes == [False]
    assert model.training == model.layers["1"].training == training
    assert not tokens_BL.requires_grad
    hook.remove()

    def fail(module: nn.Module, args: object) -> None:
        raise RuntimeError("broken")

    model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken"):
        generate(model, PROMPT_BL, 1, max_context=8)
    assert model.training == training


def test_bad_arguments_are_refused(model):
    with pytest.raises(ValueError, match="prompt of at least one token"):
        generate(model, torch.empty(1, 0, dtype=torch.int64), 3, max_context=8)
    for bad in ({"temperature": -1.0}, {"top_k": -1}, {"max_context": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            generate(model, PROMPT_BL, 3, **{"max_context": 8, **bad})
