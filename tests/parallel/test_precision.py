"""Which layers multiply in 8 bits: chosen by name, listed, and refused where they can't."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from spurline import MoE, MoEConfig
from spurline.config import Precision
from spurline.parallel import precision
from spurline.parallel.precision import convert_layers, converted_layers
from spurline.testing.tiny import tiny_model

CPU = torch.device("cpu")


def build(section: Precision, device: torch.device = CPU, dtype: torch.dtype = torch.bfloat16, **model: Any) -> Any:
    with torch.device("meta"):
        built = tiny_model(**model).build()
    convert_layers(built, section, device, dtype)
    return built


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that has 8-bit matmuls, with all packages."""
    monkeypatch.setattr(precision, "lacks_8_bit_products", lambda device, recipe: "")
    monkeypatch.setattr(precision, "has_torchao", lambda: True)
    monkeypatch.setattr(precision, "missing_packages", list)
    return torch.device("xpu")


def test_by_default_blocks_are_converted_and_nothing_else() -> None:
    model = build(Precision(recipe="float8"))
    found = converted_layers(model)
    assert found["layers.*.moe.experts"] == found["layers.*.moe.shared_experts"] == 2
    assert found["layers.*.attention.wo"] == 3
    kinds = {type(module).__name__ for module in model.modules() if getattr(module, "precision", None)}
    assert kinds == {"Linear", "SwiGLUExperts", "SharedExperts"}
    assert not any(name.startswith(("output", "embedding")) or "router" in name for name in found)


def test_without_a_recipe_nothing_is_converted() -> None:
    assert not converted_layers(build(Precision()))


def test_patterns_choose_layers_by_name() -> None:
    found = converted_layers(build(Precision(recipe="mxfp8", layers=("*.experts|output", "layers.1.attention.wo"))))
    assert found == {"layers.*.moe.experts": 2, "output": 1, "layers.*.attention.wo": 1}


@pytest.mark.parametrize("pattern", ["lm_head", "layers.*.router", "norm", "layers.7.*"])
def test_a_pattern_without_a_layer_is_an_error(pattern: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"precision.layers {pattern!r} names no layer")):
        build(Precision(recipe="float8", layers=("layers.*", pattern)))


