"""Parse a command line with the options of a run into a validated config, or report all errors. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import tyro

from spurline.config import Job, RunConfig
from spurline.config.presets import PRESETS
from spurline.config_io import ConfigError, family_of, load, not_among, preset_names, preset_problems
from spurline.data import check_data
from spurline.data.hf_datasets import SCHEME as DATASET_SCHEME
from spurline.hf.settings import run_config_for
from spurline.models import family_configs
from spurline.parallel.degrees import degree_problems
from spurline.remote import is_remote, scheme_problems
from spurline.run_folders import LATEST, find_run, latest_run
from spurline.tools.parsing import UserPackage, described, load_user_code, parse, split_options, wants_help
from spurline.train.base_model import OPTION as LORA_BASE
from spurline.train.base_model import base_problems
from spurline.train.checkpoint.folder import CheckpointFolder
from spurline.train.initial_load import OPTION as INITIAL_LOAD
from spurline.train.initial_load import find_source, initial_load_problems

PROG = "spurline train"
_SECTIONS_TO_ENABLE = ("--compile", "--checkpoint", "--profile")
R = TypeVar("R", bound=RunConfig[Any])


@dataclass(frozen=True, kw_only=True)
class RunCommand(Generic[R]):
    """The options of a command about a run: the starting config, and overrides of any of its fields."""

    module: Annotated[str, described("NAME")] = ""
    """Model family (see `spurline configs`); not needed if --config names a preset of only one family."""
    config: Annotated[str, described("NAME")] = ""
    """Preset to start from."""
    config_file: Annotated[str, described("FILE")] = ""
    """Start from the config.json of an earlier run instead of a preset, or from your own JSON or YAML file;
    options missing from it come from its preset."""
    preset: Annotated[str, described("NAME")] = ""
    """Options for a purpose, applied before the others: finetune (low rate, frozen router; see docs/finetuning.md)."""
    import_: UserPackage = ""
    run_config: Annotated[R, tyro.conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class Command(RunCommand[R], Generic[R]):
    """The options of `spurline train`."""

    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Print the resolved config, parameter and FLOP counts and the memory per rank, and exit."""


@dataclass(frozen=True)
class UnknownModel:
    """Placeholder for the model config while no valid model is selected."""

    def problems(self) -> list[str]:
        return []


def resolve(argv: list[str], anywhere: bool = False) -> Command[Any]:
    """Parse the command line of `spurline train`; raises a ConfigError with all errors.

    With `anywhere`, files and folders are on other machines, so their existence is not checked here.
    """
    problems = layout_problems if anywhere else run_problems
    return resolve_command(argv, Command, PROG, _EXAMPLES, lambda command: problems(command.run_config))


C = TypeVar("C", bound=RunCommand[Any])


def resolve_command(
    argv: list[str], kind: type[C], prog: str, examples: str, problems_of: Callable[[C], list[str]]
) -> C:
    """Parse `argv` into a command of this kind; raises a ConfigError with all errors, `problems_of` included."""
    argv = [f"{option}.enable" if option in _SECTIONS_TO_ENABLE else option for option in argv]
    before, given = split_options(argv)
    named = {option.name: option.values[0] for option in given if option.values}
    problems = load_user_code(argv)
    if "config" not in named and before and before[0] in preset_names():
        problems.append(f"unexpected argument {before[0]!r}: did you mean --config {before[0]}?")
        named["config"] = before[0]  # so that the rest is checked as if it had been typed
        before, argv = before[1:], argv[1:]
    start, not_found = _starting_point(named, kind)
    if {"config", "config_file"} & {option.name for option in given if not option.values}:  # reported by `parse`
        not_found = [problem for problem in not_found if not problem.startswith("--config is missing")]
    problems += not_found
    start, no_preset = _with_preset(start, named.get("preset", ""))
    problems += no_preset
    says_which = "config_file" in named or "config" in named
    if wants_help(argv) and says_which and problems:
        raise ConfigError(problems)

    model = start.run_config.model
    if isinstance(model, UnknownModel):
        argv = before + [token for option in given if not option.name.startswith("model.") for token in option.tokens]
    of_model: Any = kind[RunConfig[type(model)]]  # type: ignore[misc, index]
    command, not_understood = parse(of_model, start, argv, prog, _description(start, prog, examples))
    run_config = _without_unused_weights(_with_folder(command.run_config, command.config), named)
    command = replace(command, run_config=run_config)
    problems += not_understood + problems_of(command)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return command


