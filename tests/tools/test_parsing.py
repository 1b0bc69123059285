from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
import tyro

from spurline.tools import parsing
from spurline.tools.parsing import Given, option_types, parse, split_options


@dataclass(frozen=True)
class Inner:
    switch: bool = False
    mode: Literal["fast", "slow"] = "fast"
    limit: int | None = None
    sizes: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Options:
    text: str = "hello"
    rate: float = 0.5
    once: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    for_: Annotated[str, tyro.conf.arg(name="for")] = ""
    part: Inner = field(default_factory=Inner)
    names: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()


def read(*argv: str) -> tuple[Options, list[str]]:
    return parse(Options, Options(), list(argv), "prog", "What it does.")


def test_split_keeps_values_with_their_option():
    before, given = split_options(["x", "--a.b-c", "1", "-2", "--d=e=f", "--g"])
    assert before == ["x"]
    assert given == [
        Given("a.b_c", ["1", "-2"], ["--a.b-c", "1", "-2"]),
        Given("d", ["e=f"], ["--d=e=f"]),
        Given("g", [], ["--g"]),
    ]


def test_every_option_has_its_dotted_name_and_type():
    assert option_types(Options()) == {
        "text": str,
        "rate": float,
        "once": bool,
        "for": str,
        "names": str,  # which is given once for each
        "part.switch": bool,
        "part.no_switch": bool,
        "part.mode": Literal["fast", "slow"],
        "part.limit": int | None,
        "part.sizes": tuple[int, ...],
    }


def test_options_replace_the_default():
    argv = [
        "--text=-x",
        "--rate",
        "2",
        "--once",
        "--for",
        "me",
        "--part.switch",
        "--part.limit",
        "-3",
        "--part.sizes",
        "4",
    ]
    assert read(*argv) == (Options("-x", 2.0, True, "me", Inner(True, "fast", -3, (4,))), [])


def test_flag_can_be_switched_off():
    default = Options(part=Inner(switch=True))
    assert parse(Options, default, ["--part.no-switch"], "prog", "") == (Options(), [])
    assert parse(Options, default, ["--part.no_switch"], "prog", "") == (Options(), [])


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--rate", "abc"], "--rate: 'abc' is not a number"),
        (["--rate=abc"], "--rate: 'abc' is not a number"),
        (["--rate"], "--rate: needs a value, a number"),
        (["--part.mode", "medium"], "--part.mode: 'medium' is not one of fast, slow"),
        (["--part.limit", "1.5"], "--part.limit: '1.5' is not an integer or None"),
        (["--part.sizes", "1", "x"], "--part.sizes: '1' 'x' is not a list"),
        (["--part.sizes"], '--part.sizes: needs a value, a list ("" for none)'),
        (["--names"], "--names: needs a value, text"),
        (["--names", "a", "b"], "--names: takes one value, got 'a' 'b'. Quote values that contain spaces"),
        (["--part.switch", "True"], "--part.switch: takes no value, got 'True'. Its opposite is --part.no_switch"),
        (["--part.no-switch=1"], "--part.no-switch: takes no value, got '1'. Its opposite is --part.switch"),
        (["--once", "yes"], "--once: takes no value, got 'yes'"),
        (["--no-once"], "--no-once: no such option. Did you mean --once?"),
        (["--text", "two", "words"], "--text: takes one value, got 'two' 'words'. Quote values that contain spaces"),
        (["--text", "-x"], "--text: write --text=-x for a value that starts with a dash"),
        (["--rat", "1"], "--rat: no such option. Did you mean --rate?"),
        (["--part.swich"], "--part.swich: no such option. Did you mean --part.switch?"),
        (["--limit", "1"], "--limit: no such option. Did you mean --part.limit?"),
        (["--zzz=1"], "--zzz: no such option (prog --help lists them)"),
        (["word"], "unexpected argument 'word': options have the form --section.option value"),
    ],
)
def test_mistake_is_told_in_words(argv, problem, capsys):
    assert read(*argv) == (Options(), [problem])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("argv", [["--part.sizes", ""], ["--part.sizes="]])
def test_an_empty_value_is_an_empty_list(argv):
    assert read(*argv) == (Options(part=Inner(sizes=())), [])


def test_an_option_that_is_repeated_takes_a_value_each_time():
    assert read("--names", "a", "--names=") == (Options(names=("a", "")), [])
    assert read("--names", "a", "--names") == (Options(names=("a",)), ["--names: needs a value, text"])


def test_sound_options_are_taken_when_others_are_not():
    options, problems = read("--rate", "x", "--text", "kept", "--part.mode", "y", "--part.limit", "7")
    assert options == Options(text="kept", part=Inner(limit=7))
    assert len(problems) == 2
    assert read("--rate", "x", "--text=-x")[0] == Options(text="-x")
    assert read("--part.sizes", "--text", "kept")[0] == Options(text="kept")


def test_mistake_only_tyro_sees_is_told_in_its_words(monkeypatch, capsys):
    monkeypatch.setattr(parsing, "_diagnose", lambda default, argv, prog: (argv, []))
    with pytest.raises(SystemExit) as stop:
        read("--rate", "abc")
    assert stop.value.code == 2
    assert "--rate" in capsys.readouterr().err


def test_help_shows_the_default_given(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(Options, Options(text="mine"), ["--rate", "abc", "-h"], "prog", "What it does.")
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "What it does." in out
    assert "(default: mine)" in out
