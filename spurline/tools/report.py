"""`spurline report`: an HTML report of one run, or a comparison of several. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from spurline.files import write_file
from spurline.tools.console import complain
from spurline.tools.parsing import described, parse
from spurline.tools.subcommands import take_arguments

PROG = "spurline report"
DESCRIPTION = """\
Write an HTML report of one run, or a comparison of several: loss curves, throughput,
step time by phase, expert load, samples, warnings and configs. The report is a
single self-contained file.

examples
  spurline report outputs/my_run                        writes outputs/my_run/report.html
  spurline report outputs/a outputs/b --out compare.html

A report can be written while a run is training."""


@dataclass(frozen=True)
class Command:
    out: Annotated[str, described("FILE")] = ""
    """Output file (default: report.html in the folder of the first run)."""


def main(argv: list[str]) -> int:
    folders, options = take_arguments(argv, Command())
    command, problems = parse(Command, Command(), options, f"{PROG} RUN [RUN2 ...]", DESCRIPTION)
    if not folders:
        problems.append("RUN is missing: give a run folder, as in spurline report outputs/my_run")
    if problems:
        return complain(PROG, problems)
    try:
        path = write_report(folders, command.out)
    except ValueError as error:
        return complain(PROG, [str(error)])
    except OSError as error:
        return complain(PROG, [f"{error.filename or folders[0]}: {error.strerror or error}"])
    print(f"report: {path}")
    return 0


def write_report(folders: list[str], out: str = "") -> Path:
    """Write the report of the runs in `folders` and return its path; raises a ValueError for unreadable runs."""
    from spurline.report.page import make_page
    from spurline.report.read import read_runs

    page = make_page(read_runs(folders))
    path = Path(out) if out else Path(folders[0]) / "report.html"
    if path.is_dir():
        raise ValueError(f"--out {path} is a folder: give a file name")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    # A name or a sample may have characters that no file can hold.
    write_file(path, page.encode("utf-8", "replace").decode("utf-8"))
    return path