def _starting_point(named: dict[str, str], kind: type[C]) -> tuple[C, list[str]]:
    """The preset or config file that the options override, and errors; generic defaults if there is none."""
    module, config, file = (named.get(name, "") for name in ("module", "config", "config_file"))
    resumed = named.get("job.resume", "")
    if resumed not in ("", LATEST) and not (module or config or file):
        file = str(find_run(resumed) / "config.json")
    general = kind(run_config=_with_folder(RunConfig(model=UnknownModel()), "<config>"))
    option = INITIAL_LOAD if named.get(INITIAL_LOAD) else LORA_BASE
    if named.get(option) and not (module or config or file):
        return _start_from_weights(named[option], option, general, kind)
    if not file:
        module = module or family_of(config)
        if problems := preset_problems(module, config, prefix="--"):
            return general, problems
        run_config = _with_folder(family_configs(module)[config](), config)
        return kind(module=module, config=config, run_config=run_config), []
    file = str(_config_file(file))
    try:
        of_file = load(file, may_be_partial=True, default_module=module, default_config=config)
    except ConfigError as error:
        return general, error.problems
    run_config = _as_a_new_run(of_file[2]) if _is_of_a_run(Path(file), of_file[2].job) else of_file[2]
    start = kind(module=of_file[0], config=of_file[1], config_file=file, run_config=run_config)
    return start, [
        f"--{name} {given}: {file} has {name} {recorded}; omit --{name}"
        for name, given, recorded in (("module", module, start.module), ("config", config, start.config))
        if given not in ("", recorded)
    ]


def _config_file(name: str) -> Path:
    """Resolve the name of a config file: a folder means its config.json, or the latest run's."""
    file = Path(name).expanduser()
    if file.is_dir():
        return find_run(file) / "config.json"
    return file if file.exists() else find_run(file.parent) / file.name


def _is_of_a_run(file: Path, job: Job) -> bool:
    """Whether a config file was written by a run rather than by the user."""
    if any((file.parent / name).exists() for name in ("metrics.jsonl", "checkpoints")):
        return True
    return bool(job.dump_folder) and Path(job.dump_folder).resolve() == file.parent.resolve()


def _as_a_new_run(run_config: RunConfig[Any]) -> RunConfig[Any]:
    """The config of a run, to be used for another run in its own folder."""
    job = replace(run_config.job, dump_folder="", resume="", overwrite=False, allow_changes=False)
    return replace(run_config, job=job)


def _without_unused_weights(run_config: RunConfig[Any], named: dict[str, str]) -> RunConfig[Any]:
    """With LoRA, drop the initial weights that a config file names: the adapters have their own base model."""
    if not run_config.lora.rank or INITIAL_LOAD in named:
        return run_config
    return replace(run_config, checkpoint=replace(run_config.checkpoint, initial_load_path=""))


def _start_from_weights(path: str, option: str, general: C, kind: type[C]) -> tuple[C, list[str]]:
    """Start from the config of the folder with the weights that an option names, for a new run in its own folder."""
    try:
        source = find_source(path, option)
        out = f"outputs/{source.name}-tuned"
        if source.run_folder is None:
            module, config, run_config = run_config_for(source.path, "")
        else:
            module, config, run_config = load(source.run_folder / "config.json")
    except ConfigError as error:
        return general, error.problems
    except ValueError as error:
        return general, [str(error)]
    run_config = _as_a_new_run(run_config)
    run_config = replace(run_config, job=replace(run_config.job, runs_folder=out))
    return kind(module=module, config=config, run_config=run_config), []


def _with_preset(start: C, name: str) -> tuple[C, list[str]]:
    if not name or isinstance(start.run_config.model, UnknownModel):
        return start, []
    if problems := not_among("--preset", name, sorted(PRESETS)):
        return start, problems
    return replace(start, preset=name, run_config=PRESETS[name](start.run_config)), []


def _with_folder(run_config: RunConfig[Any], config: str) -> RunConfig[Any]:
    """Set the folder of numbered runs and of a resumed run, and resolve the runs that other options name."""
    job = replace(run_config.job, runs_folder=run_config.job.runs_folder or f"outputs/{config}")
    if job.resume and not job.dump_folder:
        run = latest_run(job.runs_folder) if job.resume == LATEST else find_run(job.resume)
        job = replace(job, dump_folder=str(run or ""))
    lora, load = run_config.lora, run_config.checkpoint.initial_load_path
    if lora.base and (base := latest_run(lora.base)):
        lora = replace(lora, base=str(base))
    if load and (weights := latest_run(load)):
        load = str(weights)
    return replace(run_config, job=job, lora=lora, checkpoint=replace(run_config.checkpoint, initial_load_path=load))


