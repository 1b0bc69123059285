"""The `spurline` command: finds the command that was asked for, and loads nothing else."""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from importlib import import_module

from spurline.version import __version__

# name: (one line for the help, "module:function"); the function takes the command's arguments and returns an exit code.
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("Train a model, from a preset or from an earlier run's config.json.", "spurline.tools.train:main"),
    "configs": ("List the model families and their presets, with parameter counts.", "spurline.tools.configs:main"),
    "generate": ("Have the model of a run write on after a prompt.", "spurline.tools.generate:main"),
    "checkpoint": ("List, check, look into and remove the checkpoints of a run.", "spurline.tools.checkpoint:main"),
    "convert": ("Read a Hugging Face model, or write a checkpoint as one.", "spurline.tools.convert:main"),
    "data": ("Prepare data for training, and check what was prepared.", "spurline.tools.data:main"),
    "tokenizer": ("Train a tokenizer, or look at one.", "spurline.tools.tokenizer:main"),
    "report": ("Write one HTML page about one run, or several together.", "spurline.tools.report:main"),
    "doctor": ("Say what is installed and what works here.", "spurline.tools.doctor:main"),
    "bench": ("Measure the layer and the step beside installed peers.", "spurline.tools.bench:main"),
    "verify": ("Check that every way to train equals the reference, on CPU ranks.", "spurline.tools.verify:main"),
}

HELP = """\
Spurline trains mixture-of-experts models, from one CPU to a GPU cluster.

usage: spurline COMMAND [options]

commands
{commands}

examples
  spurline configs
  spurline train --module deepseek_v3 --config deepseek_v3_debugmodel
  spurline train --module deepseek_v3 --config deepseek_v3_debugmodel --dry-run

`spurline COMMAND --help` explains a command, `spurline --version` says which
version this is."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code."""
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `spurline ... | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(argv: list[str]) -> int:
    name, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        print(HELP.format(commands="\n".join(f"  {name:<{width}}  {about}" for name, (about, _) in COMMANDS.items())))
        return 0
    if name in ("-V", "--version"):
        print(f"spurline {__version__}")
        return 0
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Commands: {', '.join(COMMANDS)}"
        print(f"spurline: no such command {name!r}. {hint}", file=sys.stderr)
        return 2
    module, function = COMMANDS[name][1].split(":")
    return getattr(import_module(module), function)(rest)
