"""Record routing decisions in a folder, and replay them, in any parallel layout with the same batches.

routing.json                    what was recorded: layers, experts, sizes of the batch
step-00000001-rank-00000.npz    the decisions of a rank in a step: for each layer the expert ids (sequences, positions,
                                K), with weights on request; which sequences, and which share of their positions
                                (numbers and indices of the tp ranks and the cp ranks that split them)
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import nn

from spurline.config import RunConfig
from spurline.files import publish, temporary_name, write_file
from spurline.moe.balance import routers
from spurline.moe.routing_tape import Ids, Place, RoutingTape, put_on_tape
from spurline.train.checkpoint.ranks import Ranks
from spurline.untrusted import read_json, reason

if TYPE_CHECKING:
    from spurline.parallel.world import World

RECORD = "routing.json"


@dataclass(frozen=True)
class Shape:
    """What a recording and a run must have in common."""

    layers: dict[str, list[int]]
    """Number of experts of each layer, and how many a token visits."""
    sequences: int
    """Per step, on all ranks."""
    seq_len: int

    def differences(self, run: Shape) -> list[str]:
        found = [
            f"{name} is {getattr(self, name)} in the recording, {getattr(run, name)} in the run"
            for name in ("sequences", "seq_len")
            if getattr(self, name) != getattr(run, name)
        ]
        for layer in sorted(self.layers.keys() | run.layers.keys()):
            recorded, own = self.layers.get(layer), run.layers.get(layer)
            if recorded != own:
                found.append(f"{layer} has {_experts(recorded)} in the recording, {_experts(own)} in the run")
        return found


def _experts(layer: list[int] | None) -> str:
    return "no router" if layer is None else f"{layer[0]} experts, {layer[1]} a token"


class RoutingRecord:
    """Records or replays routing decisions, for the steps and micro-batches that a trainer announces."""

    def __init__(self, model: nn.Module, config: RunConfig[Any], world: World, global_batch_size: int) -> None:
        debug, self.config, self.world = config.debug, config, world
        if config.compile.enable and "model" in config.compile.parts:
            raise ValueError("debug.record_routing and debug.replay_routing need eager blocks: leave out --compile")
        own = {name: [r.config.num_experts, r.config.top_k] for name, r in routers(model).items()}
        # Pipeline stages have different layers.
        layers = {name: sizes for of_rank in Ranks().gather(lambda: own) for name, sizes in of_rank.items()}
        if not layers:
            raise ValueError("debug.record_routing and debug.replay_routing need a model with experts")
        self.shape = Shape(layers, global_batch_size, config.training.seq_len)
        self.source = Path(debug.replay_routing) if debug.replay_routing else None
        self.target = Path(debug.record_routing) if debug.record_routing else None
        Ranks().first(self._begin)
        self.tape = RoutingTape(self.target is not None, debug.record_routing_weights)
        put_on_tape(model, self.tape)

    def _begin(self) -> None:
        """Check both folders, on the first rank; an existing recording of the same shape is replaced step by step."""
        if self.source:
            _check("debug.replay_routing", self.source, self.shape)
        folder = self.target
        if folder is None:
            return
        if (folder / RECORD).exists():
            _check("debug.record_routing", folder, self.shape)
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"debug.record_routing {folder}: not an empty folder, and not a recording of routing")
        else:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                write_file(folder / RECORD, json.dumps(asdict(self.shape), indent=2) + "\n")
            except OSError as error:
                raise ValueError(f"debug.record_routing {folder}: {error.strerror or error}") from None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Compute the micro-batches of a step inside; on exit, their decisions are on the disk."""
        ranks = Ranks()  # an error on one of them is raised on all
        self.tape.clear()
        if self.source:
            ranks.gather(partial(self._read, self.source, step))
        yield
        if self.target:
            ranks.gather(partial(self._write, self.target, step))
        self.tape.clear()

    def micro_batch(self, number: int) -> None:
        """Announce that the next forward and backward are of this rank's micro-batch `number`, counted from 1."""
        size, degrees = self.config.training.local_batch_size, self.world.degrees
        first = ((number - 1) * self.world.data_size + self.world.data_rank) * size
        meshes = self.world.meshes
        share = meshes.tp_mesh.get_local_rank() if meshes is not None and degrees.tp > 1 else 0
        context = meshes.cp_group.rank() if meshes is not None and degrees.cp > 1 else 0
        shares = degrees.tp, share, degrees.cp, context
        self.tape.place = Place(tuple(range(first, first + size)), self.shape.seq_len, *shares)

    def _read(self, folder: Path, step: int) -> None:
        self.tape.replayed = read_step(folder, step, self.shape)

    def _write(self, folder: Path, step: int) -> None:
        if not self.tape.ids:  # a pipeline stage without experts
            return
        arrays: dict[str, Any] = {}
        for kind, noted in (("ids", self.tape.ids), ("weights", self.tape.weights)):
            for layer, parts in noted.items():
                values = np.concatenate([part for _, part in parts])
                small = kind == "ids" and self.shape.layers[layer][0] <= 256
                arrays[f"{kind}/{layer}"] = values.astype(np.uint8) if small else values
        places = [place for place, _ in next(iter(self.tape.ids.values()))]
        arrays["sequences"] = np.array([number for place in places for number in place.sequences])
        of_all = places[0]
        arrays["share"] = np.array([of_all.num_shares, of_all.share, of_all.num_contexts, of_all.context])
        rank = 0 if self.world.meshes is None else self.world.meshes.world_group.rank()
        path = folder / f"step-{step:08d}-rank-{rank:05d}.npz"
        temporary = temporary_name(path)
        try:
            with open(temporary, "wb") as file:
                np.savez_compressed(file, **arrays)
            publish(temporary, path)
        except OSError as error:
            raise ValueError(f"debug.record_routing: can't write {path}: {error.strerror or error}") from None
        finally:
            temporary.unlink(missing_ok=True)


