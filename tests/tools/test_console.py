from pathlib import Path
from unittest.mock import Mock

import pytest

from spurline.config_io import ConfigError
from spurline.hf.folder import find_tensors
from spurline.tools.console import complain, human, human_flops, run_command


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (842, "842"),
        (999.4, "999"),
        (999.5, "1K"),
        (3_683_200, "3.68M"),
        (999_499, "999K"),
        (999_500, "1M"),
        (9.41e9, "9.41B"),
        (1.04e12, "1.04T"),
        (5e15, "5e+03T"),
    ],
)
def test_human_keeps_three_digits(number, text):
    assert human(number) == text


def test_flops_have_metric_prefixes():
    assert human_flops(842) == "842 FLOP"
    assert human_flops(50.2e9) == "50.2 GFLOP"
    assert human_flops(3.3e24) == "3.3 YFLOP"


def test_one_problem_is_one_line(capsys):
    assert complain("spurline train", ["no luck"]) == 2
    assert capsys.readouterr() == ("", "spurline train: no luck\n")


def test_several_problems_are_counted_and_indented(capsys):
    assert complain("spurline train", ["a", "b"]) == 2
    assert capsys.readouterr().err == "spurline train: 2 problems\n  a\n  b\n"


def test_other_ranks_leave_the_word_to_the_first_and_then_speak_for_themselves(capsys, monkeypatch):
    waited = []
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("time.sleep", waited.append)
    assert complain("spurline train", ["no luck"]) == 2
    assert waited == [10.0]
    assert capsys.readouterr().err == "spurline train, rank 3: no luck\n"


def test_first_rank_of_another_node_speaks_at_once(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waited"))
    assert complain("spurline train", ["no luck"]) == 2
    assert capsys.readouterr().err == "spurline train, rank 8: no luck\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError(["no luck"]), "no luck"),
        (FileNotFoundError(2, "No such file or directory", "a.json"), "a.json: No such file or directory"),
        (OSError(28, "No space left on device"), "out: No space left on device"),
        (OSError("odd"), "out: odd"),
    ],
)
def test_error_meant_for_the_user_is_one_line(capsys, error, line):
    assert run_command("spurline x", Mock(side_effect=error), where="out") == 2
    assert capsys.readouterr() == ("", f"spurline x: {line}\n")


def test_error_of_a_command_without_a_file_is_its_reason_alone(capsys):
    assert run_command("spurline x", Mock(side_effect=OSError(28, "No space left on device"))) == 2
    assert capsys.readouterr().err == "spurline x: No space left on device\n"


def test_value_error_of_spurline_is_one_line_and_another_one_a_traceback(capsys):
    assert run_command("spurline x", lambda: len(find_tensors(Path("nowhere")))) == 2
    assert capsys.readouterr().err.startswith("spurline x: nowhere")
    with pytest.raises(ValueError, match="invalid literal"):
        run_command("spurline x", lambda: int("a"))
    with pytest.raises(BrokenPipeError):
        run_command("spurline x", Mock(side_effect=BrokenPipeError))
