"""Commands that have commands of their own, such as `spurline data prepare`. Free of torch."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from spurline.config_io import did_you_mean
from spurline.tools.console import complain
from spurline.tools.parsing import option_types, parse, split_options, wants_help
from spurline.tools.train import raised_by_us


@dataclass(frozen=True)
class Subcommand:
    about: str
    """One line for the list of commands."""
    argument: str
    """What stands before the options, such as FOLDER, or SOURCE ... if there may be several."""
    description: str
    options: Any
    """A dataclass instance with the defaults."""
    run: Callable[[list[str], Any], int]
    """Takes the arguments and the options, returns the exit code."""


def run_subcommand(prog: str, subcommands: dict[str, Subcommand], argv: list[str]) -> int:
    """Understand and run one of a command's own commands, or tell what is wrong."""
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
        problems.append(f"{subcommand.argument.split()[0]} is missing")
    if len(arguments) > 1 and not subcommand.argument.endswith("..."):
        problems.append(f"it takes one {subcommand.argument}, got {' '.join(arguments)}")
    if problems:
        return complain(prog, problems)
    try:
        with _ended_in_order():
            return subcommand.run(arguments, options)
    except ValueError as error:
        if not raised_by_us(error):
            raise
        return complain(prog, [with_own_options(str(error))])
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130


def _help(prog: str, subcommands: dict[str, Subcommand]) -> str:
    width = max(map(len, subcommands))
    lines = [f"usage: {prog} COMMAND ...", "", "commands"]
    lines += [f"  {name:<{width}}  {subcommand.about}" for name, subcommand in subcommands.items()]
    return "\n".join([*lines, "", f"`{prog} COMMAND --help` explains a command."])


def take_arguments(argv: list[str], options: Any) -> tuple[list[str], list[str]]:
    """What is no option nor the value of one, wherever it stands; and the options with their values."""
    types = option_types(options)
    arguments, given = split_options([token for token in argv if token != "-h"])
    rest = ["--help"] if "-h" in argv else []
    for option in given:
        num_values = 0 if types.get(option.name) is bool else 1
        further = option.values[num_values:]
        arguments += further
        rest += option.tokens[: len(option.tokens) - len(further)]
    return arguments, rest


def with_own_options(message: str) -> str:
    """Tools for data name their options as `spurline train` does, without the section."""
    message = re.sub(r"\bdata\.path:? ", "", message)
    return re.sub(r"\bdata\.(pattern|text_field|tokenizer|weights)\b", r"--\1", message)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Let SIGTERM unwind as Ctrl-C does, so that worker processes and unfinished files go away."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
