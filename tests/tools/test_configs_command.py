import json

import pytest

from spurline import config_io
from spurline.models import family_names
from spurline.models.deepseek_v3.configs import deepseek_v3_debugmodel
from spurline.tools import configs, train
from spurline.tools.console import human
from spurline.tools.options import resolve

MODEL = deepseek_v3_debugmodel().model
COUNTS = [human(MODEL.num_params()), human(MODEL.num_active_params())]
SUMMARY = deepseek_v3_debugmodel.__doc__


def test_lists_each_preset_with_its_parameters_and_summary(spurline):
    code, out, err = spurline("configs")
    assert (code, err) == (0, "")
    header, *rows = out.splitlines()
    assert header.split() == ["module", "config", "total", "active", "summary"]
    (row,) = [row for row in rows if "deepseek_v3_debugmodel" in row]
    assert row.split(maxsplit=4) == ["deepseek_v3", "deepseek_v3_debugmodel", *COUNTS, SUMMARY]


def test_json_has_exact_counts(spurline):
    code, out, _ = spurline("configs", "--module", "deepseek_v3", "--json")
    assert code == 0
    (entry,) = [entry for entry in json.loads(out) if entry["config"] == "deepseek_v3_debugmodel"]
    assert entry["module"] == "deepseek_v3"
    assert (entry["total"], entry["active"]) == (MODEL.num_params(), MODEL.num_active_params())
    assert entry["summary"] == SUMMARY


def test_module_narrows_the_list(spurline, monkeypatch):
    monkeypatch.setattr(configs, "family_names", lambda: ["deepseek_v3", "other"])
    monkeypatch.setattr(configs, "family_configs", lambda module: {f"{module}_small": deepseek_v3_debugmodel})
    assert "other_small" in spurline("configs").out
    narrowed = spurline("configs", "--module", "other").out
    assert "other_small" in narrowed
    assert "deepseek_v3_small" not in narrowed


def test_unknown_module_and_option_are_told_together(spurline):
    code, out, err = spurline("configs", "--module", "deepseek_v4", "--jsn")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "spurline configs: 2 problems",
        "  --jsn: no such option. Did you mean --json?",
        f"  --module: there is no 'deepseek_v4'. Did you mean deepseek_v3? Choose from: {', '.join(family_names())}",
    ]


NAME = "deepseek_v3_debugmodel"


@pytest.mark.parametrize("argv", [[NAME], ["show", NAME], ["--module", "deepseek_v3", NAME]])
def test_one_preset_is_shown_as_a_dry_run_shows_it(spurline, monkeypatch, argv):
    monkeypatch.setattr(train, "describe_memory", lambda config, world_size: "memory      1 GiB")
    shown = spurline("configs", *argv)
    assert (shown.code, shown.err) == (0, "")
    assert "3.6M total, 1.83M active per token" in shown.out
    assert shown == spurline("train", "--config", NAME, "--dry-run")


def test_one_preset_as_json_is_a_config_file(spurline, tmp_path):
    (tmp_path / "mine.json").write_text(spurline("configs", NAME, "--json").out)
    assert config_io.load(tmp_path / "mine.json") == ("deepseek_v3", NAME, deepseek_v3_debugmodel())
    resolved = resolve(["--config-file", "mine.json"]).run_config
    assert resolved == resolve(["--config", NAME]).run_config


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("deepseek_v3_debug", "there is no preset 'deepseek_v3_debug'. Did you mean deepseek_v3_debugmodel?"),
        (f"--module qwen3 {NAME}", f"there is no {NAME!r}. Did you mean qwen3_debugmodel? Choose from: qwen3_0_6b,"),
        (f"{NAME} qwen3_8b", f"expected one preset, got {NAME} qwen3_8b"),
    ],
)
def test_what_is_no_preset_is_one_line(spurline, argv, told):
    code, out, err = spurline("configs", *argv.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"spurline configs: {told}")


def test_terminal_gets_a_table_with_every_cell(spurline, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    out = spurline("configs").out
    for text in ("module", "deepseek_v3_debugmodel", *COUNTS, SUMMARY.split()[0]):
        assert text in out
    assert max(map(len, out.splitlines())) <= 80


def test_help_explains_the_columns(spurline):
    code, out, _ = spurline("configs", "--help")
    assert code == 0
    assert "those used for one token" in out
    assert "--json" in out
