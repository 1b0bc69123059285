"""Exit codes: one table in the code, the same in the docs."""

import re
from pathlib import Path

from spurline.train.exit_codes import (
    DivergedError,
    ExitCode,
    FolderInUseError,
    LostRankError,
    exit_code_of,
    exit_code_of_signal,
)

DOCS = Path(__file__).parents[2] / "docs" / "reliability.md"


def test_docs_list_every_code():
    section = DOCS.read_text().split("## Exit codes")[1].split("\n## ")[0]
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    assert listed == {*ExitCode} | {129, 130, 138, 143}


def test_errors_have_codes_of_their_own():
    errors = [DivergedError("x"), LostRankError("x"), FolderInUseError("x"), OSError(28, "x"), RuntimeError("x")]
    assert [exit_code_of(error) for error in errors] == [3, 5, 4, 2, 1]
    assert (exit_code_of_signal(15, saved=False), exit_code_of_signal(15, saved=True)) == (143, 75)
