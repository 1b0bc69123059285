"""Packages of users' own: found by entry point or --import, and told about in one line where they are wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from spurline import models, plugins
from spurline.cli import main
from spurline.moe import MoE, MoEConfig, Routing, register_router, registry, update_expert_bias
from spurline.moe.dispatch.plan import ExpertRanks, spread_over

REGISTERS_A_FAMILY = "from spurline.models import register_family\nregister_family('mine', 'my_family')\n"
WITH_IMPORT = {
    "train": ["train", "--module", "agpt", "--config", "agpt_debugmodel"],
    "configs": ["configs"],
    "verify": ["verify"],
    "generate": ["generate", "run", "--prompt", "x"],
    "convert": ["convert", "from-hf", "theirs", "ours"],
}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Writes modules that can be imported; what they register is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugins, "_loaded", set())
    before = set(sys.modules)

    def write_file(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    with ExitStack() as stack:
        for known in (models._FAMILIES, registry.ROUTERS, registry.KERNELS, registry.DISPATCHERS):
            stack.enter_context(mock.patch.dict(known))
        yield write_file
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


@pytest.fixture
def install(write: Callable[[str, str], None]) -> Callable[[str], None]:
    """Makes a plugin look as if its package was installed."""

    def make_dist_info(target: str) -> None:
        write("my_dist-1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: my-dist\nVersion: 1.2\n")
        write("my_dist-1.2.dist-info/entry_points.txt", f"[spurline.plugins]\nmine = {target}\n")

    return make_dist_info


def complaints(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_module_of_an_entry_point_is_imported(write, install, capsys) -> None:
    write("my_plugin.py", REGISTERS_A_FAMILY)
    write("my_family/configs.py", "from spurline.models.agpt.configs import CONFIGS")
    install("my_plugin")
    assert main(["configs", "--module", "mine"]) == 0
    assert "agpt_debugmodel" in capsys.readouterr().out


def test_function_of_an_entry_point_is_called_once(write, install, capsys) -> None:
    write("my_plugin.py", "calls = []\ndef start():\n    calls.append(1)\n")
    install("my_plugin:start")
    assert plugins.load_plugins() == plugins.load_plugins() == []
    assert sys.modules["my_plugin"].calls == [1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("x = 1\nx.y", "AttributeError: 'int' object has no attribute 'y' ({file}, line 2)"),
        ("x = = 1", "invalid syntax ({file}, line 1)"),
        ("raise RuntimeError('first\\nsecond')", "RuntimeError: first ({file}, line 1)"),
        (
            "from spurline.models import register_family\nregister_family('qwen3', 'mine')",
            "model family 'qwen3' is already registered as spurline.models.qwen3: choose another name",
        ),
        (
            "from spurline.moe import register_dispatcher\nregister_dispatcher('local', print)",
            "dispatcher 'local' is already registered as spurline.moe.dispatch.local:LocalDispatcher:"
            " choose another name",
        ),
        (REGISTERS_A_FAMILY, "model family 'mine': No module named 'my_family'"),
    ],
)
@pytest.mark.parametrize("way", ["entry point", "--import"])
def test_broken_plugin_is_one_line(write, install, capsys, tmp_path, text: str, words: str, way: str) -> None:
    write("my_plugin.py", text)
    words = words.format(file=tmp_path / "my_plugin.py")
    if way == "entry point":
        install("my_plugin")
        assert complaints(capsys, "configs") == [f"spurline configs: plugin mine of the package my-dist 1.2: {words}"]
    else:
        expected = [f"spurline configs: --import my_plugin: {words}"]
        assert complaints(capsys, "configs", "--import", "my_plugin") == expected


@pytest.mark.parametrize("command", ["configs deepseek_v3_debugmode", "train --config deepseek_v3_debugmode"])
def test_broken_family_is_reported_with_what_else_is_wrong(write, capsys, command: str) -> None:
    write("my_plugin.py", REGISTERS_A_FAMILY)
    broken, misspelled = complaints(capsys, *command.split(), "--import", "my_plugin")[1:]
    assert broken == "  --import my_plugin: model family 'mine': No module named 'my_family'"
    assert "there is no preset 'deepseek_v3_debugmode'. Did you mean deepseek_v3_debugmodel?" in misspelled


@pytest.mark.parametrize("command", WITH_IMPORT)
def test_every_command_that_builds_models_loads_plugins(write, install, capsys, command: str) -> None:
    install("no_such_module")
    told = complaints(capsys, *WITH_IMPORT[command], "--import", "no_such_package")
    assert "  plugin mine of the package my-dist 1.2: No module named 'no_such_module'" in told
    assert "  --import no_such_package: No module named 'no_such_package'" in told


def test_the_same_thing_may_be_registered_again(write) -> None:
    for _ in range(2):
        register_router("again", "somewhere:Router")
    with pytest.raises(ValueError, match="router 'again' is already registered as somewhere:Router"):
        register_router("again", "elsewhere:Router")


@pytest.mark.parametrize(
    ("option", "near"), [("router", "top_k"), ("experts_backend", "stream"), ("dispatcher", "local")]
)
def test_unknown_name_is_told_before_a_run_starts(capsys, option: str, near: str) -> None:
    command = ["train", "--dry-run", "--module", "deepseek_v3", "--config", "deepseek_v3_debugmodel"]
    (line,) = complaints(capsys, *command, f"--model.moe.{option}", f"{near}x")
    assert f"model.moe.{option} '{near}x' is not known. Did you mean {near}? Choose from: " in line


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no_such_module:Router", "router 'lost': No module named 'no_such_module'"),
        ("spurline.moe.router:Rooter", "router 'lost': module 'spurline.moe.router' has no attribute 'Rooter'"),
    ],
)
def test_part_that_is_not_where_it_is_said_to_be(write, target: str, words: str) -> None:
    register_router("lost", target)
    with pytest.raises(ValueError, match=words):
        MoE(MoEConfig(4, 8, router="lost"))


class RoundRobin(nn.Module):
    """No more than a layer needs: token t goes to expert t % E, with a weight that is learned."""

    def __init__(self, config: MoEConfig, init_std: float) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.weight = nn.Parameter(torch.empty(1))

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator | None) -> None:
        tensor.fill_(0.5)

    def forward(self, x_TD: Tensor, num_sequences: int) -> Routing:
        T = x_TD.shape[0]
        expert_T1 = (torch.arange(T) % self.num_experts).unsqueeze(1)
        count_E = torch.bincount(expert_T1.flatten(), minlength=self.num_experts)
        return Routing(expert_T1, self.weight.expand(T, 1), count_E)


def test_router_need_not_count_nor_balance(write) -> None:
    register_router("round_robin", RoundRobin)
    moe = MoE(MoEConfig(4, 8, num_experts=3, top_k=1, router="round_robin"))
    x_TD = torch.randn(7, 4)
    y_TD = moe(x_TD)
    for t, x_D in enumerate(x_TD):
        w1_FD, w3_FD, w2_DF = (w[t % 3] for w in (moe.experts.w1_EFD, moe.experts.w3_EFD, moe.experts.w2_EDF))
        expected_D = 0.5 * w2_DF @ (nn.functional.silu(w1_FD @ x_D) * (w3_FD @ x_D))
        torch.testing.assert_close(y_TD[t], expected_D)
    y_TD.sum().backward()
    assert moe.router.weight.grad is not None
    assert update_expert_bias(moe) == {}


def test_dispatcher_for_one_rank_is_refused_across_ranks() -> None:
    class OnOneRank:
        def plan(self, routing, num_tokens_P=None):
            raise AssertionError

    with pytest.raises(ValueError, match=r"'mine' keeps rows on one rank.* sharded over 4: give OnOneRank a"):
        spread_over(ExpertRanks(mock.Mock(size=lambda: 4)), OnOneRank(), "mine")
