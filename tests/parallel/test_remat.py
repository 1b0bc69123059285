import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from spurline.models.common.generate import generate
from spurline.models.common.init import initialize
from spurline.models.common.sampling import GREEDY
from spurline.moe import telemetry
from spurline.moe.balance import routers
from spurline.moe.config import MoEConfig
from spurline.parallel.compile import apply_compile
from spurline.parallel.remat import apply_remat
from spurline.testing.kept import LiveStorages
from spurline.testing.params import slow_but
from spurline.testing.tiny import tiny_model

MOE = MoEConfig(
    hidden_dim=12,
    num_experts=4,
    top_k=2,
    num_shared_experts=1,
    aux_loss="sequence",
    aux_loss_weight=0.5,
    z_loss_weight=0.1,
)
CONFIG = tiny_model(vocab_size=32, num_heads=2, moe=MOE, q_lora_rank=0)
MODES = ("none", "selective", "full")
DENSE = dataclasses.replace(CONFIG, num_dense_layers=3)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def make_model(mode, config=CONFIG, tied=False, compiled=False):
    model = config.build()
    initialize(model, seed=0)
    for router in routers(model).values() if tied else ():
        nn.init.zeros_(router.gate_ED)
    apply_remat(model, mode)
    if compiled:
        apply_compile(model, "aot_eager")
    return model


def make_tokens(length=8):
    return torch.randint(32, (2, length), generator=torch.Generator().manual_seed(0))


def step(model, between=lambda: None):
    """The loss, every gradient, and the statistics of the step."""
    model.zero_grad()
    loss = model(make_tokens()).square().mean()
    between()
    loss.backward()
    results = {"loss": loss.detach()} | {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, router in routers(model).items():
        results |= {f"{name} rows": router.row_count_E.clone(), f"{name} balance": router.balance_loss.clone()}
        router.init_buffers()
    return results


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize(
    ("config", "tied"),
    slow_but([(DENSE, False), (CONFIG, True)], [(DENSE, False), (CONFIG, False), (CONFIG, True)]),
    ids=["dense", "moe", "moe with tied scores"],
)
def test_loss_gradients_and_statistics_are_those_without_recomputation(config, tied, mode, compiled):
    expected = step(make_model("none", config, tied))
    model = make_model(mode, config, tied, compiled)
    for _ in range(3):
        actual = step(model)
        assert actual.keys() == expected.keys()
        for name in expected:
            if compiled and actual[name].is_floating_point():
                torch.testing.assert_close(actual[name], expected[name], rtol=1e-6, atol=1e-6, msg=name)
            else:
                assert torch.equal(actual[name], expected[name]), name
        num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert num_graphs == (0 if not compiled else 1 if config is DENSE else 2)
    if tied:
        assert expected["layers.1.moe rows"].tolist() == [16, 16, 0, 0]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_selective_sends_tokens_to_the_same_experts_even_if_the_choice_would_now_be_another(compiled):
    def choose_otherwise(model):
        for router in routers(model).values():
            router.expert_bias_E.copy_(torch.tensor([0.0, 0, 9, 9]))

    expected = step(make_model("none", tied=True))
    model = make_model("selective", tied=True, compiled=compiled)
    actual = step(model, between=lambda: choose_otherwise(model))
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-6, atol=1e-6, msg=name)


def bytes_kept_for_backward(model):
    with LiveStorages(model) as live:
        loss = model(make_tokens(64)).square().mean()
        num_bytes = live.num_bytes()
    loss.backward()
    return num_bytes


@pytest.mark.parametrize("score_before_experts", [False, True])
@pytest.mark.parametrize("config", [DENSE, CONFIG], ids=["dense", "moe"])
def test_selective_keeps_less_than_none_and_full_least(config, score_before_experts):
    config = dataclasses.replace(config, moe=dataclasses.replace(MOE, score_before_experts=score_before_experts))
    none, selective, full = (
        bytes_kept_for_backward(make_model(mode, config)) for mode in ("none", "selective", "full")
    )
    assert full < 0.5 * selective < selective < 0.7 * none, (full, selective, none)


