"""Tensor parallelism with sequence parallelism, by explicit collectives on plain tensors.

B sequences of L positions, of which this rank has l (its real ones, see SequenceShard); D width, V vocabulary.

Between blocks every rank has its own positions: norms, router and experts work on those. Attention, dense feed-forward
and output head see all positions and a shard of each matrix: `all_gather_sequence` before them,
`reduce_scatter_sequence` after them.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from spurline.comm.collectives import (
    all_gather_sequence,
    all_reduce_max,
    all_reduce_sum,
    reduce_scatter_sequence,
)
from spurline.comm.sequence import SequenceShard
from spurline.lora.adapters import A, B


@dataclass(frozen=True)
class TensorParallel:
    """The ranks that matrices and sequences are split over; without a group, all methods are the identity."""

    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def all_gather_sequence(self, x_BlD: Tensor, length: int | None) -> Tensor:
        """(B, l, D) -> (B, L, D): every rank's positions. Mirror: this rank's positions, summed over ranks."""
        if self.group is None:
            return x_BlD
        assert length is not None, "a share of the positions does not tell how many there are"
        shard = self._shard(length)
        return shard.trim(all_gather_sequence(shard.pad(x_BlD, 1), self.group, 1), 1)

    def reduce_scatter_sequence(self, x_BLD: Tensor) -> Tensor:
        """(B, L, D) -> (B, l, D): this rank's positions of the sum over ranks. Mirror: all_gather_sequence."""
        if self.group is None:
            return x_BLD
        shard = self._shard(x_BLD.shape[1])
        padded_BLD = F.pad(x_BLD, [0, 0, 0, shard.padded_length - shard.length])
        return reduce_scatter_sequence(padded_BLD, self.group, 1).narrow(1, 0, shard.num_real)

    def embed(self, tokens_BL: Tensor, weight_vD: Tensor) -> Tensor:
        """(B, L) and this rank's rows of the table -> (B, L, D): zeros for the tokens of other ranks."""
        if self.group is None:
            return F.embedding(tokens_BL, weight_vD)
        own_BL, mine_BL = self._own_ids(tokens_BL, weight_vD.shape[0])
        return F.embedding(own_BL, weight_vD) * mine_BL.unsqueeze(-1)

    def join_vocabulary(self, logits_v: Tensor) -> Tensor:
        """(..., v) -> (..., V): the logits of the full vocabulary, on every rank."""
        return logits_v if self.group is None else all_gather_sequence(logits_v, self.group, -1)

    def cross_entropy_sum(self, logits_BLv: Tensor, labels_BL: Tensor, ignore_index: int) -> Tensor:
        """(B, L, v), this rank's shard of the vocabulary, and (B, L) -> the summed loss, the same on every rank."""
        assert self.group is not None
        logits_BLv = logits_BLv.float()
        highest_BL = all_reduce_max(logits_BLv.amax(-1), self.group)
        logits_BLv = logits_BLv - highest_BL.unsqueeze(-1)
        own_BL, mine_BL = self._own_ids(labels_BL, logits_BLv.shape[-1])
        label_logit_BL = logits_BLv.gather(-1, own_BL.unsqueeze(-1)).squeeze(-1) * mine_BL
        sum_BL = all_reduce_sum(logits_BLv.exp().sum(-1), self.group)
        loss_BL = sum_BL.log() - all_reduce_sum(label_logit_BL, self.group)
        return (loss_BL * (labels_BL != ignore_index)).sum()

    def _own_ids(self, ids_BL: Tensor, num_own: int) -> tuple[Tensor, Tensor]:
        """Ids relative to this rank's first, 0 for those of other ranks; and a mask of this rank's ids."""
        own_BL = ids_BL - self.rank * num_own
        mine_BL = (own_BL >= 0) & (own_BL < num_own)
        return torch.where(mine_BL, own_BL, 0), mine_BL

    def _shard(self, length: int) -> SequenceShard:
        assert self.group is not None
        return SequenceShard(length, self.group.size(), self.group.rank())


def split_weight(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Make a replicated parameter a DTensor over mesh, in place: each rank keeps its shard."""
    parameter = module.get_parameter(name)
    part = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    setattr(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))


def apply_tensor_parallel(model: nn.Module, tp_mesh: DeviceMesh) -> None:
    """Split a decoder's matrices over tp_mesh, in place.

    A module's `tensor_parallel_dims` names the weights that are split, and the dim of each; the rest is replicated.
    Experts are not split here: expert parallelism shards them.
    """
    tp = TensorParallel(tp_mesh.get_group())
    for module in model.modules():
        if hasattr(module, "tp"):
            module.tp = tp  # type: ignore[assignment]
        splits: dict[str, int] = getattr(module, "tensor_parallel_dims", {})
        for path, dim in splits.items():
            owner, _, weight = path.rpartition(".")
            split_weight(module.get_submodule(owner), weight, tp_mesh, Shard(dim))
            if weight in getattr(module.get_submodule(owner), "scale_of", ()):
                # Of an adapter, split the matrix that has the split dim: B has the outputs, A the inputs.
                split_weight(module.get_submodule(owner), weight + (B if dim == 0 else A), tp_mesh, Shard(dim))
    for name, module in model.named_modules():
        if not name.endswith(".experts"):
            for weight, parameter in list(module.named_parameters(recurse=False)):
                if not hasattr(parameter, "placements"):
                    split_weight(module, weight, tp_mesh, Replicate())
