"""Options that `spurline plan` and `spurline audit` share, and their validation. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, Generic, TypeVar

from spurline.config import RunConfig
from spurline.hardware import Hardware, hardware_named
from spurline.parallel.degrees import degree_problems
from spurline.run_folders import find_run
from spurline.simulate.routing import RoutingModel, balanced, zipf
from spurline.tools.options import RunCommand
from spurline.tools.parsing import described

R = TypeVar("R", bound=RunConfig[Any])


@dataclass(frozen=True, kw_only=True)
class SimulationCommand(RunCommand[R], Generic[R]):
    """The options of a command that simulates a step."""

    ranks: Annotated[int, described("N")] = 1
    """Number of ranks (devices) in the simulated run."""
    device: Annotated[str, described("NAME")] = "h100"
    """Device type: h100, h200, b200, gb200, gh200, a100, mi300x, mi325x, mi250x, pvc, ..."""
    gpus_per_node: Annotated[int, described("N")] = 0
    """Devices per node (0: as in the vendor's reference system)."""
    routing: Annotated[str, described("HOW")] = "balanced"
    """Distribution of rows over experts: balanced, zipf or zipf:EXPONENT, or the metrics.jsonl (or folder) of a run."""


def command_problems(command: SimulationCommand[Any]) -> list[str]:
    found = command.run_config.problems()
    if command.ranks < 1:
        found.append(f"--ranks must be positive, got {command.ranks}")
    elif not command.run_config.parallelism.problems() and hasattr(command.run_config.model, "parallel_facts"):
        config = command.run_config
        found += degree_problems(config.parallelism, command.ranks, model=config.model, training=config.training)
    for check in (hardware_of, routing_of):
        try:
            check(command)
        except ValueError as error:
            found.append(str(error))
    return found


def hardware_of(command: SimulationCommand[Any]) -> Hardware:
    try:
        hardware = hardware_named(command.device)
    except ValueError as error:
        raise ValueError(f"--device: {error}") from None
    if command.gpus_per_node < 0:
        raise ValueError(f"--gpus_per_node must not be negative, got {command.gpus_per_node}")
    return replace(hardware, gpus_per_node=command.gpus_per_node) if command.gpus_per_node else hardware


def routing_of(command: SimulationCommand[Any]) -> RoutingModel:
    name, colon, exponent = command.routing.partition(":")
    if name not in ("balanced", "zipf"):
        from spurline.simulate.measured_routing import measured

        return measured(str(find_run(command.routing)))
    if name == "balanced":
        if colon:
            raise ValueError(f"--routing {command.routing}: balanced has no exponent, unlike zipf:0.8")
        return balanced()
    moe = getattr(command.run_config.model, "moe", None)
    try:
        power = float(exponent or 1.0)
    except ValueError:
        raise ValueError(f"--routing {command.routing}: {exponent!r} is not a number, as in zipf:0.8") from None
    if not 0 <= power < math.inf:
        raise ValueError(f"--routing {command.routing}: the exponent must be a finite number, at least 0")
    return zipf(power, moe.num_experts if moe is not None else 1)


def config_of(command: SimulationCommand[Any]) -> RunConfig[Any]:
    """The config of the run, with forced balance in the model if the config asks for it."""
    config = command.run_config
    return replace(config, model=config.model.with_forced_balance()) if config.debug.moe_force_load_balance else config
