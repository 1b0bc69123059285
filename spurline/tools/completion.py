"""`spurline completion`: scripts that let a shell complete commands, options and their values. Torch-free.

The scripts call `spurline completion words -- ...` for the candidates, so they never go out of date.
"""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from typing import Any, Literal, get_args, get_origin

from spurline.config import RunConfig
from spurline.config.presets import PRESETS
from spurline.config_io import preset_names
from spurline.models import family_names
from spurline.tools.commands import COMMANDS
from spurline.tools.console import complain
from spurline.tools.options import UnknownModel
from spurline.tools.parsing import option_types

PROG = "spurline completion"
HELP = """\
usage: spurline completion bash|zsh|fish

Print a script that lets the shell complete commands, options and their values.

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
_UNKNOWN: dict[str, Any] = {"run_config": RunConfig(model=UnknownModel()), "model": UnknownModel()}


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
    if before[:1] == ["help"]:
        before = before[1:]
    if not before:
        return _beginning(current, [*COMMANDS, "help"])
    command, previous = before[0], before[-1]
    if command not in COMMANDS:
        return []
    if previous.startswith("--") and (choices := _values(command, previous[2:].replace("-", "_"))):
        return _beginning(current, choices)
    if current.startswith("-"):
        return _beginning(current, [f"--{name}" for name in _options(command)] + ["--help"])
    return _beginning(current, _subcommands(command)) if len(before) == 1 else []


def _beginning(current: str, known: list[str]) -> list[str]:
    return sorted({word for word in known if word.startswith(current)})


def _subcommands(command: str) -> list[str]:
    found = getattr(_module(command), "COMMANDS", None)
    named = {"completion": list(SCRIPTS), "configs": preset_names(), "runs": ["compare"]}
    return named.get(command) or (list(found) if isinstance(found, dict) else [])


def _values(command: str, option: str) -> list[str]:
    """What an option can be, if that is one of a few names."""
    named = {"config": preset_names, "module": family_names, "preset": lambda: list(PRESETS)}
    return named[option]() if option in named else _choices(_options(command).get(option))


def _choices(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return [str(choice) for choice in get_args(hint)]
    return [choice for part in get_args(hint) for choice in _choices(part)]


def _options(command: str) -> dict[str, Any]:
    """The options of a command and their types, from the dataclasses that parse it."""
    module = import_module("spurline.tools.options") if command == "train" else _module(command)
    kinds = [kind for kind in vars(module).values() if is_dataclass(kind) and isinstance(kind, type)]
    own = [kind for kind in kinds if kind.__module__ == module.__name__ or kind.__name__ in ("Command", "Options")]
    found: dict[str, Any] = {}
    for kind in own:
        required = {field.name for field in fields(kind) if field.default is field.default_factory is MISSING}
        if required <= _UNKNOWN.keys():  # others are not parsed from a command line
            found |= option_types(kind(**{name: _UNKNOWN[name] for name in required}))
    return found


def _module(command: str) -> Any:
    return import_module(COMMANDS[command][1].partition(":")[0])