def test_an_alternative_without_a_layer_is_an_error() -> None:
    """Else a head that was renamed would stay in 16 bits without a word."""
    message = "precision.layers 'lm_head' (of '*.experts|lm_head') names no layer that can be converted"
    with pytest.raises(ValueError, match=re.escape(message)):
        build(Precision(recipe="float8", layers=("*.experts|lm_head",)))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"grad_dtype": "e5m2"}, "gradients of e4m3 on an accelerator, not e5m2"),
        ({"layers": ("*.experts",)}, r"w1_EFD has shape \(8, 16, 24\), and float8 needs .* multiples of 16 on"),
        ({"layers": ("*.attention.wo",)}, r"wo.weight has shape \(24, 16\), and float8 needs .* multiples of 16 on"),
        ({"recipe": "mxfp8", "layers": ("*.attention.wo",)}, "mxfp8 needs widths that are multiples of 32 on"),
        ({"recipe": "mxfp8", "layers": ("*.experts",)}, "mxfp8 needs widths that are multiples of 128 on"),
    ],
)
def test_what_an_accelerator_lacks_is_told(accelerator: torch.device, changes: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        build(Precision(**({"recipe": "float8"} | changes)), accelerator, dim=24)


def test_a_device_without_8_bit_matmuls_is_told(accelerator: torch.device, monkeypatch) -> None:
    monkeypatch.setattr(precision, "lacks_8_bit_products", lambda device, recipe: "needs compute capability 9.x")
    with pytest.raises(ValueError, match=r"precision\.recipe float8 needs compute capability 9\.x"):
        build(Precision(recipe="float8"), accelerator)


@pytest.mark.parametrize("recipe", ["float8", "mxfp8"])
def test_an_accelerator_needs_bfloat16_activations(accelerator: torch.device, recipe: str) -> None:
    line = f"^precision.recipe {recipe} needs --training.dtype bfloat16 on an accelerator, or --precision.emulate$"
    section = Precision(recipe=recipe, layers=("*.wo",))
    with pytest.raises(ValueError, match=line):
        build(section, accelerator, torch.float32, dim=32, v_head_dim=8)
    build(section, accelerator, dim=32, v_head_dim=8)
    build(section, CPU, torch.float32)


def test_experts_and_linear_layers_have_their_own_multiples(accelerator: torch.device) -> None:
    moe, wide = {"hidden_dim": 128}, {"dim": 128, "v_head_dim": 8}
    model = build(Precision(recipe="mxfp8", layers=("*experts", "*.wo")), accelerator, moe=moe, **wide)
    assert converted_layers(model) == {
        "layers.*.moe.experts": 2,
        "layers.*.moe.shared_experts": 2,
        "layers.*.attention.wo": 3,
    }
    with pytest.raises(ValueError, match=r"moe\.experts\.w1_EFD .* multiples of 128"):
        build(Precision(recipe="mxfp8", layers=("*experts",)), accelerator, moe={"hidden_dim": 96}, **wide)


def test_biases_and_adapters_may_have_any_width(accelerator: torch.device) -> None:
    with torch.device("meta"):
        experts = MoE(MoEConfig(dim=16, hidden_dim=16, num_experts=6, experts="clamped_swiglu")).experts
    experts.add_adapter("w1_EFD", rank=3, scale=1.0)
    model = torch.nn.ModuleDict({"experts": experts})
    convert_layers(model, Precision(recipe="float8", layers=("experts",)), accelerator, torch.bfloat16)
    assert experts.precision.native


def test_packages_of_mxfp8_experts_are_named_in_a_line(accelerator: torch.device, monkeypatch) -> None:
    monkeypatch.setattr(precision, "missing_packages", lambda: ["cuda-python", "apache-tvm-ffi"])
    moe, wide = {"hidden_dim": 128}, {"dim": 128, "v_head_dim": 8}
    line = (
        "mxfp8 needs more packages for layers.1.moe.experts on an accelerator: pip install cuda-python apache-tvm-ffi$"
    )
    with pytest.raises(ValueError, match=line):
        build(Precision(recipe="mxfp8", layers=("*.experts",)), accelerator, moe=moe, **wide)
    build(Precision(recipe="float8", layers=("*.experts",)), accelerator, moe=moe, **wide)
    build(Precision(recipe="mxfp8", layers=("*.wo",)), accelerator, moe=moe, **wide)


def test_without_torchao_the_line_says_what_to_install(accelerator: torch.device, monkeypatch) -> None:
    monkeypatch.setattr(precision, "has_torchao", lambda: False)
    with pytest.raises(ValueError, match="pip install 'spurline\\[lowprecision\\]'"):
        build(Precision(recipe="float8"), accelerator)


def test_emulation_on_an_accelerator_needs_neither(monkeypatch) -> None:
    monkeypatch.setattr(precision, "lacks_8_bit_products", lambda device, recipe: "nothing")
    model = build(Precision(recipe="mxfp8", emulate=True), torch.device("xpu"), torch.float32)
    converted = [module.precision for module in model.modules() if getattr(module, "precision", None)]
    assert converted
    assert not any(precision.native for precision in converted)


SEEDS = range(4)


@pytest.fixture(scope="module")
def late_losses(tmp_path_factory) -> dict[tuple[str, int], float]:
    """The mean of the last 50 of 300 losses, by recipe and seed; a single step's loss depends on its batch."""

    def run(recipe: str, seed: int) -> float:
        folder = tmp_path_factory.mktemp("run") / "out"
        command = [sys.executable, "-m", "spurline", "train", "--module", "deepseek_v3"]
        command += ["--config", "deepseek_v3_debugmodel", "--training.steps", "300", "--training.seed", str(seed)]
        command += ["--training.threads", "1", "--metrics.log_interval", "1"]
        command += ["--precision.recipe", recipe, "--job.dump_folder", str(folder)]
        subprocess.run(command, check=True, capture_output=True)
        with open(folder / "metrics.jsonl") as lines:
            losses = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
        assert len(losses) == 300
        return sum(losses[-50:]) / 50

    runs = [(recipe, seed) for seed in SEEDS for recipe in ("none", "float8", "mxfp8")]
    with ThreadPoolExecutor(2) as pool:  # one thread each
        return dict(zip(runs, pool.map(lambda of: run(*of), runs), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["float8", "mxfp8"])
def test_training_in_8_bits_learns_what_float32_learns(recipe: str, late_losses: dict[tuple[str, int], float]) -> None:
    """Within 2% in the mean over seeds.

    A single seed can't tell: with a learning rate that is larger by a millionth, a float32 run ends up to 2% away.
    """
    changes = [late_losses[recipe, seed] / late_losses["none", seed] - 1 for seed in SEEDS]
    mean = sum(changes) / len(changes)
    print(f"{recipe}: {', '.join(f'{change:+.2%}' for change in changes)}, in the mean {mean:+.2%}")  # with `pytest -s`
    assert abs(mean) <= 0.02, changes
