"""The options of a run: from a command line to a checked config, or to all that is wrong with it. Free of torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import tyro

from spurline.config import Job, RunConfig
from spurline.config_io import ConfigError, load, preset_problems
from spurline.data import check_data
from spurline.models import family_configs
from spurline.parallel.degrees import degree_problems
from spurline.tools.parsing import UserPackage, described, load_user_code, parse, split_options, wants_help
from spurline.train.checkpoint.folder import CheckpointFolder

PROG = "spurline train"
_SECTIONS_TO_ENABLE = ("--compile", "--checkpoint", "--profile")
R = TypeVar("R", bound=RunConfig[Any])


@dataclass(frozen=True, kw_only=True)
class Command(Generic[R]):
    """What `spurline train` was asked to do."""

    module: Annotated[str, described("NAME")] = ""
    """The model family."""
    config: Annotated[str, described("NAME")] = ""
    """The family's preset to start from."""
    config_file: Annotated[str, described("FILE")] = ""
    """Start from the config.json of an earlier run instead of a preset."""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Show the resolved config, its parameters and its FLOPs, and stop."""
    import_: UserPackage = ""
    run_config: Annotated[R, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class UnknownModel:
    """Stands in for the model where it isn't known which one it is."""

    def problems(self) -> list[str]:
        return []


def resolve(argv: list[str]) -> Command[Any]:
    """The command that `argv` describes, sound in every part; a ConfigError lists all that is wrong with it."""
    argv = [f"{option}.enable" if option in _SECTIONS_TO_ENABLE else option for option in argv]
    before, given = split_options(argv)
    named = {option.name: option.values[0] for option in given if option.values}
    problems = load_user_code(argv)
    start, not_found = _starting_point(named)
    problems += not_found
    says_which = "config_file" in named or {"module", "config"} <= named.keys()
    if wants_help(argv) and says_which and problems:
        raise ConfigError(problems)

    model = start.run_config.model
    if isinstance(model, UnknownModel):
        argv = before + [token for option in given if not option.name.startswith("model.") for token in option.tokens]
    kind: Any = Command[RunConfig[type(model)]]  # type: ignore[misc]
    command, not_understood = parse(kind, start, argv, PROG, _description(start))
    command = replace(command, run_config=_with_folder(command.run_config, command.config))
    problems += not_understood + run_problems(command.run_config)
    if problems:
        raise ConfigError(problems)
    return command


def _starting_point(named: dict[str, str]) -> tuple[Command[Any], list[str]]:
    """The preset or the file that the options change; or general values, and why there is neither."""
    module, config, file = (named.get(name, "") for name in ("module", "config", "config_file"))
    general = Command(run_config=_with_folder(RunConfig(model=UnknownModel()), "<config>"))
    if not file:
        if problems := preset_problems(module, config, prefix="--"):
            return general, problems
        run_config = _with_folder(family_configs(module)[config](), config)
        return Command(module=module, config=config, run_config=run_config), []
    try:
        of_file = load(file)
    except ConfigError as error:
        return general, error.problems
    start = Command(module=of_file[0], config=of_file[1], config_file=file, run_config=of_file[2])
    return start, [
        f"--{name} {given}: {file} is of {name} {recorded}, leave --{name} out"
        for name, given, recorded in (("module", module, start.module), ("config", config, start.config))
        if given not in ("", recorded)
    ]


def _with_folder(run_config: RunConfig[Any], config: str) -> RunConfig[Any]:
    return run_config if run_config.job.dump_folder else replace(run_config, job=Job(dump_folder=f"outputs/{config}"))


def run_problems(config: RunConfig[Any]) -> list[str]:
    """Everything that would keep a run with this config from starting on this machine."""
    found = config.problems() + check_data(config.data) + folder_problems(config.job.dump_folder)
    if config.checkpoint.enable and not found:
        found += folder_problems(str(CheckpointFolder(config.job.dump_folder).path))
    if not config.parallelism.problems():
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        found += degree_problems(config.parallelism, world_size, model=config.model, training=config.training)
    return found


def folder_problems(folder: str) -> list[str]:
    """Why a run can't be written to `folder`, which need not exist yet."""
    path = Path(folder).absolute()
    nearest = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
    if not nearest.is_dir():
        return [f"job.dump_folder {folder}: {nearest} is a file, not a folder"]
    if not os.access(nearest, os.W_OK | os.X_OK):
        return [f"job.dump_folder {folder}: no permission to write to {nearest}"]
    return []


_EXAMPLES = """\
Train a model: start from a preset of a model family, change any option.

examples
  spurline train --module deepseek_v3 --config deepseek_v3_debugmodel
  spurline train --module deepseek_v3 --config deepseek_v3_debugmodel \\
      --training.steps 20 --compile.enable --model.moe.top_k 4
  spurline train --config-file outputs/deepseek_v3_debugmodel/config.json

Hyphens and underscores in option names are the same: --dry-run is --dry_run.
--compile, --checkpoint and --profile are short for --compile.enable and so on."""


def _description(start: Command[Any]) -> str:
    if start.config_file:
        whose = f"The values below are those of {start.config_file}."
    elif start.config:
        whose = f"The values below are those of the preset {start.config}."
    else:
        whose = (
            "The values below are general ones. A model's own options and a preset's values:\n"
            "  spurline configs                              lists the modules and configs\n"
            "  spurline train --module M --config C --help   shows one"
        )
    return f"{_EXAMPLES}\n\n{whose}"
