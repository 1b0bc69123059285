"""`spurline train`: resolve the options, then print the config (--dry-run) or train."""

from __future__ import annotations

import io
import os
import sys
import traceback
from dataclasses import replace
from typing import Any

from spurline.config import RunConfig
from spurline.config_io import ConfigError, to_json
from spurline.hardware import hardware_named
from spurline.parallel.degrees import resolve_degrees
from spurline.parallel.stages import cut_layers, num_stages
from spurline.tools.console import complain, ended_by_interrupt, gib, human, human_flops, raised_by_us
from spurline.tools.options import PROG, resolve
from spurline.train.exit_codes import ExitCode, RefusedError, exit_code_of
from spurline.train.launcher import adopt_attempt, die_with_launcher, end_process, is_launched, record_error


def main(argv: list[str]) -> int:
    try:
        command = resolve(argv)
    except ConfigError as error:
        return complain(PROG, error.problems)
    run_config = command.run_config
    if run_config.debug.moe_force_load_balance:
        run_config = replace(run_config, model=run_config.model.with_forced_balance())
    if command.dry_run:
        print(to_json(command.module, command.config, run_config))
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        print(describe_cost(run_config, world_size))
        print(describe_memory(run_config, world_size))
        return 0

    die_with_launcher()
    adopt_attempt()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for characters that the terminal can't encode
    if not is_launched():
        return run(command.module, command.config, run_config)
    try:
        code = run(command.module, command.config, run_config)
    except Exception as error:
        traceback.print_exc()
        record_error(f"{type(error).__name__}: {error}", traceback.format_exc())
        code = exit_code_of(error)
    end_process(code)


def run(module: str, config_name: str, run_config: RunConfig[Any]) -> int:
    """Train and write the report; prints errors meant for the user. Returns the exit code."""
    try:
        with ended_by_interrupt(PROG):
            from spurline.train.run import train  # imports torch, which is slow: only once the options are valid

        if faults := os.environ.get("SPURLINE_FAULTS"):
            from spurline.testing.faults import install

            install(faults)
        folder, code = train(module, config_name, run_config)
        is_first = os.environ.get("RANK", "0") == "0"
        if is_first and run_config.metrics.report and (folder / "metrics.jsonl").is_file():
            from spurline.tools.report import write_report

            try:
                print(f"report: {write_report([str(folder)])}")
            except OSError as error:  # the run itself is complete
                print(f"{PROG}: the report was not written: {error.strerror or error}", file=sys.stderr)
    except ConfigError as error:  # problems that only show once the model is built
        return end_with(error.problems, is_final=True)
    except ValueError as error:
        if not raised_by_us(error):
            raise
        return end_with([str(error)], exit_code_of(error), is_final=isinstance(error, RefusedError))
    except OSError as error:
        where = error.filename or run_config.job.dump_folder
        return end_with([f"{where}: {error.strerror or error}"], exit_code_of(error))
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        from spurline.parallel.compile_cache import broken_library

        library = broken_library(str(error))
        if not library:
            raise
        return end_with([f"the compile cache is damaged: remove {library} and run the same command again"])
    return code


def end_with(problems: list[str], code: int = ExitCode.USAGE, is_final: bool = False) -> int:
    """Print the problems and report them to the launcher; returns the exit code."""
    record_error("\n".join(problems), is_final=is_final)
    return complain(PROG, problems, code)


def describe_cost(config: RunConfig[Any], world_size: int) -> str:
    """Format the parameter count, tokens and FLOPs of a config as text."""
    training, model = config.training, config.model
    data_ranks = resolve_degrees(config.parallelism, world_size).dp
    sequences = training.global_batch_size if training.global_batch_size > 0 else training.local_batch_size * data_ranks
    tokens = sequences * training.seq_len
    flops = model.flops_per_token(training.seq_len)
    stages = describe_stages(config, sequences // (training.local_batch_size * data_ranks))
    return "\n".join(
        [
            f"parameters  {human(model.num_params())} total, {human(model.num_active_params())} active per token",
            f"tokens      {tokens:,} per step ({sequences} sequences of {training.seq_len:,}),"
            f" {tokens * training.steps:,} in {training.steps:,} steps",
            f"compute     {human_flops(flops)} per token, {human_flops(flops * tokens)} per step,"
            f" {human_flops(flops * tokens * training.steps)} in total (forward and backward)",
            *([stages] if stages else []),
            f"run folder  {config.job.dump_folder or config.job.runs_folder + '/<number>'}",
        ]
    )


def describe_stages(config: RunConfig[Any], num_micro_batches: int) -> str:
    """Format the layers of each pipeline stage as text; empty without stages."""
    degree, schedule = config.parallelism.pipeline_parallel_degree, config.parallelism.pipeline_parallel_schedule
    if degree == 1:
        return ""
    costs, least = config.model.costs(config.training.seq_len), config.model.parallel_facts().first_stage_layers
    cut = cut_layers(costs, num_stages(schedule, degree), least)
    layers = ", ".join(f"{first}" if end - first == 1 else f"{first}-{end - 1}" for first, end in cut)
    return f"pipeline    {len(cut)} stages of layers {layers}; {num_micro_batches} micro-batches a step by {schedule}"


def describe_memory(config: RunConfig[Any], world_size: int) -> str:
    """Format the peak memory of a rank as text; simulates a few layers, which takes seconds."""
    from spurline.simulate.search import estimate_step  # imports torch, and nothing before it does

    plan = estimate_step(config, world_size, hardware_named("h100"))
    held = {holder: size for holder, size in plan.holders.items() if size > plan.peak_bytes / 20}
    parts = ", ".join(f"{gib(size)} {holder}" for holder, size in sorted(held.items(), key=lambda item: -item[1]))
    return f"memory      {gib(plan.peak_bytes)} per rank on an accelerator ({parts}); more with `spurline plan`"
