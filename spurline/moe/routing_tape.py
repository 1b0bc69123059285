"""A tape of routing decisions: routers record their decisions on it, or replay recorded ones.

S sequences of L positions in a step, K experts per token, T tokens of this rank's micro-batch. A tape belongs to the
routers of one model (`put_on_tape`) and advances with the micro-batches of its trainer; elsewhere it is off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from spurline.comm.sequence import HeadTailShard, SequenceShard
from spurline.moe.balance import routers

Ids = npt.NDArray[np.uint16]
Weights = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Place:
    """Which tokens of the step this rank's micro-batch has."""

    sequences: tuple[int, ...]
    """Indices of its sequences within the step."""
    length: int
    """Positions per sequence."""
    num_shares: int = 1
    """Number of tp ranks that split the positions of their cp rank."""
    share: int = 0
    """Index of this rank among them."""
    num_contexts: int = 1
    """Number of cp ranks that split the positions of a sequence."""
    context: int = 0
    """Index of this rank among them."""

    def positions(self, layer: str) -> Positions:
        """This rank's positions in a layer. An MTP module that predicts k tokens ahead has k fewer positions."""
        further = re.match(r"mtp\.(\d+)\.", layer)
        missing = int(further[1]) + 1 if further else 0
        ranges = [(0, self.length - missing)]
        if self.num_contexts > 1:
            ranges = [*HeadTailShard(self.length, self.num_contexts, self.context).shortened(missing).ranges]
        of_tp_group = np.concatenate([np.arange(start, stop) for start, stop in ranges])
        shard = SequenceShard(len(of_tp_group), self.num_shares, self.share)
        return of_tp_group[shard.start : shard.stop]


class RoutingTape:
    """The routing decisions of a step by layer, recorded or to be replayed."""

    def __init__(self, records: bool, with_weights: bool = False) -> None:
        self.records, self.with_weights = records, with_weights
        self.place: Place | None = None
        """None where nothing is recorded or replayed: in validation and generation."""
        self.ids: dict[str, list[tuple[Place, Ids]]] = {}
        self.weights: dict[str, list[tuple[Place, Weights]]] = {}
        self.replayed: Mapping[str, Ids] | None = None
        """The decisions of the full step by layer, (S, L, K)."""

    def decided(self, layer: str, expert_TK: Tensor) -> Tensor:
        """The replayed decision, or the router's own if nothing is replayed."""
        if self.place is None or self.replayed is None:
            return expert_TK
        part = self.replayed[layer][list(self.place.sequences)][:, self.place.positions(layer)]
        ids = torch.from_numpy(part.astype(np.int64)).flatten(0, 1).to(expert_TK.device)
        if ids.shape != expert_TK.shape:
            raise ValueError(
                f"{layer}: the recording has decisions {tuple(ids.shape)} for this micro-batch, and the router makes"
                f" {tuple(expert_TK.shape)}"
            )
        return ids

    def note(self, layer: str, expert_TK: Tensor, weight_TK: Tensor) -> None:
        """Record a decision once, even if the backward pass recomputes it."""
        if self.place is None or not self.records or torch._C._current_graph_task_id() != -1:
            return
        shape = len(self.place.sequences), -1, expert_TK.shape[1]
        ids = expert_TK.detach().cpu().numpy().astype(np.uint16).reshape(shape)
        self.ids.setdefault(layer, []).append((self.place, ids))
        if self.with_weights:
            weights = weight_TK.detach().float().cpu().numpy().reshape(shape)
            self.weights.setdefault(layer, []).append((self.place, weights))

    def clear(self) -> None:
        self.ids, self.weights, self.place = {}, {}, None


def put_on_tape(model: nn.Module, tape: RoutingTape | None) -> None:
    """Attach a tape to all routers of a model, to record on or to replay from; None detaches it."""
    for layer, router in routers(model).items():
        router.tape, router.layer = tape, layer