def bytes_saved_by_graphs(model):
    own = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
    saved = {}

    def pack(tensor):
        if tensor.untyped_storage()._cdata not in own:
            saved[tensor.untyped_storage()._cdata] = tensor  # held, so that no other tensor gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(make_tokens(64))
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.slow
def test_compiled_selective_keeps_less_than_none_and_full_least():
    none, selective, full = (bytes_saved_by_graphs(make_model(mode, compiled=True)) for mode in MODES)
    assert full < selective < none, (full, selective, none)


def calls_of_the_first_norm(model):
    calls = []
    handle = model.layers["0"].attention_norm.register_forward_pre_hook(lambda *_: calls.append(1))
    step(model)
    handle.remove()
    return len(calls)


def test_of_several_calls_the_last_one_holds():
    model = make_model("full")
    assert calls_of_the_first_norm(model) == 2
    apply_remat(model, "full")
    assert calls_of_the_first_norm(model) == 2
    apply_remat(model, "none")
    assert calls_of_the_first_norm(model) == 1
    twice, once = make_model("full"), make_model("selective")
    apply_remat(twice, "selective")
    assert bytes_kept_for_backward(twice) == bytes_kept_for_backward(once)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_names_stay_as_they_are(mode):
    plain, model = make_model("none"), make_model(mode)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    model.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_copy_computes_with_its_own_weights(mode):
    model = make_model(mode)
    expected = step(model)
    twin = copy.deepcopy(model)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    for name, value in step(twin).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    ("mode", "compiled"),
    slow_but(
        [("full", False), ("selective", False), ("selective", True)],
        [(mode, compiled) for mode in ("full", "selective") for compiled in (False, True)],
    ),
)
def test_evaluation_and_generation_are_as_before(mode, compiled):
    plain, model = make_model("none").eval(), make_model(mode, compiled=compiled).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(make_tokens()), plain(make_tokens()), rtol=1e-6, atol=1e-6)
    assert all(router.row_count_E.sum() == 0 for router in routers(model).values())
    with torch.compiler.set_stance("force_eager"):
        written = generate(model, make_tokens(3).tolist(), 5, sampling=GREEDY, max_context=6)
    assert written == generate(plain, make_tokens(3).tolist(), 5, sampling=GREEDY, max_context=6)


def test_weights_fused_by_an_evaluation_in_between_do_not_disturb_a_compiled_step():
    config = dataclasses.replace(CONFIG, moe=dataclasses.replace(MOE, force_load_balance=True))
    expected = step(make_model("none", config))
    model = make_model("selective", config, compiled=True)
    telemetry.reset()
    telemetry.enable()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        model(make_tokens())
    telemetry.enable(False)
    assert telemetry.counters()["fused_weights.misses"] == 2
    for name, value in step(model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6, msg=name)
    assert model.layers["1"].moe.experts.fused_weights.key is None


class AskingBlock(nn.Module):
    """A block whose host asks a device for a number."""

    def __init__(self):
        super().__init__()
        self.number = torch.empty(1, device="meta")

    def forward(self, x):
        return (x * self.number.tolist()[0]).exp()


class CopyFromDevice(TorchDispatchMode):
    """Stands in for the device, and counts how often it is asked."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].is_meta:
            self.count += 1
            return torch.full(args[0].shape, 3.0)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "count"), [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_does_not_wait_for_a_device_twice(mode, count):
    model = nn.Module()
    model.layers = nn.ModuleList([AskingBlock()])
    apply_remat(model, mode)
    x = torch.ones(2, requires_grad=True)
    with CopyFromDevice() as device:
        model.layers[0](x).sum().backward()
    torch.testing.assert_close(x.grad, 3 * torch.ones(2).mul(3).exp())
    assert device.count == count


def test_unknown_mode_is_a_clear_error():
    with pytest.raises(ValueError, match=r"mode must be none, full, selective or selective_resend, got 'some'"):
        apply_remat(make_model("none"), "some")
