"""Commands with subcommands, such as `spurline data prepare`. Torch-free."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from spurline.spelling import did_you_mean
from spurline.tools.console import complain, run_command
from spurline.tools.parsing import parse, take_arguments, wants_help


@dataclass(frozen=True)
class Subcommand:
    about: str
    """Summary for the list of commands."""
    argument: str
    """The positional argument: FOLDER, or SOURCE ... if it may be repeated."""
    description: str
    options: Any
    """A dataclass instance with the default options."""
    run: Callable[[list[str], Any], int]
    """Takes arguments and options, returns the exit code."""


def run_subcommand(prog: str, subcommands: dict[str, Subcommand], argv: list[str]) -> int:
    """Parse and run a subcommand, or print all errors; returns the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_help(prog, subcommands))
        return 0
    if argv[0] not in subcommands:
        choices = ", ".join(subcommands)
        return complain(prog, [f"there is no {argv[0]!r}{did_you_mean(argv[0], subcommands)} Choose from: {choices}"])
    prog, subcommand = f"{prog} {argv[0]}", subcommands[argv[0]]
    arguments, rest = take_arguments(argv[1:], subcommand.options)
    shown = f"{prog} {subcommand.argument}" if wants_help(rest) else prog
    options, problems = parse(type(subcommand.options), subcommand.options, rest, shown, subcommand.description)
    if not arguments:
        example = re.search(rf"^  ({re.escape(prog)} .+?) *$", subcommand.description, re.MULTILINE)
        problems.append(f"{subcommand.argument.split()[0]} is missing" + (f", as in {example[1]}" if example else ""))
    if len(arguments) > 1 and not subcommand.argument.endswith("..."):
        problems.append(f"expected one {subcommand.argument}, got {len(arguments)}: {' '.join(arguments)}")
    if problems:
        return complain(prog, problems)

    def run() -> int:
        with _exit_on_sigterm():
            return subcommand.run(arguments, options)

    return run_command(prog, run, arguments[0], reword=with_own_options)


def _help(prog: str, subcommands: dict[str, Subcommand]) -> str:
    width = max(map(len, subcommands))
    lines = [f"usage: {prog} COMMAND ...", "", "commands"]
    lines += [f"  {name:<{width}}  {subcommand.about}" for name, subcommand in subcommands.items()]
    return "\n".join([*lines, "", f"`{prog} COMMAND --help` shows the options of a command."])


def with_own_options(message: str) -> str:
    """Replace `data.weights` and the like in a message by the option names of the data tools, `--weights`."""
    message = re.sub(r"\bdata\.path:? ", "", message)
    return re.sub(r"\bdata\.(pattern|text_field|tokenizer|weights)\b", r"--\1", message)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, so that worker processes and temporary files are cleaned up."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
