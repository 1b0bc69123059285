"""The `spurline` command line: imports and runs only the module of the requested command."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from spurline.spelling import nearest
from spurline.version import __version__

# name: (help line, "module:function"); the function takes the command's arguments and returns an exit code.
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("Train a model, from a preset or from an earlier run's config.json.", "spurline.tools.train:main"),
    "launch": ("Train on several ranks, here or as a job of a cluster.", "spurline.tools.launch:main"),
    "configs": ("List the model families and their presets, with parameter counts.", "spurline.tools.configs:main"),
    "generate": ("Generate text from a trained model.", "spurline.tools.generate:main"),
    "checkpoint": ("List, verify, inspect and prune the checkpoints of a run.", "spurline.tools.checkpoint:main"),
    "convert": ("Import a Hugging Face model, or export a checkpoint as one.", "spurline.tools.convert:main"),
    "replay": ("Take a step of a run again, and find where it stops being finite.", "spurline.tools.replay:main"),
    "data": ("Tokenize data ahead of training, and verify the result.", "spurline.tools.data:main"),
    "tokenizer": ("Train or inspect a tokenizer.", "spurline.tools.tokenizer:main"),
    "report": ("Write an HTML report of one run, or a comparison of several.", "spurline.tools.report:main"),
    "lr-find": ("Try learning rates at the run's batch size, and suggest one.", "spurline.tools.lr_find:main"),
    "routing": ("Show which experts of a trained model fire on which text.", "spurline.tools.routing:main"),
    "plan": ("Predict memory, bytes and time of a step on a cluster.", "spurline.tools.plan:main"),
    "audit": ("Show what a step does that an accelerator waits for.", "spurline.tools.audit:main"),
    "doctor": ("Show the environment: versions, devices, backends, compilers.", "spurline.tools.doctor:main"),
    "bench": ("Benchmark the MoE layer and the training step against peers.", "spurline.tools.bench:main"),
    "verify": ("Check all training modes against the reference, on CPU ranks.", "spurline.tools.verify:main"),
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
        near = nearest(name, COMMANDS)
        hint = f"Did you mean {near}?" if near else f"Commands: {', '.join(COMMANDS)}"
        print(f"spurline: unknown command {name!r}. {hint}", file=sys.stderr)
        return 2
    module, function = COMMANDS[name][1].split(":")
    return getattr(import_module(module), function)(rest)
