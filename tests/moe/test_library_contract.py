"""Stand-ins have the signatures of the libraries, and the adapters call what those versions have.

`library_signatures.json` holds the signatures as the libraries' sources have them, by version and commit.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from spurline import MoE, MoEConfig, parallelize_moe
from spurline.cli import main
from spurline.config import Compile, RunConfig
from spurline.moe.dispatch.plan import ExpertRanks
from spurline.testing import RankPool
from spurline.testing.stand_ins import installed
from spurline.testing.stand_ins.deep_ep_buffer import Buffer
from spurline.testing.stand_ins.hybrid_ep_buffer import HybridEPBuffer
from spurline.testing.tiny import tiny_model

SIGNATURES: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "library_signatures.json").read_text())
OLD, NEW, HYBRID = SIGNATURES


def signature(text: str) -> inspect.Signature:
    """Of `x, handle=None`, as the source of a library has it."""
    made: dict[str, Any] = {}
    exec(f"def function({text}): pass", made)
    return inspect.signature(made["function"])


def plain(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters if p.name != "self"]


@pytest.mark.parametrize(("version", "stand_in"), [(NEW, Buffer), (HYBRID, HybridEPBuffer)])
def test_stand_ins_have_the_signatures_of_the_libraries(version: str, stand_in: type) -> None:
    for name, text in SIGNATURES[version].items():
        expected = [(p.name, p.kind, p.default) for p in signature(text).parameters.values()]
        assert plain(getattr(stand_in, name)) == expected, (version, name)
    own = {name for name, member in vars(stand_in).items() if callable(member) or isinstance(member, staticmethod)}
    assert {name for name in own if not name.startswith("_")} <= SIGNATURES[version].keys()


def calls_of_a_layer(rank: int, dispatcher: str) -> list[tuple[str, int, list[str]]]:
    """Every call of the library in a training step and an evaluation: name, positional and named arguments."""
    calls = []

    def noting(owner: type, name: str) -> None:
        method = inspect.getattr_static(owner, name)
        is_static = isinstance(method, staticmethod)
        function = method.__func__ if is_static else method

        def noted(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, len(args) - (not is_static), sorted(kwargs)))
            return function(*args, **kwargs)

        originals.append((owner, name, method))
        setattr(owner, name, staticmethod(noted) if is_static else noted)

    originals: list[tuple[type, str, Any]] = []
    for owner, version in ((Buffer, NEW), (HybridEPBuffer, HYBRID)):
        for name in SIGNATURES[version]:
            noting(owner, name)
    try:
        with installed():
            from spurline.moe.dispatch import deep_ep, hybrid_ep

            moe = MoE(MoEConfig(dim=16, hidden_dim=8, num_experts=4, dispatcher=dispatcher, row_multiple=4))
            parallelize_moe(moe.bfloat16(), init_device_mesh("cpu", (dist.get_world_size(),)))
            x = torch.randn(5, 16, dtype=torch.bfloat16, requires_grad=True)
            moe(x).sum().backward()
            with torch.no_grad():
                moe(x)
            deep_ep._buffers.clear()
            hybrid_ep._buffers.clear()
    finally:
        for owner, name, method in originals:
            setattr(owner, name, method)
    return calls


@pytest.mark.parametrize(
    ("dispatcher", "versions", "least"),
    [
        ("deep_ep", [OLD, NEW], {"dispatch", "combine", "get_dispatch_layout", "capture", "__init__"}),
        ("deep_ep_low_latency", [OLD, NEW], {"dispatch", "low_latency_dispatch", "low_latency_combine"}),
        ("hybrid_ep", [HYBRID], {"__init__", "dispatch_with_permute", "combine_with_unpermute"}),
    ],
)
def test_adapters_call_what_the_libraries_have(
    ranks: RankPool, dispatcher: str, versions: list[str], least: set[str]
) -> None:
    calls, _ = ranks.run(calls_of_a_layer, 2, dispatcher)
    assert {name for name, *_ in calls} >= least
    for version in versions:
        for name, num_args, names in calls:
            signature(SIGNATURES[version][name]).bind(*range(num_args), **dict.fromkeys(names))


def across(num_ranks: int, parts: int = 1, **changes: Any) -> tuple[MoE, ExpertRanks]:
    """A layer, and as many ranks, of which there is only the number."""
    config = {"dim": 16, "hidden_dim": 8, "num_experts": 48, "top_k": 3} | changes
    group: Any = SimpleNamespace(size=lambda: num_ranks)
    return MoE(MoEConfig(**config)), ExpertRanks(group, "layers.1.moe", parts)


@pytest.mark.parametrize(
    ("num_ranks", "changes", "complaint"),
    [
        (3, {"dispatcher": "deep_ep"}, "'deep_ep' has no kernels for 3 ranks"),
        (1, {"dispatcher": "deep_ep_low_latency"}, "'deep_ep_low_latency' has no kernels for 1 ranks"),
        (2, {"dispatcher": "deep_ep", "dim": 24}, "width is a multiple of 16 and at most 8184, not 24"),
        (8, {"dispatcher": "deep_ep", "dim": 8192, "hidden_dim": 1}, "at most 8184, not 8192"),
        (2, {"dispatcher": "hybrid_ep", "dim": 24}, "'hybrid_ep' sends rows whose width is a multiple of 16, not 24"),
        (2, {"dispatcher": "hybrid_ep", "num_experts": 6}, "'hybrid_ep' needs experts in multiples of 4, not 6"),
    ],
)
def test_what_a_library_has_no_kernels_for_is_one_line(num_ranks: int, changes: dict[str, Any], complaint: str) -> None:
    with installed():
        moe, ranks = across(num_ranks, **changes)
        with pytest.raises(ValueError, match=f"^layers.1.moe: .*{complaint}: choose dispatcher 'local'$"):
            moe.dispatcher.across(ranks)


@pytest.mark.parametrize(
    ("num_ranks", "num_tokens", "changes", "expected"),
    [
        (8, 256, {}, "LowLatencyPlan"),
        (8, 257, {}, "DeepEPPlan"),
        (8, 250, {"row_multiple": 96}, "DeepEPPlan"),  # 288 places
        (16, 5, {}, "DeepEPPlan"),  # where both kinds of kernels would need NVSHMEM
        (8, 5, {"top_k": 11}, "LowLatencyPlan"),
        (8, 5, {"top_k": 12}, "DeepEPPlan"),
        (8, 5, {"top_k": 5, "parts": 2}, "LowLatencyPlan"),
        (8, 5, {"top_k": 6, "parts": 2}, "DeepEPPlan"),
        (8, 5, {"dim": 32}, "DeepEPPlan"),
    ],
    ids=str,
)
def test_low_latency_kernels_are_used_within_their_limits(
    num_ranks: int, num_tokens: int, changes: dict[str, Any], expected: str
) -> None:
    with installed(), torch.no_grad():
        moe, ranks = across(num_ranks, dispatcher="deep_ep_low_latency", **changes)
        x = torch.randn(num_tokens, moe.config.dim)
        plan = moe.dispatcher.across(ranks).plan(moe.router(x, 1))
        assert type(plan).__name__ == expected
        fewer = moe.dispatcher.across(ranks).plan(moe.router(x[:3], 1), [3, num_tokens, *[1] * (num_ranks - 2)])
        assert type(fewer).__name__ == expected, "all ranks use the kernels that the one with the most tokens can use"


@pytest.mark.parametrize(
    ("dispatcher", "library"), [("deep_ep", "DeepEP"), ("deep_ep_low_latency", "DeepEP"), ("hybrid_ep", "HybridEP")]
)
def test_a_missing_library_is_one_line_before_anything_starts(
    dispatcher: str,
    library: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(
        ["train", "--module", "deepseek_v3", "--config", "deepseek_v3_debugmodel", "--model.moe.dispatcher", dispatcher]
    )
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert f"dispatcher '{dispatcher}' needs the library {library}, which is not installed here: install it" in line
    assert line.endswith("or choose dispatcher 'local' or 'capacity', which need nothing")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=f"needs the library {library}"):
        MoE(MoEConfig(dim=8, hidden_dim=8, dispatcher=dispatcher))


def test_compiled_models_are_refused_with_a_library() -> None:
    model = tiny_model(moe={"dispatcher": "deep_ep"})
    compiled = RunConfig(model=model, compile=Compile(enable=True))
    with installed():
        assert RunConfig(model=model).problems() == []
        assert compiled.problems() == [
            "compile.enable with model: dispatcher 'deep_ep' calls a library that can't be traced: choose"
            " --compile.components loss, or dispatcher 'local' or 'capacity'"
        ]
        assert dataclasses.replace(compiled, compile=Compile(enable=True, components="loss")).problems() == []


def test_one_device_needs_no_exchange() -> None:
    with installed():
        moe = MoE(MoEConfig(dim=8, hidden_dim=8, dispatcher="deep_ep"))
        usual = MoE(MoEConfig(dim=8, hidden_dim=8))
        usual.load_state_dict(moe.state_dict())
        x = torch.randn(5, 8)
        assert torch.equal(moe(x), usual(x))
