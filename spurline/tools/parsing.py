"""Parse command lines into dataclasses with tyro, reporting all errors together. Torch-free."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro

from spurline.plugins import load_plugins
from spurline.spelling import nearest
from spurline.typed_json import expected, long_name

T = TypeVar("T")


@dataclass(frozen=True)
class Given:
    """One option with its values, as typed."""

    name: str
    """With underscores and without leading dashes: training.seq_len."""
    values: list[str]
    tokens: list[str]

    @property
    def is_joined(self) -> bool:
        """Whether it was typed as --name=value."""
        return len(self.tokens) == len(self.values)


def split_options(argv: list[str]) -> tuple[list[str], list[Given]]:
    """Split a command line into (tokens before the first option, options)."""
    before: list[str] = []
    given: list[Given] = []
    for token in argv:
        if token.startswith("--"):
            name, equals, value = token.removeprefix("--").partition("=")
            given.append(Given(name.replace("-", "_"), [value] if equals else [], [token]))
        elif given:
            given[-1].values.append(token)
            given[-1].tokens.append(token)
        else:
            before.append(token)
    return before, given


def described(metavar: str | None = None, name: str | None = None) -> object:
    """Annotation of an option whose default is not shown in the help."""
    return tyro.conf.arg(name=name, metavar=metavar, help_behavior_hint="")


def wants_help(argv: list[str]) -> bool:
    return "-h" in argv or "--help" in argv


def _as_tyro_reads_it(default: Any, argv: list[str]) -> tuple[list[str], list[str]]:
    """Expand short dtype names (bf16 becomes bfloat16) and empty lists; returns argv and the lists without a value."""
    types, (tokens, given) = option_types(default), split_options(argv)
    problems = []
    for option in given:
        hint = types.get(option.name)
        is_list = get_origin(hint) in (list, tuple)
        short = option.values[0] if len(option.values) == 1 else ""
        long = long_name(short, get_args(hint))
        if is_list and not option.values:
            problems.append(f'{option.tokens[0]}: needs a value, {expected(hint)} ("" for none)')
        elif is_list and option.values == [""]:
            tokens.append(f"--{option.name}")
        elif long != short:
            tokens.append(f"--{option.name}={long}")
        else:
            tokens += option.tokens
    return tokens, problems


def parse(cls: type[T], default: T, argv: list[str], prog: str, description: str) -> tuple[T, list[str]]:
    """Override fields of `default`, a dataclass of type `cls`, by the options in `argv`.

    Returns the result and the errors in `argv`; invalid options are not applied.
    """
    settings: dict[str, Any] = {"prog": prog, "description": description, "use_underscores": True}
    if wants_help(argv):
        _let_tyro_fill_lines()
        tyro.cli(cls, default=default, args=["--help"], **settings)  # prints and exits
    argv, problems = _as_tyro_reads_it(default, argv)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(cls, default=default, args=argv, **settings), problems
    except SystemExit:
        valid, not_understood = _diagnose(default, argv, prog)
        problems += not_understood
    # If tyro rejects something that _diagnose accepts, this call prints tyro's own error and exits.
    return tyro.cli(cls, default=default, args=valid, **settings), problems


UserPackage = Annotated[
    str,
    tyro.conf.arg(
        name="import",
        metavar="PACKAGE",
        help="Python package to import first, which may register model families, routers and other plugins.",
        help_behavior_hint="",
    ),
]
"""Type of the option --import; commands declare `import_: UserPackage = ""`."""


def load_user_code(argv: list[str]) -> list[str]:
    """Load installed plugins and the package of --import, before other options are parsed; returns the errors."""
    packages = [option.values[0] for option in split_options(argv)[1] if option.name == "import" and option.values]
    return load_plugins(packages[-1] if packages else "")


def option_types(section: Any, prefix: str = "") -> dict[str, Any]:
    """The type of every option by dotted name, for a dataclass instance and its nested dataclasses."""
    hints = get_type_hints(type(section), include_extras=True)
    found: dict[str, Any] = {}
    for f in dataclasses.fields(section):
        value, hint = getattr(section, f.name), hints[f.name]
        marks = getattr(hint, "__metadata__", ())
        hint = hint.__origin__ if marks else hint
        renamed = [mark.name for mark in marks if getattr(mark, "name", None) is not None]
        leaf = renamed[0] if renamed else f.name
        if tyro.conf.UseAppendAction in marks:  # it is typed once for each item
            hint = get_args(hint)[0]
        if dataclasses.is_dataclass(value):
            found |= option_types(value, f"{prefix}{leaf}." if leaf else prefix)
        else:
            found[prefix + leaf] = hint
            if hint is bool and tyro.conf.FlagCreatePairsOff not in marks:
                found[f"{prefix}no_{leaf}"] = hint
    return found


def take_arguments(argv: list[str], options: Any) -> tuple[list[str], list[str]]:
    """Split argv into positional arguments, in any position, and the options with their values."""
    types = option_types(options)
    arguments, given = split_options([token for token in argv if token != "-h"])
    rest = ["--help"] if "-h" in argv else []
    for option in given:
        num_values = 0 if types.get(option.name) is bool else 1
        further = option.values[num_values:]
        arguments += further
        rest += option.tokens[: len(option.tokens) - len(further)]
    return arguments, rest


def _let_tyro_fill_lines() -> None:
    """Break the help of options where a line is full, not also where their docstrings in the source have a break."""
    if (as_tyro_does := getattr(tyro._strings, "remove_single_line_breaks", None)) is not None:
        of_a_docstring = re.compile(r"\n    (?=\S)")
        joined = lambda text: as_tyro_does(of_a_docstring.sub(" ", text))  # noqa: E731
        setattr(tyro._strings, "remove_single_line_breaks", joined)  # noqa: B010


def _diagnose(default: Any, argv: list[str], prog: str) -> tuple[list[str], list[str]]:
    """The valid tokens of `argv`, and the errors in the rest."""
    types = option_types(default)
    before, given = split_options(argv)
    valid: list[str] = []
    problems = [f"unexpected argument {token!r}: options have the form --section.option value" for token in before]
    for option in given:
        typed = option.tokens[0].partition("=")[0]
        if option.name not in types:
            problems.append(f"{typed}: no such option{_suggestion(option.name, types, prog)}")
        elif error := _value_error(option, types):
            problems.append(f"{typed}: {error}")
        else:
            valid += option.tokens
    return valid, problems


def _suggestion(name: str, types: dict[str, Any], prog: str) -> str:
    """Suggest the option of the same name in another section (`training.seq_len` for `seq_len`), else the closest."""
    same_leaf = [known for known in types if known.rpartition(".")[2] == name.rpartition(".")[2]]
    if same_leaf and "." not in name:
        near = same_leaf[0]  # the most used sections come first: training.steps before profile.steps
    else:
        near = nearest(name, same_leaf, cutoff=0.0) or nearest(name, types)
    return f". Did you mean --{near}?" if near else f" ({prog} --help lists them)"


def _value_error(option: Given, types: dict[str, Any]) -> str:
    """The error in an option's values; empty if they are valid."""
    values, hint = " ".join(map(repr, option.values)), types[option.name]
    if hint is bool:
        section, dot, leaf = option.name.rpartition(".")
        opposite = section + dot + (leaf.removeprefix("no_") if leaf.startswith("no_") else f"no_{leaf}")
        suggestion = f". Its opposite is --{opposite}" if opposite in types else ""
        return f"takes no value, got {values}{suggestion}" if values else ""
    if _accepts(hint, option):
        return ""
    if not values:
        return f"needs a value, {expected(hint)}"
    if get_origin(hint) not in (list, tuple):
        if len(option.values) > 1:
            return f"takes one value, got {values}. Quote values that contain spaces"
        if hint is str:
            return f"write {option.tokens[0]}={option.values[0]} for a value that starts with a dash"
    return f"{values} is not {expected(hint)}"


def _accepts(hint: Any, option: Given) -> bool:
    alone = dataclasses.make_dataclass("Alone", [("value", hint)])
    args = [f"--value={option.values[0]}", *option.values[1:]] if option.is_joined else ["--value", *option.values]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            tyro.cli(alone, args=args)
    except SystemExit:
        return False
    return True
