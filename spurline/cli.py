"""The `spurline` command line: imports and runs only the module of the requested command."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from spurline.spelling import nearest
from spurline.tools.commands import COMMANDS
from spurline.version import __version__

START = """\
Spurline trains mixture-of-experts models, on one CPU or on many ranks.

three commands to start with
  spurline train --config deepseek_v3_first
                           train a small model on this machine, in two minutes
  spurline generate outputs/deepseek_v3_first --prompt "def "
                           let it write
  spurline runs            list the runs so far

`spurline configs` lists other models, `spurline doctor` what this machine has,
`spurline help` all commands."""

HELP = """\
Spurline trains mixture-of-experts models, on one CPU or on many ranks.

usage: spurline COMMAND [options]

commands
{commands}

examples
  spurline configs
  spurline train --module deepseek_v3 --config deepseek_v3_debugmodel
  spurline train --module deepseek_v3 --config deepseek_v3_debugmodel --dry-run

`spurline COMMAND --help` shows the options of a command, `spurline --version`
the installed version."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv) and return its exit code."""
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe, as in `spurline ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:  # while the modules of the command were imported; later `run_command` has its own line
        print("\n" * sys.stderr.isatty() + "spurline: interrupted", file=sys.stderr)  # a terminal shows ^C
        return 130


def _run(argv: list[str]) -> int:
    if not argv:
        print(START)
        return 0
    if argv[0] == "help" and len(argv) > 1:  # `spurline help train` is `spurline train --help`
        argv = [*argv[1:], "--help"]
    name, rest = argv[0], argv[1:]
    if name in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        print(HELP.format(commands="\n".join(f"  {name:<{width}}  {about}" for name, (about, _) in COMMANDS.items())))
        return 0
    if name in ("-V", "--version"):
        print(f"spurline {__version__}")
        return 0
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        hint = f"Did you mean {near}?" if near else f"Commands: {', '.join(COMMANDS)}"
        print(f"spurline: unknown command {name!r}. {hint}", file=sys.stderr)
        return 2
    module, function = COMMANDS[name][1].split(":")
    from spurline.tools.console import run_command  # takes a moment to import

    return run_command(f"spurline {name}", lambda: getattr(import_module(module), function)(rest))