def read_step(folder: Path, step: int, shape: Shape) -> dict[str, Ids]:
    """The decisions of a full step, (S, L, K) for each layer, from the files of all ranks that recorded it."""
    paths = sorted(folder.glob(f"step-{step:08d}-rank-*.npz"))
    if not paths:
        raise ValueError(f"debug.replay_routing {folder}: there is no recording of step {step}")
    found: dict[str, Ids] = {}
    filled: dict[str, int] = dict.fromkeys(shape.layers, 0)
    for path in paths:
        try:
            with np.load(path, allow_pickle=False) as arrays:
                sequences = arrays["sequences"]
                place = Place((), shape.seq_len, *_shares(arrays["share"]))
                for layer, (_, top_k) in shape.layers.items():
                    if f"ids/{layer}" not in arrays:  # of another pipeline stage
                        continue
                    ids = arrays[f"ids/{layer}"]
                    whole = found.setdefault(layer, np.zeros((shape.sequences, shape.seq_len, top_k), np.uint16))
                    whole[np.ix_(sequences, place.positions(layer))] = ids
                    filled[layer] += ids.size
        except (OSError, KeyError, IndexError, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is damaged: {error}") from None
    for layer, (num_experts, top_k) in shape.layers.items():
        if filled[layer] != shape.sequences * len(Place((), shape.seq_len).positions(layer)) * top_k:
            raise ValueError(
                f"debug.replay_routing {folder}: the files of step {step} do not cover all tokens of {layer}"
            )
        if found[layer].max(initial=0) >= num_experts:
            raise ValueError(f"debug.replay_routing {folder}: step {step} names an expert that {layer} does not have")
    return found


def _shares(numbers: npt.NDArray[Any]) -> list[int]:
    """How many ranks split the positions, and which one this is: of tp, then of cp, which old recordings lack."""
    tp, share, cp, context = [*map(int, numbers), 1, 0][:4]
    if not (0 <= share < tp and 0 <= context < cp):
        raise ValueError(f"its share of the positions is {numbers.tolist()}")
    return [tp, share, cp, context]


def _check(option: str, folder: Path, run: Shape) -> None:
    try:
        content = read_json(folder / RECORD)
        recorded = Shape(**content)
    except (OSError, TypeError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise ValueError(f"{option} {folder}: not a recording of routing: {RECORD}: {why}") from None
    if differences := recorded.differences(run):
        raise ValueError(f"{option} {folder}: it is of another run: {'; '.join(differences[:3])}")
