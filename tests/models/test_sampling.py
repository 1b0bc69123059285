import pytest
import torch
from torch import nn

from spurline.models.common.generate import generate, printable, sample_token, stream, window_start
from spurline.models.common.init import initialize
from spurline.models.common.sampling import GREEDY, Sampling

DRAWN = Sampling(temperature=0.8, top_k=40)
PROMPTS = [[1, 2, 3], [4, 5, 6]]


@pytest.fixture
def model(small_config):
    model = small_config().build()
    initialize(model, 0)
    with torch.no_grad():
        model.output.weight.mul_(20)  # a distribution with clear favourites
    return model


def test_a_seed_gives_the_same_tokens_and_another_seed_others(model):
    first, again, other = (generate(model, PROMPTS, 12, sampling=DRAWN, seed=s, max_context=64) for s in (0, 0, 5))
    assert [len(tokens) for tokens in first] == [12, 12]
    assert first == again
    assert first != other


def test_each_text_draws_by_a_seed_of_its_own(model):
    together = generate(model, PROMPTS, 12, sampling=DRAWN, seed=7, max_context=64)
    alone = [generate(model, [p], 12, sampling=DRAWN, seed=7 + i, max_context=64)[0] for i, p in enumerate(PROMPTS)]
    assert together == alone
    same_prompt = generate(model, [[1, 2, 3]] * 2, 12, sampling=DRAWN, max_context=64)
    assert same_prompt[0] != same_prompt[1]


def test_greedy_takes_the_argmax_of_the_forward_pass(model):
    written_BL = torch.tensor(generate(model, PROMPTS, 8, sampling=GREEDY, max_context=64))
    model.eval()
    tokens_BL = torch.cat([torch.tensor(PROMPTS), written_BL], dim=1)
    assert torch.equal(tokens_BL[:, 3:], model(tokens_BL).argmax(-1)[:, 2:-1])


LOGITS_V = torch.linspace(0, 3, 60)[torch.randperm(60, generator=torch.Generator().manual_seed(0))]


def drawn_shares(sampling: Sampling, num_draws: int = 10_000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([sample_token(LOGITS_V, sampling, generator) for _ in range(num_draws)])
    return drawn.bincount(minlength=60) / num_draws


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 1000])
def test_tokens_are_drawn_from_the_softmax_of_the_best_top_k(top_k, temperature):
    weight_V = (LOGITS_V / temperature).exp()
    allowed = weight_V.argsort(descending=True)[: top_k or 60]
    expected_V = torch.zeros(60)
    expected_V[allowed] = weight_V[allowed] / weight_V[allowed].sum()
    share_V = drawn_shares(Sampling(temperature, top_k))
    assert share_V[expected_V == 0].sum() == 0
    assert (share_V - expected_V).abs().sum() < 0.08


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.6), (30, 0.6), (0, 1e-6), (0, 0.999)])
def test_top_p_keeps_the_tokens_that_transformers_keeps(top_k, top_p):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits_1V = TemperatureLogitsWarper(0.7)(None, LOGITS_V.unsqueeze(0))
    if top_k:
        logits_1V = TopKLogitsWarper(top_k)(None, logits_1V)
    expected_V = TopPLogitsWarper(top_p)(None, logits_1V)[0].softmax(-1)
    share_V = drawn_shares(Sampling(0.7, top_k, top_p))
    assert 1 <= (expected_V > 0).sum() < (top_k or 60)
    assert share_V[expected_V == 0].sum() == 0
    assert (share_V - expected_V).abs().sum() < 0.08


@pytest.mark.parametrize("cached", [True, False])
def test_a_text_ends_before_its_stop_token_and_the_others_go_on(model, cached):
    free = generate(model, PROMPTS, 20, sampling=DRAWN, max_context=10)
    stop_id = next(token for token in free[0][5:] if token not in free[0][:5])
    ends = [tokens.index(stop_id) if stop_id in tokens else 20 for tokens in free]
    assert ends[0] >= 5
    assert ends[0] != ends[1]
    options = {"sampling": DRAWN, "max_context": 10, "stop_id": stop_id, "cached": cached}
    assert generate(model, PROMPTS, 20, **options) == [tokens[:end] for tokens, end in zip(free, ends, strict=True)]
    # Alone, it takes no further step.
    assert len(list(stream(model, PROMPTS[:1], 20, **options))) == ends[0]


