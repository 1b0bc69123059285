"""examples/my_moe_pack: what docs/extending.md shows computes what it says, and every command takes it by name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spurline import models
from spurline.cli import main
from spurline.moe import MoE, MoEConfig, registry
from spurline.moe.reference import reference_choice
from spurline.testing.equivalence import errors_between, layer_results, reference_results
from spurline.testing.verification.cells import TINY_MODEL, Cell, cell_problems, keep_given

ROOT = Path(__file__).parent.parent
PACK = ROOT / "examples/my_moe_pack"
GUIDE = (ROOT / "docs/extending.md").read_text()
CONFIG = {"dim": 8, "hidden_dim": 12, "num_experts": 8, "top_k": 2}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(PACK))
    with ExitStack() as stack:
        for known in (models._FAMILIES, registry.ROUTERS, registry.KERNELS, registry.DISPATCHERS):
            stack.enter_context(mock.patch.dict(known))
        import_module("my_moe_pack")
        yield
    for name in [name for name in sys.modules if name.startswith("my_moe_pack")]:
        del sys.modules[name]


def token_by_token(x_TD: Tensor, score_TE: Tensor, moe: MoE, capacity: int) -> Tensor:
    """A layer whose experts are full after `capacity` rows, in plain loops: (T, D) and scores (T, E) -> (T, D)."""
    E, config = moe.config.num_experts, moe.config
    taken, outputs = [0] * E, []
    for t, x_D in enumerate(x_TD):
        y_D = torch.zeros_like(x_D)
        for e in reference_choice(score_TE[t], t, torch.zeros(E), config):
            taken[e] += 1
            if taken[e] <= capacity:
                w1_FD, w3_FD, w2_DF = (w[e] for w in (moe.experts.w1_EFD, moe.experts.w3_EFD, moe.experts.w2_EDF))
                y_D = y_D + score_TE[t, e] * (w2_DF @ (F.silu(w1_FD @ x_D) * (w3_FD @ x_D)))
        outputs.append(y_D)
    return torch.stack(outputs)


def test_cosine_router_sees_directions_alone() -> None:
    moe = MoE(MoEConfig(**CONFIG, router="cosine")).double()
    x_TD = torch.randn(11, 8, dtype=torch.float64)
    cosine_TE = torch.stack([torch.cosine_similarity(x_TD, gate_D.unsqueeze(0)) for gate_D in moe.router.gate_ED], 1)
    expected_TD = token_by_token(x_TD, (cosine_TE / 0.1).softmax(-1), moe, capacity=len(x_TD))
    torch.testing.assert_close(moe(x_TD), expected_TD)
    assert moe.router.row_count_E.sum() == 11 * 2  # it is counted, as Router is


def test_gathered_experts_equal_the_reference() -> None:
    moe = MoE(MoEConfig(**CONFIG, experts_backend="gathered"), init_std=0.3)
    x_TD = torch.randn(3, 8)  # too few tokens for all experts
    assert max(errors_between(layer_results(moe, x_TD), reference_results(moe, x_TD)).values()) < 1e-5


def test_dispatcher_with_room_for_all_equals_the_reference() -> None:
    moe = MoE(MoEConfig(**CONFIG, dispatcher="capacity_800"), init_std=0.3)
    x_TD = torch.randn(13, 8)
    assert max(errors_between(layer_results(moe, x_TD), reference_results(moe, x_TD)).values()) < 1e-5


def test_full_experts_take_no_more() -> None:
    moe = MoE(MoEConfig(**CONFIG, dispatcher="capacity_125"), init_std=0.3)
    x_TD = torch.randn(16, 8) + torch.randn(8)  # which makes some experts popular
    score_TE = (x_TD @ moe.router.gate_ED.t()).softmax(-1)
    assert moe.router(x_TD).count_E.max() > 5
    torch.testing.assert_close(moe(x_TD), token_by_token(x_TD, score_TE, moe, capacity=5))
    assert not torch.allclose(moe(x_TD), token_by_token(x_TD, score_TE, moe, capacity=16))


def test_parameters_of_the_family_are_as_many_as_its_config_says() -> None:
    model = models.family_configs("my_moe")["my_moe_tiny"]().model
    with torch.device("meta"):
        assert sum(p.numel() for p in model.build().parameters()) == model.num_params()


@pytest.mark.parametrize(
    ("backend", "can_round"), [("gathered", False), ("stream", False), ("loop", True), ("auto", True)]
)
def test_verify_leaves_8_bit_cells_out_for_kernels_that_can_not_round(backend: str, can_round: bool) -> None:
    model = replace(TINY_MODEL, moe=replace(TINY_MODEL.moe, experts_backend=backend))
    in_8_bits, usual = (keep_given(Cell(2, ep=2, precision=p), {"experts_backend"}) for p in ("float8", "none"))
    assert (cell_problems(in_8_bits, model) == []) is can_round
    assert cell_problems(usual, model) == []


@pytest.mark.parametrize(
    ("cell", "options", "reference"),
    [
        (
            Cell(2, ep=2, compile="aot_eager", seq_len=13),
            ["--model.moe.experts_backend", "gathered", "--model.moe.dispatcher", "capacity_800"],
            "with spurline.moe.reference in every MoE layer",
        ),
        (
            Cell(2, tp=2, ep=2, seq_len=13),
            ["--module", "my_moe", "--config", "my_moe_tiny"],
            "(the reference supports only the top_k router)",
        ),
    ],
    ids=["experts and dispatcher", "family with its router"],
)
def test_across_ranks_it_computes_the_same(monkeypatch, capsys, cell: Cell, options: list[str], reference: str) -> None:
    monkeypatch.setattr("spurline.tools.verify.QUICK", [cell])
    code = main(["verify", "--json", "--import", "my_moe_pack", *options])
    report = json.loads(capsys.readouterr().out)
    assert [result["problems"] for result in report["cells"]] == [[]]
    assert code == 0
    assert report["reference"].endswith(reference)


def test_family_trains_and_writes(monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["train", "--import", "my_moe_pack", "--module", "my_moe", "--config", "my_moe_tiny"]
    small = ["--training.steps", "2", "--training.seq_len", "32", "--metrics.sample_tokens", "0"]
    assert main([*command, *small, "--checkpoint.enable", "--model.moe.dispatcher", "capacity_125"]) == 0
    assert (
        main(["generate", "outputs/my_moe_tiny", "--prompt", "x", "--max_tokens", "3", "--import", "my_moe_pack"]) == 0
    )
    steps = [json.loads(line) for line in Path("outputs/my_moe_tiny/0001/metrics.jsonl").read_text().splitlines()]
    assert [list(step["expert_load"]) for step in steps] == [["layers.1.moe"]] * 2


def test_installed_package_is_known_to_a_fresh_process(tmp_path: Path) -> None:
    project = (PACK / "pyproject.toml").read_text()
    (entry_points,) = re.findall(r'\[project\.entry-points\."(.*)"\]\n(.*)\n', project)
    info = tmp_path / "my_moe_pack-0.1.0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: my-moe-pack\nVersion: 0.1.0\n")
    info.joinpath("entry_points.txt").write_text("[{}]\n{}\n".format(*entry_points).replace('"', ""))
    code = f"import sys; sys.path[:0] = {[str(tmp_path), str(PACK)]}; from spurline.cli import main;"
    code += "code = main(['configs', '--module', 'my_moe']); assert 'torch' not in sys.modules; sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "my_moe_tiny" in done.stdout


def test_the_guide_shows_the_files_as_they_are() -> None:
    gpt_oss = Path(__file__).parent / "distributed" / "gpt_oss_experts.py"
    files = [path.read_text() for path in [PACK / "pyproject.toml", *PACK.rglob("*.py"), gpt_oss]]
    shown = re.findall(r"^```(?:python|toml)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    assert len(shown) >= 5
    for block in shown:
        assert any(block in text for text in files), block


def test_commands_of_the_guide_are_understood(monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^spurline (.*)$", GUIDE, re.MULTILINE)
    assert len(commands) >= 3
    verified = mock.Mock(return_value=0)
    monkeypatch.setattr("spurline.tools.verify._verify", verified)
    for command in commands:
        argv: list[str] = command.split()
        assert main(argv + ["--dry-run"] * (argv[0] == "train")) == 0
    assert verified.called
