"""`spurline launch`: start the ranks of a run on this machine, or write a job for a cluster."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from spurline.config import RunConfig
from spurline.config_io import ConfigError
from spurline.launch.options import Options
from spurline.parallel.degrees import degree_problems
from spurline.spelling import nearest
from spurline.tools.console import complain, ended_by_interrupt
from spurline.tools.options import PROG as TRAIN
from spurline.tools.options import Command, resolve
from spurline.tools.parsing import option_types, parse, split_options, wants_help

PROG = "spurline launch"
_CUTOFF = 0.75
"""--rank, --gpu, --node and --slrum are nearer to an option of this command; --interval and --config are not."""
_NO_OVERWRITE = "leave out --job.overwrite, and give a new folder (--name, --job.dump_folder) or remove the old one"
DESCRIPTION = """\
Start `spurline train` on several ranks, with torchrun's elastic agent: on this machine,
as one node of several, or as a job on a cluster. Arguments after -- go to `spurline
train`, as do options that are not listed here.

examples
  spurline launch --ranks 4 -- --config deepseek_v3_debugmodel \\
      --parallelism.expert_parallel_degree 2
  spurline launch --ranks 8 --nnodes 2 --rdzv_endpoint node-0:29500 -- --config ...
  spurline launch --slurm --ranks 8 --nnodes 62:64 --time 24:00:00 -- --config ...
  spurline launch --kubernetes --ranks 8 --nnodes 4 --image registry/spurline:0.2 \\
      --volume runs:/runs --print -- --config ...

The exit code is that of the run (docs/reliability.md)."""


def main(argv: list[str]) -> int:
    own, train = split_command(argv)
    options, problems = parse(Options, Options(), own, PROG, DESCRIPTION)
    problems += options.problems()
    if problems:
        return complain(PROG, problems)
    if not options.ranks:
        options = replace(options, ranks=_default_ranks())
    with _world_of(options.ranks * options.nodes[-1]):
        if wants_help(train) or {"--dry-run", "--dry_run"} & set(train):
            from spurline.tools.train import main as train_main

            return train_main(train)
        try:
            command = resolve(train, anywhere=options.kubernetes)  # pods have their own files
        except ConfigError as error:
            return complain(TRAIN, error.problems)
    if problems := problems_with_fewer_nodes(options, command.run_config):
        return complain(PROG, problems)
    return write_job(options, command, train) if options.target else run(options, command, train)


def run(options: Options, command: Command[Any], train: list[str]) -> int:
    """Start the ranks; returns the exit code of the run."""
    from spurline.train.exit_codes import ExitCode, RefusedError

    quiet = "TORCH_CPP_LOG_LEVEL"  # in this process: a store that exits first is no error and needs no stack trace
    was_set = os.environ.setdefault(quiet, "FATAL")
    with ended_by_interrupt(PROG):
        from spurline.launch.agent import LaunchError, run_ranks  # imports torch: only once the options are valid

    if was_set == "FATAL":
        del os.environ[quiet]  # ranks set their own
    job = command.run_config.job
    folder = Path(job.dump_folder or job.runs_folder)
    try:
        return run_ranks(options, [sys.executable, "-u", "-m", "spurline", "train", *train], folder)
    except RefusedError as error:
        return complain(PROG, [str(error)], error.exit_code)
    except LaunchError as error:
        return complain(PROG, [str(error)], ExitCode.LOST_RANK)


def write_job(options: Options, command: Command[Any], train: list[str]) -> int:
    """Write or print the job script or manifest for a cluster; returns the exit code."""
    from spurline.launch.kubernetes import manifest, name_problems
    from spurline.launch.script import JobText
    from spurline.launch.slurm import sbatch_script
    from spurline.launch.torchrun import torchrun_script

    name = options.name or command.config or "spurline"
    name = re.sub(r"[^a-z0-9-]+", "-", name.lower()) if options.kubernetes else name
    if options.kubernetes and (problems := name_problems(name, options)):
        return complain(PROG, problems)
    job, given = command.run_config.job, {option.name for option in split_options(train)[1]}
    if not command.run_config.checkpoint.enable:
        off = "checkpoint.no_enable"
        remedy = f"leave out --{off}" if off in given else "add --checkpoint.enable"
        return complain(PROG, [f"--{options.target} needs checkpoints, to continue after a restart: {remedy}"])
    if job.overwrite:
        return complain(PROG, [f"--{options.target}: each restart would remove the progress: {_NO_OVERWRITE}"])
    if job.resume and job.dump_folder != str(Path(job.resume).expanduser()):
        run = job.dump_folder or "FOLDER"
        return complain(PROG, [f"--job.resume {job.resume} may be another run at a restart: use --job.resume {run}"])
    folder = job.dump_folder if job.resume or "job.dump_folder" in given else f"outputs/{name}-job"
    if not job.resume and "job.dump_folder" not in given:  # a restarted job must find its run
        train = [*train, "--job.dump_folder", folder]
    make, suffix, submit = {
        "slurm": (sbatch_script, "sbatch", "sbatch {}"),
        "kubernetes": (manifest, "yaml", "kubectl apply -f {}"),
        "torchrun": (torchrun_script, "sh", "bash {} FIRST_NODE, on every node"),
    }[options.target]
    file = options.out or f"{name}.{suffix}"
    text = make(JobText(options, name, folder, train), file)
    if options.print_:
        print(text, end="")
        return 0
    try:
        with open(file, "x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        return complain(PROG, [f"{file} exists: choose another file with --out, or remove it"])
    except OSError as error:
        return complain(PROG, [f"{file}: {error.strerror}"])
    print(f"wrote {file}; start it with: {submit.format(file)}")
    return 0


def split_command(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split argv into this command's options and those of `spurline train`: all after --, or all unknown here.

    A misspelled option of this command is not taken for one of `spurline train`, whose options have a section.
    """
    if "--" in argv:
        where = argv.index("--")
        return argv[:where], argv[where + 1 :]
    before, given = split_options(argv)
    known = {*option_types(Options()), "help"}
    own: list[str] = list(before)
    train: list[str] = []
    for option in given:
        is_own = option.name in known or ("." not in option.name and nearest(option.name, known, _CUTOFF))
        (own if is_own else train).extend(option.tokens)
    return own, train


def problems_with_fewer_nodes(options: Options, config: RunConfig[Any]) -> list[str]:
    """Why the run could not continue with fewer nodes of the range; the largest is checked with the options."""
    found = []
    for nodes in options.nodes[:-1]:
        ranks = nodes * options.ranks
        problems = degree_problems(config.parallelism, ranks, model=config.model, training=config.training)
        found += [f"--nnodes {options.nnodes}, with {nodes} nodes: {problem}" for problem in problems]
    return found


@contextmanager
def _world_of(ranks: int) -> Iterator[None]:
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(ranks)
    try:
        yield
    finally:
        del os.environ["WORLD_SIZE"]
        if before is not None:
            os.environ["WORLD_SIZE"] = before


def _default_ranks() -> int:
    import torch

    return max(1, torch.accelerator.device_count() if torch.accelerator.is_available() else 0)
