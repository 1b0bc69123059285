from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline import typed_json
from spurline.config import RunConfig, Training
from spurline.config_io import ConfigError, load, save
from spurline.models.deepseek_v3.configs import DeepSeekV3Config, deepseek_v3_debugmodel
from spurline.typed_json import expected

NAMES = ("deepseek_v3", "deepseek_v3_debugmodel")


def any_value(hint: Any) -> st.SearchStrategy[Any]:
    """Every value of a type of config, sensible or not."""
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint) | ({"model": DeepSeekV3Config} if hint is RunConfig else {})
        return st.builds(hint, **{f.name: any_value(hints[f.name]) for f in dataclasses.fields(hint)})
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is UnionType:
        return st.one_of([any_value(part) for part in get_args(hint)])
    if get_origin(hint) is tuple:
        return st.lists(any_value(get_args(hint)[0]), max_size=3).map(tuple)
    finite = st.floats(allow_nan=False, allow_infinity=False)
    return {
        int: st.integers(-(2**63), 2**63 - 1),
        float: finite | st.sampled_from([1e-8, 0.1, 3e-4, 5e-324]),
        bool: st.booleans(),
        str: st.text(),
        NoneType: st.none(),
    }[hint]


@settings(max_examples=50)
@given(any_value(RunConfig))
def test_config_comes_back_exactly(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("run") / "config.json"
    save(path, *NAMES, config)
    assert load(path) == (*NAMES, config)


def test_float_comes_back_as_a_float(tmp_path):
    content = saved(tmp_path)
    content["optimizer"]["lr"] = 1
    lr = load(write(tmp_path, content))[2].optimizer.lr
    assert (lr, type(lr)) == (1.0, float)


def saved(folder: Path) -> dict[str, Any]:
    save(folder / "config.json", *NAMES, deepseek_v3_debugmodel())
    return json.loads((folder / "config.json").read_text())


def write(folder: Path, content: Any) -> Path:
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder / "config.json"


def problems(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(path)
    assert str(error.value) == "\n".join(error.value.problems)
    return [problem.removeprefix(f"{path}: ") for problem in error.value.problems]


def test_file_reads_as_sections_with_the_names_first(tmp_path):
    content = saved(tmp_path)
    assert list(content)[:3] == ["module", "config", "job"]
    assert content["model"]["moe"]["top_k"] == deepseek_v3_debugmodel().model.moe.top_k


def test_everything_that_does_not_fit_is_told_at_once(tmp_path):
    content = saved(tmp_path)
    content["training"]["stepz"] = content["training"].pop("steps")
    content["training"]["dtype"] = "float8"
    content["training"]["seed"] = 10**400
    content["compile"]["enable"] = 1
    content["optimizer"]["lr"] = "fast"
    content["model"]["moe"]["top_k"] = True
    content["model"]["moe"]["num_limited_groups"] = 1.5
    content["debug"] = []
    del content["metrics"]
    content["extra"] = {"a": 1}
    assert problems(write(tmp_path, content)) == [
        "extra: no such option.",
        "training.stepz: no such option. Did you mean training.steps?",
        "training.steps is missing",
        f"training.seed: 1{'0' * 36}... does not fit into 64 bits",
        'training.dtype: "float8" is not one of float32, bfloat16',
        'optimizer.lr: "fast" is not a number',
        "compile.enable: 1 is not true or false",
        "metrics is missing",
        "debug: [] is not a section (JSON object)",
        "model.moe.top_k: true is not an integer",
        "model.moe.num_limited_groups: 1.5 is not an integer or null",
    ]


def test_broken_json_says_where(tmp_path):
    path = write(tmp_path, '{\n  "module": "deepseek_v3",\n  oops\n}')
    assert problems(path) == [
        "not JSON: Expecting property name enclosed in double quotes at line 3, column 3",
    ]


def test_json_that_is_no_object(tmp_path):
    assert problems(write(tmp_path, [1, 2])) == ["a config file must be an object of sections, got [1, 2]"]
    (problem,) = problems(write(tmp_path, list(range(100))))
    assert problem.endswith("got [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11...")


def test_file_that_is_not_text(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe")
    assert problems(path) == ["not JSON: the file is not UTF-8 text"]


def test_file_that_is_not_there(tmp_path):
    assert problems(tmp_path / "none.json") == ["can't read the config file: No such file or directory"]


@pytest.mark.parametrize(
    ("module", "config", "problem"),
    [
        (None, NAMES[1], "module is missing. Choose from: "),
        ("deepseek_v4", NAMES[1], "module: there is no 'deepseek_v4'. Did you mean deepseek_v3?"),
        (
            NAMES[0],
            "deepseek_v3_debug",
            "config: there is no 'deepseek_v3_debug'. Did you mean deepseek_v3_debugmodel?",
        ),
        (NAMES[0], 3, "config: there is no 3. Choose from: "),
    ],
)
def test_names_must_be_of_a_preset(tmp_path, module, config, problem):
    content = saved(tmp_path) | {"module": module, "config": config}
    (found,) = problems(write(tmp_path, content))
    assert found.startswith(problem)


def test_config_of_a_hugging_face_folder_says_what_to_do_with_it(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 32}')
    with pytest.raises(ConfigError, match=r"config\.json is of a Hugging Face model: `spurline convert from-hf` makes"):
        load(tmp_path / "config.json")


def test_failed_save_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    saved(tmp_path)

    def refuse(*args):
        raise OSError("no")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no"):
        save(tmp_path / "config.json", *NAMES, replace(deepseek_v3_debugmodel(), training=Training(steps=1)))
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["config.json"]
    assert load(tmp_path / "config.json") == (*NAMES, deepseek_v3_debugmodel())


@dataclass(frozen=True)
class Lists:
    any_length: tuple[int, ...]
    pair: tuple[int, str]
    floats: list[float]
    level: Literal[1, 2] = 1


def convert(content: dict[str, Any]) -> tuple[Any, list[str]]:
    found: list[str] = []
    return typed_json.convert(Lists, content, "x", found), found


def test_lists_and_tuples_keep_their_type():
    content = {"any_length": [1, 2, 3], "pair": [1, "a"], "floats": [1, 2.5], "level": 2}
    assert convert(content) == (Lists((1, 2, 3), (1, "a"), [1.0, 2.5], 2), [])
    assert convert(content | {"any_length": [], "floats": []})[0] == Lists((), (1, "a"), [], 2)


def test_wrong_item_of_a_list_is_named():
    assert convert({"any_length": [1, "b"], "pair": [1], "floats": 3, "level": True})[1] == [
        'x.any_length[1]: "b" is not an integer',
        "x.pair: [1] is not a list",
        "x.floats: 3 is not a list",
        "x.level: true is not one of 1, 2",
    ]


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int, "an integer"),
        (float, "a number"),
        (str, "text"),
        (bool, "true or false"),
        (int | None, "an integer or None"),
        (Literal["a", "b"], "one of a, b"),
        (tuple[int, ...], "a list"),
    ],
)
def test_types_in_words(hint, words):
    assert expected(hint) == words


def test_a_file_of_an_earlier_version_means_the_defaults_of_newer_options(tmp_path: Path) -> None:
    """An option added to a section needs ADDED_LATER, or run folders of earlier versions can't be read any more."""
    save(tmp_path / "config.json", *NAMES, deepseek_v3_debugmodel())
    content = json.loads((tmp_path / "config.json").read_text())
    del content["comm"], content["checkpoint"]["sign_key_file"], content["training"]["device"]
    for name in ("fsdp_reshard_after_forward", "fsdp_reduce_each_micro_batch"):
        del content["parallelism"][name]
    for name in ("mixed_precision_param", "mixed_precision_reduce"):
        del content["training"][name]
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert load(tmp_path / "config.json") == (*NAMES, deepseek_v3_debugmodel())