def test_model_sees_the_context_and_half_of_it_when_that_is_full():
    seen = [n - window_start(n, 6) for n in range(1, 16)]
    assert seen == [1, 2, 3, 4, 5, 6, 4, 5, 6, 4, 5, 6, 4, 5, 6]
    assert [n - window_start(n, 1) for n in (1, 2, 3)] == [1, 1, 1]
    assert [n - window_start(n, 5) for n in (5, 6, 7, 8, 9)] == [5, 3, 4, 5, 3]


def test_model_reads_each_token_once_until_the_context_is_full(model):
    lengths = []
    model.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    generate(model, [[1, 2, 3], [4]], 8, sampling=GREEDY, max_context=6)
    # With 7 tokens the first text loses 3, and again with 10; the other one when the first has 9.
    assert lengths == [3, 1, 1, 1, 5, 1, 6, 5]
    lengths.clear()
    generate(model, [[1, 2, 3], [4]], 5, sampling=GREEDY, max_context=6, cached=False)
    assert lengths == [3, 4, 5, 6, 5]


def test_a_text_that_has_ended_takes_no_context_from_others(model):
    long, short = list(range(8)), [4]
    ((stop_id,),) = generate(model, [long], 1, sampling=GREEDY, max_context=8)
    assert stop_id not in generate(model, [short], 5, sampling=GREEDY, max_context=8)[0]
    lengths = []
    model.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    generate(model, [long, short], 5, sampling=GREEDY, max_context=8, stop_id=stop_id)
    assert lengths == [8, 2, 1, 1, 1]


class PlainModel(nn.Module):
    """Says the sum of what it has read, and knows nothing of a cache."""

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(tokens_BL.cumsum(1) % 50, 50).float()


def test_any_model_from_tokens_to_logits_can_be_sampled():
    assert generate(PlainModel(), [[1, 2], [7]], 4, sampling=GREEDY, max_context=9) == [[3, 6, 12, 24], [7, 14, 28, 6]]


@pytest.mark.parametrize("training", [True, False])
def test_training_mode_is_restored_even_after_an_error(model, training):
    model.train(training)
    modes = []
    hook = model.register_forward_pre_hook(lambda module, args: modes.append(module.training))
    generate(model, PROMPTS, 1, sampling=DRAWN, max_context=8)
    assert modes == [False]
    assert model.training == model.layers["1"].training == training

    unfinished = stream(model, PROMPTS, 5, sampling=DRAWN, max_context=8)
    next(unfinished)
    unfinished.close()
    assert model.training == training
    hook.remove()

    def fail(module: nn.Module, args: object) -> None:
        raise RuntimeError("broken")

    model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken"):
        generate(model, PROMPTS, 1, sampling=DRAWN, max_context=8)
    assert model.training == training


def test_a_stream_leaves_gradients_on_for_its_reader(model):
    for _ in stream(model, PROMPTS, 2, sampling=DRAWN, max_context=8):
        assert torch.is_grad_enabled()


def test_bad_arguments_are_refused(model):
    for prompts in ([], [[1], []]):
        with pytest.raises(ValueError, match="at least one token"):
            generate(model, prompts, 3, sampling=DRAWN, max_context=8)
    with pytest.raises(ValueError, match="max_context"):
        generate(model, PROMPTS, 3, sampling=DRAWN, max_context=0)
    for bad in ({"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"temperature": float("nan")}):
        name, value = next(iter(bad.items()))
        with pytest.raises(ValueError, match=f"{name} must .*, got {value}"):
            generate(model, PROMPTS, 3, sampling=Sampling(**bad), max_context=8)


def test_a_diverged_model_is_a_clear_error(model):
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="the model's logits are not finite numbers"):
        generate(model, PROMPTS, 1, sampling=GREEDY, max_context=8)


def test_what_a_terminal_obeys_is_replaced():
    assert printable("naïve\n\ttext\x1b[2J\x00 \r\u202e") == "naïve\n\ttext\ufffd[2J\ufffd \ufffd\ufffd"
