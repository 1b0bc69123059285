"""`spurline report`: an HTML report of one run, or a comparison of several. Torch-free."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from spurline.files import write_file
from spurline.run_folders import find_run
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
  spurline report outputs/my_run --serve                shows it in a browser, and follows the run

A report can be written while a run is training. With --serve nothing is written: the page is
served on this machine only (127.0.0.1), and updates itself."""


@dataclass(frozen=True)
class Command:
    out: Annotated[str, described("FILE")] = ""
    """Output file (default: report.html in the folder of the first run)."""
    serve: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Serve the page to a browser on this machine, and keep it up to date while runs are training; Ctrl-C stops it."""
    port: Annotated[int, described("N")] = 8765
    """With --serve: port to listen on (0: any that is free)."""


def main(argv: list[str]) -> int:
    folders, options = take_arguments(argv, Command())
    command, problems = parse(Command, Command(), options, f"{PROG} RUN [RUN2 ...]", DESCRIPTION)
    if not folders:
        problems.append("RUN is missing: give a run folder, as in spurline report outputs/my_run")
    if command.serve and command.out:
        problems.append("--out writes a file and --serve does not: give one of the two")
    if not 0 <= command.port < 65_536:
        problems.append(f"--port must be between 0 and 65535, got {command.port}")
    if command.serve:
        problems += [f"{folder}: there is no such run folder" for folder in folders if not Path(folder).is_dir()]
    if problems:
        return complain(PROG, problems)
    if command.serve:
        return _serve([str(find_run(folder)) for folder in folders], command.port)
    print(f"report: {write_report(folders, command.out)}")
    return 0


def _serve(folders: list[str], port: int) -> int:
    from spurline.report.serve import ReportServer

    try:
        server = ReportServer(folders, port)
    except OSError as error:
        reason = error.strerror or error
        return complain(PROG, [f"--port {port} can't be used ({reason}): give another one, or 0 for any that is free"])
    with server:
        print(f"report: {server.address} (on this machine only; Ctrl-C ends it)", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def write_report(folders: list[str], out: str = "") -> Path:
    """Write the report of the runs in `folders` and return its path; raises a ValueError for unreadable runs."""
    from spurline.report.page import make_page
    from spurline.report.read import read_runs

    folders = [str(find_run(folder)) for folder in folders]
    page = make_page(read_runs(folders))
    path = Path(out) if out else Path(folders[0]) / "report.html"
    if path.is_dir():
        raise ValueError(f"--out {path} is a folder: give a file name")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    # A name or a sample may contain characters that UTF-8 can't encode.
    write_file(path, page.encode("utf-8", "replace").decode("utf-8"))
    return path