def run_problems(config: RunConfig[Any]) -> list[str]:
    """Everything that prevents a run with this config from starting on this machine."""
    folder = config.job.dump_folder or config.job.runs_folder
    if remote := remote_problems(config):
        return config.problems() + remote
    found = config.problems() + check_data(config.data) + folder_problems(folder)
    try:
        found += resume_problems(config) + initial_load_problems(config)
    except ValueError as error:  # a remote folder that can't be read
        found.append(str(error))
    if config.checkpoint.enable and not found and not is_remote(config.checkpoint.folder):
        found += folder_problems(str(CheckpointFolder(folder, elsewhere=config.checkpoint.folder).path))
    return found + base_problems(config) + _degree_problems(config)


def layout_problems(config: RunConfig[Any]) -> list[str]:
    """Everything that prevents a run with this config from starting on any machine, files aside."""
    return config.problems() + _degree_problems(config)


def _degree_problems(config: RunConfig[Any]) -> list[str]:
    if config.parallelism.problems():
        return []
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return degree_problems(config.parallelism, world_size, model=config.model, training=config.training)


def remote_problems(config: RunConfig[Any]) -> list[str]:
    """Report URLs where only paths are allowed, and URLs with an unknown scheme."""
    job, data, debug = config.job, config.data, config.debug
    folders = {"job.dump_folder": job.dump_folder, "job.runs_folder": job.runs_folder, "job.resume": job.resume}
    others = {
        "data.path": data.path,
        "data.tokenizer": data.tokenizer,
        LORA_BASE: config.lora.base,
        "debug.record_routing": debug.record_routing,
        "debug.replay_routing": debug.replay_routing,
        INITIAL_LOAD: config.checkpoint.initial_load_path,
    }
    found = [
        f"{name} {value}: metrics, logs and the lock of a run need a folder of this machine or a mounted one;"
        " checkpoints can be remote: --checkpoint.folder"
        for name, value in folders.items()
        if is_remote(value)
    ]
    found += [
        f"{name} {value}: only --checkpoint.folder can be remote: copy it to this machine, or mount it"
        for name, value in others.items()
        if any(is_remote(part.strip()) and not part.strip().startswith(DATASET_SCHEME) for part in value.split(","))
    ]
    return found + scheme_problems(config.checkpoint.folder)


def resume_problems(config: RunConfig[Any]) -> list[str]:
    """Why the run can't be resumed."""
    job = config.job
    if not job.resume:
        return []
    if not config.checkpoint.enable:
        return ["job.resume needs checkpoint.enable"]
    if not job.dump_folder:
        return [f"job.resume {LATEST}: there is no run in {job.runs_folder}"]
    if job.resume != LATEST and find_run(job.resume) != Path(job.dump_folder):
        return [f"job.resume {job.resume} and job.dump_folder {job.dump_folder} are two folders: give one of the two"]
    if not CheckpointFolder(job.dump_folder, elsewhere=config.checkpoint.folder).steps():
        return [f"job.resume {job.resume}: {job.dump_folder} has no complete checkpoint"]
    return []


def folder_problems(folder: str) -> list[str]:
    """Why `folder`, which need not exist yet, is not writable."""
    path = Path(folder).absolute()
    nearest = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
    if not nearest.is_dir():
        return [f"job.dump_folder {folder}: {nearest} is a file, not a folder"]
    if not os.access(nearest, os.W_OK | os.X_OK):
        return [f"job.dump_folder {folder}: no permission to write to {nearest}"]
    return []


_EXAMPLES = """\
Train a model: start from a preset of a model family and override any option.

examples
  spurline train --config deepseek_v3_debugmodel
  spurline train --config deepseek_v3_debugmodel \\
      --training.steps 20 --compile.enable --model.moe.top_k 4
  spurline train --config-file outputs/deepseek_v3_debugmodel/config.json
  spurline train --checkpoint.initial_load_path Qwen3-0.6B --preset finetune \\
      --data.path books/

Option names accept hyphens or underscores: --dry-run is --dry_run. --compile,
--checkpoint and --profile are short for --compile.enable and so on.
"" is an empty list, as in --optimizer.groups ""."""


def _description(start: RunCommand[Any], prog: str, examples: str) -> str:
    if start.config_file:
        whose = f"Defaults below are those of {start.config_file}."
    elif start.config:
        whose = f"Defaults below are those of the preset {start.config}."
    else:
        whose = (
            "Defaults below are generic. For model options and the defaults of a preset:\n"
            f"  {'spurline configs':45} lists modules and configs\n"
            f"  {f'{prog} --module M --config C --help':45} shows the options of one"
        )
    return f"{examples}\n\n{whose}"
