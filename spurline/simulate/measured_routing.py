"""The experts that tokens visited in a run, from its metrics. Needs NumPy, so commands import it on use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spurline.report.read import cleaned
from spurline.simulate.routing import RoutingModel
from spurline.train.metrics.expert_load_file import EXPERT_LOAD_FILE, ExpertLoads
from spurline.untrusted import lines, open_regular, parse_json, reason


def measured(path: str | Path) -> RoutingModel:
    """The mean load of each expert over the last tenth of a run's metrics.jsonl; raises a ValueError without one."""
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    loads = _loads_of_steps(path)
    if not loads:
        raise ValueError(f"--routing {path}: no expert_load in it: it has to come from a run of a model with experts")
    last = loads[-max(1, len(loads) // 10) :]
    try:
        shares = {
            layer: [float(sum(c)) for c in zip(*(load[layer] for load in last), strict=True)] for layer in last[0]
        }
    except (KeyError, ValueError):
        raise ValueError(f"--routing {path}: its steps do not have the same layers and experts") from None
    return RoutingModel(f"measured in {path}", shares)


def _loads_of_steps(path: Path) -> list[Mapping[str, Any]]:
    """The rows of each expert by layer, for each logged step: of metrics.jsonl, or of the file that it refers to."""
    try:
        with open_regular(path) as file:
            records = [parse_json(line) for line in lines(file) if line.strip()]
    except OSError as error:
        raise ValueError(f"--routing {path}: {reason(error)}") from None
    except ValueError:
        records = [None]
    if not all(isinstance(record, dict) for record in records):
        raise ValueError(f"--routing {path}: is not a run's metrics.jsonl")
    if any(record.get("expert_load") == EXPERT_LOAD_FILE for record in records):
        stored = ExpertLoads(path.parent / EXPERT_LOAD_FILE)
        return [stored.of_record(place) for place in range(len(stored.step_N))]
    return [loads for record in records if (loads := cleaned(record).get("expert_load"))]
