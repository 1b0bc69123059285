"""`spurline completion`: scripts that let a shell complete commands, options and presets. Torch-free.

The scripts call `spurline completion words -- ...` for the candidates, so they never go out of date.
"""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

from spurline.config import RunConfig
from spurline.models import family_configs, family_names
from spurline.tools.commands import COMMANDS
from spurline.tools.console import complain
from spurline.tools.options import UnknownModel
from spurline.tools.parsing import option_types

PROG = "spurline completion"
HELP = """\
usage: spurline completion bash|zsh|fish

Print a script that lets the shell complete commands, options, presets and files.

  bash   eval "$(spurline completion bash)"           in ~/.bashrc
  zsh    eval "$(spurline completion zsh)"            in ~/.zshrc, after compinit
  fish   spurline completion fish | source            in ~/.config/fish/config.fish"""
SCRIPTS = {
    "bash": """\
_spurline() {
    local IFS=$'\\n'
    COMPREPLY=($(spurline completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    if [ ${#COMPREPLY[@]} -eq 0 ]; then COMPREPLY=($(compgen -f -- "${COMP_WORDS[COMP_CWORD]}")); fi
}
complete -o filenames -F _spurline spurline""",
    "zsh": """\
_spurline() {
    local -a found
    found=(${(f)"$(spurline completion words -- "${words[@]:1:$((CURRENT-1))}" 2>/dev/null)"})
    if (( ${#found} )); then compadd -- $found; else _files; fi
}
compdef _spurline spurline""",
    "fish": """\
function __spurline_words
    set -l words (commandline -opc) (commandline -ct)
    spurline completion words -- $words[2..-1] 2>/dev/null
end
complete -c spurline -a '(__spurline_words)'""",
}
TRAINS = ("train", "lr-find", "plan", "audit", "launch")
"""Commands that take the options of a run."""


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if argv[0] == "words":
        print("\n".join(candidates(argv[2:] if argv[1:2] == ["--"] else argv[1:])))
        return 0
    if argv[0] not in SCRIPTS or len(argv) > 1:
        return complain(PROG, [f"give one of {', '.join(SCRIPTS)}, got {' '.join(argv)}"])
    print(SCRIPTS[argv[0]])
    return 0


def candidates(words: list[str]) -> list[str]:
    """Completions for the last word of a command line, which may be empty; none where a file is expected."""
    *before, current = words or [""]
    if not before:
        return _beginning(current, [*COMMANDS, "help"])
    command, previous = before[0], before[-1]
    if command not in COMMANDS:
        return []
    if previous in ("--config", "--module"):
        known = [name for family in family_names() for name in family_configs(family)]
        return _beginning(current, known if previous == "--config" else family_names())
    if current.startswith("-"):
        return _beginning(current, [f"--{name}" for name in _options(command)] + ["--help"])
    return _beginning(current, _subcommands(command)) if len(before) == 1 else []


def _beginning(current: str, known: list[str]) -> list[str]:
    return sorted({word for word in known if word.startswith(current)})


def _subcommands(command: str) -> list[str]:
    module = _module(command)
    found = getattr(module, "COMMANDS", None)
    if command == "completion":
        return list(SCRIPTS)
    return list(found) if isinstance(found, dict) else ["compare"] if command == "runs" else []


def _options(command: str) -> list[str]:
    """The options of a command, from the dataclasses that parse it."""
    module = _module(command)
    kinds = [kind for kind in vars(module).values() if is_dataclass(kind) and isinstance(kind, type)]
    own = [kind for kind in kinds if kind.__module__ == module.__name__ or kind.__name__ in ("Command", "Options")]
    names = [_option_name(field) for kind in own for field in fields(kind) if field.name != "run_config"]
    if command in TRAINS:
        names += ["module", "config", "config_file", "preset", "import", "dry_run"]
        names += option_types(RunConfig(model=UnknownModel()))
    return [name for name in names if re.fullmatch(r"[a-z][a-z0-9_.]*", name)]


def _option_name(field: Any) -> str:
    return str(field.name).rstrip("_")


def _module(command: str) -> Any:
    return import_module(COMMANDS[command][1].partition(":")[0])
