import copy

import pytest
import torch
from torch import nn

from spurline.models.common.init import initialize
from spurline.moe.balance import routers, update_expert_bias
from spurline.parallel.compile import apply_compile, compile_function
from spurline.testing.tiny import tiny_model


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def make_model(num_layers, num_dense_layers=1):
    config = tiny_model(
        vocab_size=32,
        num_layers=num_layers,
        num_dense_layers=num_dense_layers,
        num_heads=2,
        moe={"num_experts": 4},
        q_lora_rank=0,
    )
    model = config.build()
    initialize(model, seed=0)
    return model


def make_tokens():
    return torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))


def num_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def outputs_and_gradients(model, tokens_BL):
    logits_BLV = model(tokens_BL)
    model.zero_grad()
    logits_BLV.square().sum().backward()
    return [logits_BLV, *(parameter.grad for parameter in model.parameters())]


def test_blocks_compute_the_same_with_a_graph_for_each_kind_whatever_the_row_counts():
    model = make_model(num_layers=5, num_dense_layers=2)
    eager_model = copy.deepcopy(model)
    apply_compile(model, "aot_eager")
    loads = []
    for bias_E in ([0.0, 0, 0, 0], [9, 9, 0, 0], [0, 0, 9, 9]):  # the gate's choice, two experts, the other two
        for router in [*routers(model).values(), *routers(eager_model).values()]:
            router.expert_bias_E.copy_(torch.tensor(bias_E))
        expected = outputs_and_gradients(eager_model, make_tokens())
        for actual, eager in zip(outputs_and_gradients(model, make_tokens()), expected, strict=True):
            torch.testing.assert_close(actual, eager, rtol=1e-5, atol=1e-6)
        loads.append(update_expert_bias(model)["layers.2.moe"].tolist())
        assert num_graphs() == 2  # one for the dense blocks, one for those with experts
    assert loads[1:] == [[16, 16, 0, 0], [0, 0, 16, 16]]


def test_blocks_are_compiled_in_place():
    model = make_model(num_layers=2)
    names, blocks = list(model.state_dict()), list(model.layers.values())
    apply_compile(model, "aot_eager")
    assert list(model.state_dict()) == names
    assert all(now is before for now, before in zip(model.layers.values(), blocks, strict=True))
    assert all(block._compiled_call_impl is not None for block in blocks)


def test_compiling_again_changes_nothing():
    model = make_model(num_layers=1)
    apply_compile(model, "aot_eager")
    compiled = [block._compiled_call_impl for block in model.layers.values()]
    expected = model(make_tokens())
    apply_compile(model, "eager")
    assert [block._compiled_call_impl for block in model.layers.values()] == compiled
    assert torch.equal(model(make_tokens()), expected)
    assert num_graphs() == 1


def test_limit_of_graphs_for_one_piece_of_code_is_not_torchs_low_one():
    model = make_model(num_layers=1)
    apply_compile(model, "eager")
    squared = compile_function(torch.square, "eager")
    with torch._dynamo.config.patch(recompile_limit=1):
        for grad_mode in (torch.enable_grad, torch.no_grad):  # each takes a graph of its own
            with grad_mode():
                squared(model(make_tokens()))
    assert num_graphs() == 4


class BlockInTwoGraphs(nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()
        return x + 1


def test_block_that_is_not_one_graph_is_refused():
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": BlockInTwoGraphs()})
    apply_compile(model, "eager")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model.layers["0"](torch.ones(2))


def test_function_is_compiled_as_one_graph_or_refused():
    def shifted(x):
        return torch.relu(x) + x.sum()

    x = torch.linspace(-1, 2, 6)
    torch.testing.assert_close(compile_function(shifted, "aot_eager")(x), shifted(x))
    assert num_graphs() == 1
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compile_function(BlockInTwoGraphs().forward, "eager")(x)


def test_unknown_backend_is_a_clear_error():
    for compile_it in (
        lambda name: apply_compile(make_model(num_layers=1), name),
        lambda name: compile_function(torch.relu, name),
    ):
        with pytest.raises(ValueError, match=r"^compile.backend: there is no 'indcutor'. Choose from: .*inductor"):
            compile_it("indcutor")
