"""Which optimizer updates which parameter: rules by name, defaults, and errors in rules."""

from collections import Counter
from fnmatch import fnmatchcase

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from spurline.config import Optimizer, RunConfig
from spurline.config_io import ConfigError
from spurline.models.deepseek_v3.configs import deepseek_v3_debugmodel
from spurline.models.qwen3_vl.configs import qwen3_vl_debugmodel_moe
from spurline.tools.options import resolve
from spurline.train.optimizer.build import build_optimizer
from spurline.train.optimizer.groups import parameter_groups
from spurline.train.optimizer.schedule import set_learning_rate

with torch.device("meta"):
    MODEL = deepseek_v3_debugmodel().model.build()
    VISION_MODEL = qwen3_vl_debugmodel_moe().model.build()
NAMES = [name for name, _ in MODEL.named_parameters()]


def options_by_name(config: Optimizer, model: nn.Module = MODEL) -> dict[str, dict]:
    """Each parameter's group; fails where one is in no group or in several."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, config)
    counts = Counter(names[parameter] for group in groups for parameter in group["params"])
    assert counts == Counter(names.values())
    return {names[parameter]: group for group in groups for parameter in group["params"]}


def of_muon(config: Optimizer, model: nn.Module = MODEL) -> set[str]:
    return {name for name, group in options_by_name(config, model).items() if group["optimizer"] == "muon"}


def test_muon_is_for_matrices_of_blocks_but_not_for_gates() -> None:
    expected = {name for name in NAMES if name.startswith("layers.") and "norm" not in name and "gate" not in name}
    assert of_muon(Optimizer(name="muon")) == expected
    assert {"layers.1.moe.experts.w1_EFD", "layers.0.attention.wq_a.weight", "layers.1.moe.shared_experts.w2_DF"} <= (
        expected
    )


def test_muon_leaves_patch_and_position_embeddings_of_pictures_to_adamw() -> None:
    found = of_muon(Optimizer(name="muon"), VISION_MODEL)
    assert "vision.layers.0.attention.wqkv.weight" in found
    assert not {"vision.patch.weight", "vision.positions.weight", "embedding.weight", "output.weight"} & found
    assert not [name for name in found if name.endswith("bias")]


def test_without_rules_all_is_adamw_in_two_groups() -> None:
    groups = parameter_groups(MODEL, Optimizer(weight_decay=0.3))
    assert [(group["optimizer"], group["weight_decay"]) for group in groups] == [("adamw", 0.3), ("adamw", 0.0)]


def test_first_rule_that_matches_counts() -> None:
    config = Optimizer(
        lr=0.5, groups=("layers.1.* lr_factor=0.25", "*.experts.* optimizer=muon lr_factor=3 momentum=0.5")
    )
    options = options_by_name(config)
    assert options["layers.1.moe.experts.w1_EFD"]["optimizer"] == "adamw"
    assert options["layers.1.moe.experts.w1_EFD"]["lr_factor"] == 0.25
    assert options["layers.2.moe.experts.w1_EFD"]["optimizer"] == "muon"
    assert options["layers.2.moe.experts.w1_EFD"]["momentum"] == 0.5
    assert options["layers.2.moe.experts.w1_EFD"]["lr"] == 1.5
    assert options["embedding.weight"]["lr_factor"] == 1.0


def test_rule_changes_what_it_names_and_nothing_else() -> None:
    config = Optimizer(groups=("embedding.*|output.* beta1=0.5 eps=1e-3",))
    options = options_by_name(config)
    for name in ("embedding.weight", "output.weight"):
        assert options[name]["betas"] == (0.5, config.beta2)
        assert options[name]["eps"] == 1e-3
        assert options[name]["weight_decay"] == config.weight_decay
    assert options["layers.0.attention.wo.weight"]["betas"] == (config.beta1, config.beta2)


def test_weight_decay_of_a_rule_is_for_vectors_too_and_otherwise_they_have_none() -> None:
    options = options_by_name(Optimizer(groups=("*attention_norm* weight_decay=0.25", "*.ffn_norm.* lr_factor=2")))
    assert options["layers.0.attention_norm.weight"]["weight_decay"] == 0.25
    assert options["layers.0.ffn_norm.weight"]["weight_decay"] == 0.0
    assert options["norm.weight"]["weight_decay"] == 0.0


def test_rule_can_take_parameters_back_from_muon() -> None:
    config = Optimizer(name="muon", groups=("*.attention.* optimizer=adamw",))
    assert of_muon(config) == {name for name in of_muon(Optimizer(name="muon")) if ".attention." not in name}


def test_rate_of_a_group_follows_the_schedule_times_its_factor() -> None:
    optimizer = build_optimizer(MODEL, Optimizer(name="muon", groups=("*.experts.* lr_factor=0.5",)))
    set_learning_rate(optimizer, 0.1)
    rates = {tuple(p.shape): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates[8, 128, 256] == 0.05
    assert rates[264, 256] == 0.1


PATTERNS = ["*", "*.experts.*", "layers.*", "embedding.*", "*norm*", "*.w?_*", "layers.[01].*", "output.weight|norm.*"]


@given(st.lists(st.sampled_from(PATTERNS), unique=True), st.sampled_from(["adamw", "muon"]))
def test_every_parameter_is_in_one_group_and_has_the_options_of_its_first_rule(patterns: list[str], name: str) -> None:
    def first_match(parameter: str) -> int | None:
        found = [i for i, p in enumerate(patterns) if any(fnmatchcase(parameter, part) for part in p.split("|"))]
        return min(found, default=None)

    matches = {parameter: first_match(parameter) for parameter in NAMES}
    groups = tuple(f"{pattern} lr_factor={10 + i}" for i, pattern in enumerate(patterns))
    if set(range(len(patterns))) - set(matches.values()):  # a rule is left with nothing
        with pytest.raises(ConfigError, match="rules before it match all"):
            parameter_groups(MODEL, Optimizer(name=name, groups=groups))
        return
    for parameter, group in options_by_name(Optimizer(name=name, groups=groups)).items():
        match = matches[parameter]
        assert group["lr_factor"] == (1.0 if match is None else 10 + match)


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("", "a rule is a pattern and its options, such as '*.experts.* lr_factor=0.5'"),
        ("*.experts.*", "a rule is a pattern and its options, such as '*.experts.* lr_factor=0.5'"),
        ("lr_factor=0.5 *.experts.*", "a rule is a pattern and its options, such as '*.experts.* lr_factor=0.5'"),
        ("* lr_factor", "'lr_factor' is not OPTION=VALUE"),
        ("* lr_factor= 2", "'lr_factor=' is not OPTION=VALUE"),
        ("* lr_facto=2", "there is no option 'lr_facto': did you mean lr_factor?"),
        (
            "* colour=2",
            "there is no option 'colour': there are optimizer, lr_factor, weight_decay, beta1, beta2, eps, momentum",
        ),
        ("* lr_factor=2 lr_factor=3", "lr_factor is given twice"),
        ("* lr_factor=fast", "lr_factor must be a number, got 'fast'"),
        ("* lr_factor=nan", "lr_factor must be finite and at least 0, got nan"),
        ("* weight_decay=-1", "weight_decay must be finite and at least 0, got -1"),
        ("* beta1=1", "beta1 must be in [0, 1), got 1"),
        ("* optimizer=sgd", "optimizer must be one of adamw, muon, got 'sgd'"),
        ("* optimizer=adamw momentum=0.5", "momentum is an option of muon, not of adamw"),
        ("* optimizer=muon eps=0.5", "eps is an option of adamw, not of muon"),
    ],
)
def test_malformed_rule_is_told_before_anything_runs(rule: str, problem: str) -> None:
    config = RunConfig(model=deepseek_v3_debugmodel().model, optimizer=Optimizer(groups=("* eps=1", rule)))
    assert config.problems() == [f"optimizer.groups {rule!r}: {problem}"]


def problems_with(config: Optimizer) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parameter_groups(MODEL, config)
    return error.value.problems


def test_what_is_wrong_once_the_model_is_known_is_told_together() -> None:
    config = Optimizer(
        groups=(
            "*.expert.* lr_factor=2",
            "layers.0.* optimizer=muon",
            "layers.0.attention.* lr_factor=2",
            "embedding.* momentum=0.9",
        )
    )
    no_match, *others = problems_with(config)
    assert no_match.startswith("optimizer.groups '*.expert.* lr_factor=2': *.expert.* matches no trainable parameter; ")
    assert others == [
        "optimizer.groups 'layers.0.* optimizer=muon': muon takes matrices and stacks of matrices, not"
        " layers.0.attention_norm.weight of shape (256,) (and 3 more); narrow the pattern, or put a rule with"
        " optimizer=adamw before it",
        "optimizer.groups 'layers.0.attention.* lr_factor=2': rules before it match all that layers.0.attention.*"
        " matches; the first match counts",
        "optimizer.groups 'embedding.* momentum=0.9': momentum is an option of muon, but adamw updates"
        " embedding.weight; add optimizer=muon",
    ]


def test_frozen_parameters_are_in_no_group() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].requires_grad_(False)
    grouped = [p for group in parameter_groups(model, Optimizer()) for p in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in model["a"].parameters()}
    with pytest.raises(ConfigError, match=r"b\.\* matches no trainable parameter"):
        parameter_groups(model, Optimizer(groups=("b.* lr_factor=2",)))
    # A rule that freezes what is frozen already, as with --preset finetune and adapters, asks for what is so.
    (group, _) = parameter_groups(model, Optimizer(groups=("b.* lr_factor=0",)))
    assert group["lr_factor"] == 1
    with pytest.raises(ConfigError, match=r"c\.\* matches no trainable parameter"):
        parameter_groups(model, Optimizer(groups=("c.* lr_factor=0",)))


def test_rules_on_a_command_line() -> None:
    rules = ["*.experts.* lr_factor=0.5", "norm.* weight_decay=0.1"]
    preset = ["--module", "deepseek_v3", "--config", "deepseek_v3_debugmodel"]
    command = resolve([*preset, "--optimizer.name", "muon", "--optimizer.groups", *rules])
    assert command.run_config.optimizer.groups == tuple(rules)
    assert command.run_config.optimizer.name == "muon"
