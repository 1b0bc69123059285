"""Where a run's initial weights come from: a Hugging Face folder, a run, or one checkpoint. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spurline.config import RunConfig
from spurline.config_io import ConfigError, load
from spurline.hf.settings import CONFIG, mismatch, read_folder_model, read_json
from spurline.run_folders import find_run, is_numbered
from spurline.train.checkpoint.folder import WHY_NONE, CheckpointFolder
from spurline.train.checkpoint.record import RECORD

OPTION = "checkpoint.initial_load_path"


@dataclass(frozen=True)
class WeightSource:
    """A folder with weights, and what it is."""

    path: Path
    kind: Literal["hugging_face", "checkpoint"]
    run_folder: Path | None = None
    """For a checkpoint: the run that it is of."""
    step: int | None = None
    """For a checkpoint: its step."""

    @property
    def name(self) -> str:
        folder = (self.run_folder or self.path).resolve()
        return folder.parent.name if is_numbered(folder) else folder.name


def find_source(path: str, option: str = OPTION) -> WeightSource:
    """Identify the folder that an option names; a one-line ValueError if no weights can be loaded from it."""
    folder = find_run(path)
    if not folder.is_dir():
        raise ValueError(f"{option} {path}: there is no such folder")
    if (folder / RECORD).is_file():  # RUN/checkpoints/step-00000100
        steps = {CheckpointFolder(folder.parent.parent).at(step).name: step for step in _steps(folder.parent.parent)}
        if folder.resolve().name not in steps:
            raise ValueError(f"{option} {path} is not in the folder checkpoints of a run: give one as it was written")
        return WeightSource(folder, "checkpoint", folder.parent.parent, steps[folder.resolve().name])
    if steps_of_run := _steps(folder):
        return WeightSource(folder, "checkpoint", folder, steps_of_run[-1])
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{option} {path} has no {CONFIG}: give a Hugging Face folder, a run or a checkpoint")
    if "module" in read_json(folder / CONFIG):
        raise ValueError(f"{option} {path} is a run without a complete checkpoint: {WHY_NONE}")
    return WeightSource(folder, "hugging_face")


def _steps(run_folder: Path) -> list[int]:
    return CheckpointFolder(run_folder).steps()


def has_own_checkpoint(config: RunConfig[Any]) -> bool:
    """Whether the run is going to resume, so that initial weights are not needed."""
    folder, elsewhere = config.job.dump_folder, config.checkpoint.folder
    if not config.checkpoint.enable or not (folder or elsewhere):
        return False
    return bool(CheckpointFolder(folder, elsewhere=elsewhere).steps())


def initial_load_problems(config: RunConfig[Any]) -> list[str]:
    """Why the run can't start from the given initial weights, as far as can be told without reading them."""
    path = config.checkpoint.initial_load_path
    if not path or has_own_checkpoint(config):
        return []
    try:
        source = find_source(path)
        own = config.job.dump_folder
        if own and source.run_folder is not None and source.run_folder.resolve() == Path(own).resolve():
            return [f"{OPTION} {path} is the run folder itself: choose another --job.dump_folder"]
        theirs = _model_of(source)
    except ConfigError as error:
        return error.problems
    except ValueError as error:
        return [str(error)]
    why = mismatch(theirs, config.model) if theirs is not None else ""
    return [f"{OPTION} {path} {why}"] if why else []


def _model_of(source: WeightSource) -> Any:
    if source.kind == "hugging_face":
        return read_folder_model(source.path).model
    assert source.run_folder is not None
    of_run = source.run_folder / CONFIG
    return load(of_run)[2].model if of_run.is_file() else None
