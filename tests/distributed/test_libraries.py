"""DeepEP and HybridEP by their stand-ins on gloo ranks: the adapters against the reference, forward and backward."""

import dataclasses
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from spurline import MoE, MoEConfig, parallelize_moe
from spurline.moe import telemetry
from spurline.moe.reference import reference_moe
from spurline.testing import RankPool
from spurline.testing.equivalence import relative_error
from spurline.testing.stand_ins import exchange, installed

LOCAL = MoEConfig(dim=16, hidden_dim=12, num_experts=8, top_k=3, num_shared_experts=1)
Case = tuple[dict[str, Any], tuple[int, ...], int, torch.dtype]
"""Changes to the config, shape of the mesh, tokens of each rank, dtype."""


def make_layer(config: MoEConfig, dtype: torch.dtype = torch.float32) -> MoE:
    torch.manual_seed(0)
    moe = MoE(config, init_std=0.4).to(dtype)
    moe.router.expert_bias_E.uniform_(-0.1, 0.1)
    return moe


def make_input(length: int, rank: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x, direction = torch.randn(2, length, LOCAL.dim, generator=torch.Generator().manual_seed(rank))
    return x.to(dtype), direction.to(dtype)


def run_layers(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    with installed():
        try:
            return [run_layer(rank, *case) for case in cases]
        finally:
            forget_buffers()


def forget_buffers() -> None:
    """The next test has other groups."""
    from spurline.moe.dispatch import deep_ep, hybrid_ep

    deep_ep._buffers.clear()
    hybrid_ep._buffers.clear()


def run_layer(
    rank: int, changes: dict[str, Any], shape: tuple[int, ...], length: int, dtype: torch.dtype
) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ep", "etp")[: len(shape)])
    moe = parallelize_moe(make_layer(dataclasses.replace(LOCAL, **changes), dtype), mesh)
    x, direction = make_input(length, rank, dtype)
    x.requires_grad_()
    telemetry.reset()
    telemetry.enable()
    y = moe(x)
    telemetry.enable(False)
    (y * direction).sum().backward()
    with torch.no_grad():
        evaluated = moe(x)
    gradients = {name: p.grad for name, p in moe.named_parameters()}
    return {
        "y": y.detach(),
        "evaluated": evaluated,
        "x": x.grad,
        "gradients": {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in gradients.items()},
        "paths": telemetry.counters(),
    }


def expected_results(changes: dict[str, Any], world: int, length: int, dtype: torch.dtype) -> dict[str, Any]:
    """What one process computes in float32 for the tokens of all ranks, with the weights that they have."""
    config = dataclasses.replace(LOCAL, **(changes | {"dispatcher": "local"}))
    moe = make_layer(config, dtype).float()
    tensors = dict(moe.named_parameters()) | dict(moe.named_buffers())
    inputs = [make_input(length, rank, dtype) for rank in range(world)]
    xs = [x.float().requires_grad_() for x, _ in inputs]
    ys = [reference_moe(x, tensors, config) for x in xs]
    sum((y * d.float()).sum() for y, (_, d) in zip(ys, inputs, strict=True)).backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in moe.named_parameters()}
    return {"x": [x.grad for x in xs], "y": [y.detach() for y in ys], "gradients": gradients}


def check(by_rank: list[list[dict[str, Any]]], cases: list[Case]) -> None:
    for number, (changes, shape, length, dtype) in enumerate(cases):
        expected = expected_results(changes, len(by_rank), length, dtype)
        for rank, results in enumerate(by_rank):
            result = results[number]
            errors = {
                "y": relative_error(result["y"], expected["y"][rank]),
                "evaluated": relative_error(result["evaluated"], expected["y"][rank]),
                "x": relative_error(result["x"], expected["x"][rank]),
                **{n: relative_error(g, expected["gradients"][n]) for n, g in result["gradients"].items()},
            }
            limit = 1e-5 if dtype == torch.float32 else 0.05
            assert max(errors.values()) < limit, (rank, changes, shape, length, errors)
            path = "deep_ep" if "deep_ep" in changes["dispatcher"] else "hybrid_ep"
            assert result["paths"][f"exchange.{path}"] == 1


@pytest.mark.parametrize("dispatcher", ["deep_ep", "deep_ep_low_latency", "hybrid_ep"])
@pytest.mark.parametrize("world", [2, 4])
def test_adapters_equal_the_reference(ranks: RankPool, dispatcher: str, world: int) -> None:
    backends = itertools.cycle(["stream", "grouped_mm", "loop"])
    cases: list[Case] = []
    for before, multiple in itertools.product([False, True], [1, 8]):
        changes = {"score_before_experts": before, "row_multiple": multiple, "experts_backend": next(backends)}
        cases.append((changes, (world,), 11, torch.float32))
    cases += [
        ({"num_shared_experts": 0, "force_load_balance": True}, (world,), 16, torch.float32),
        ({"experts_backend": "loop"}, (world // 2, 2), 11, torch.float32),  # experts cut in two
        ({"top_k": 1}, (world,), 3, torch.float32),  # experts and ranks without rows
        ({"experts_backend": "loop"}, (world,), 11, torch.bfloat16),
    ]
    cases = [({"dispatcher": dispatcher} | changes, *rest) for changes, *rest in cases]
    check(ranks.run(run_layers, world, cases, timeout=120), cases)


def run_biased(rank: int, dispatcher: str) -> list[Tensor]:
    """Experts with biases make something of padding; output and gradients beside those of the default."""
    with installed():
        found = []
        for changes in ({"dispatcher": dispatcher, "row_multiple": 8}, {}):
            mesh = init_device_mesh("cpu", (2,))
            moe = make_layer(dataclasses.replace(LOCAL, experts="clamped_swiglu", **changes))
            with torch.no_grad():
                for parameter in moe.experts.parameters():
                    if parameter.dim() == 2:
                        parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
            parallelize_moe(moe, mesh)
            x, direction = make_input(11, rank)
            y = moe(x)
            (y * direction).sum().backward()
            found.append([y.detach(), *(p.grad.to_local() for p in moe.experts.parameters())])
        forget_buffers()
        return [relative_error(*pair) for pair in zip(*found, strict=True)]


@pytest.mark.parametrize("dispatcher", ["deep_ep", "hybrid_ep"])
def test_padding_reaches_no_gradient_of_experts_with_biases(ranks: RankPool, dispatcher: str) -> None:
    for errors in ranks.run(run_biased, 2, dispatcher):
        assert max(errors) < 1e-5, errors


def run_refused(rank: int, dispatcher: str, same_num_tokens: bool, dtype: torch.dtype) -> str:
    with installed(), mock.patch.object(exchange, "row_dtypes", (torch.bfloat16,)):
        mesh = init_device_mesh("cpu", (2,))
        moe = make_layer(dataclasses.replace(LOCAL, dispatcher=dispatcher), dtype)
        parallelize_moe(moe, mesh, layer="layers.1.moe", same_num_tokens=same_num_tokens)
        try:
            moe(make_input(4 + rank, rank, dtype)[0])
        except ValueError as error:
            return str(error)
        finally:
            forget_buffers()
        return ""


def test_what_a_library_does_not_take_is_told_in_a_line(ranks: RankPool) -> None:
    for dispatcher in ("deep_ep", "hybrid_ep"):
        for message in ranks.run(run_refused, 2, dispatcher, True, torch.float32):
            assert f"dispatcher '{dispatcher}' moves rows in bfloat16, not in torch.float32" in message
    for message in ranks.run(run_refused, 2, "hybrid_ep", False, torch.bfloat16):
        assert "layers.1.moe: dispatcher 'hybrid_ep' needs the same number of tokens on every rank" in message
    for message in ranks.run(run_refused, 2, "deep_ep", False, torch.bfloat16):
        assert message == ""  # each rank may have its own


def run_low_latency(rank: int, lengths: list[int]) -> tuple[dict[str, int], list[bool], float]:
    """The paths of evaluations with these numbers of tokens; the buffers by their kinds; the error of the last."""
    with installed():
        from spurline.moe.dispatch import deep_ep

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        config = dataclasses.replace(LOCAL, dispatcher="deep_ep_low_latency")
        moe = parallelize_moe(make_layer(config, torch.bfloat16), mesh)
        telemetry.reset()
        telemetry.enable()
        with torch.no_grad():
            for length in lengths:
                y = moe(make_input(length, rank, torch.bfloat16)[0])
        telemetry.enable(False)
        kinds = [buffer.low_latency_mode for buffer in deep_ep._buffers.values()]
        forget_buffers()
        expected = expected_results({}, dist.get_world_size(), lengths[-1], torch.bfloat16)["y"][rank]
        return telemetry.counters(), kinds, relative_error(y, expected)


def test_low_latency_kernels_serve_without_gradients(ranks: RankPool) -> None:
    for paths, kinds, error in ranks.run(run_low_latency, 2, [5, 40]):
        assert paths["exchange.deep_ep_low_latency"] == 2
        assert "exchange.deep_ep" not in paths
        assert kinds == [True]  # one buffer, for any number of tokens
        assert error < 0.05
    for paths, kinds, error in ranks.run(run_low_latency, 2, [5, 300]):
        assert paths["exchange.deep_ep_low_latency"] == paths["exchange.deep_ep"] == 1
        assert kinds == [True, False]
        assert error < 0.05


class Ops(TorchDispatchMode):
    """The ops that run, but for those inside of `paused`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_paused:
            self.names.append(str(func))
        return func(*args, **kwargs or {})

    def paused(self, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.is_paused = True
            try:
                return function(*args, **kwargs)
            finally:
                self.is_paused = False

        return run


class DispatchedError(Exception):
    pass


def run_until_dispatched(rank: int) -> list[str]:
    """The ops between the event that the library waits for and its dispatch, where copies are needed."""
    with installed():
        from deep_ep import Buffer

        moe = make_layer(dataclasses.replace(LOCAL, dispatcher="deep_ep"))
        parallelize_moe(moe, init_device_mesh("cpu", (2,)))
        x_TD = torch.randn(LOCAL.dim, 5).t()
        routing = moe.router(x_TD, 1)
        weight_TK = routing.weight_TK.double().t().contiguous().t()
        expert_TK = routing.expert_TK.t().contiguous().t()
        plan = moe.dispatcher.plan(dataclasses.replace(routing, weight_TK=weight_TK, expert_TK=expert_TK))
        rows, ops = plan.dispatch(x_TD), Ops()
        layout = ops.paused(Buffer.get_dispatch_layout)
        dispatched = mock.Mock(side_effect=DispatchedError)
        with mock.patch.multiple(Buffer, get_dispatch_layout=layout, dispatch=dispatched), ops:
            try:
                rows.started()
            except DispatchedError:
                ops.is_paused = True
        forget_buffers()
        return ops.names


def test_nothing_is_copied_after_the_event_that_the_library_waits_for(ranks: RankPool) -> None:
    assert ranks.run(run_until_dispatched, 2) == [[], []]
