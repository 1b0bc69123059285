"""Context parallelism: the positions of every sequence are sharded over ranks, from embedding to loss.

B sequences of L positions, of which this rank has l (see HeadTailShard); H query heads, h of them on this rank,
R head width, X width of what is gathered; S ranks.

Norms, feed-forward, router and experts work on a rank's own positions. Attention also needs earlier positions:

- `all_gather`: every rank gathers the keys and values of all positions, and its queries stay local. Latent attention
  gathers its narrow latent and expands it on every rank.
- `ulysses`: two all-to-alls exchange positions for heads and back. In between, a rank has all positions of some heads.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spurline.comm.collectives import all_gather_sequence, all_to_all_heads
from spurline.comm.sequence import HeadTailShard

Kind = Literal["all_gather", "ulysses"]


def own(x_BL: Tensor, shard: HeadTailShard | None) -> Tensor:
    """This rank's positions of a replicated tensor: (B, L, ..) -> (B, l, ..)."""
    return x_BL if shard is None else shard.shard(x_BL, 1)


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that sequences are sharded over. Without a shard, all methods are the identity."""

    group: dist.ProcessGroup | None = None
    kind: Kind = "all_gather"

    def shard(self, length: int) -> HeadTailShard | None:
        """This rank's positions of sequences of `length`; None if it has all of them."""
        return None if self.group is None else HeadTailShard(length, self.group.size(), self.group.rank())

    @property
    def attends_from_own_positions(self) -> bool:
        """Whether queries are of this rank's positions; else they are of all positions, for some of the heads."""
        return self.group is not None and self.kind == "all_gather"

    def queries(self, q_BlHR: Tensor, shard: HeadTailShard | None) -> Tensor:
        """The queries of this rank: (B, l, H, R), or (B, L, h, R)."""
        return q_BlHR if shard is None or self.kind == "all_gather" else self._to_heads(q_BlHR, shard)

    def keys_and_values(self, k_BlHR: Tensor, v_BlHR: Tensor, shard: HeadTailShard | None) -> tuple[Tensor, Tensor]:
        """The keys and values that this rank attends to, (B, L, H, R) or (B, L, h, R) each, in one collective."""
        if shard is None:
            return k_BlHR, v_BlHR
        both = torch.cat([k_BlHR, v_BlHR], dim=-1)
        both = self.all_gather_positions(both, shard) if self.kind == "all_gather" else self._to_heads(both, shard)
        k_BLHR, v_BLHR = both.split([k_BlHR.shape[-1], v_BlHR.shape[-1]], dim=-1)
        return k_BLHR, v_BLHR

    def outputs(self, out_BLhR: Tensor, shard: HeadTailShard | None) -> Tensor:
        """The output of attention at this rank's positions, for all heads: -> (B, l, H, R)."""
        return out_BLhR if shard is None or self.kind == "all_gather" else self._to_positions(out_BLhR, shard)

    def own_heads(self, x: Tensor, shard: HeadTailShard | None) -> Tensor:
        """The part of dim 0, a per-head dim, for the heads that this rank computes."""
        if shard is None or self.kind == "all_gather":
            return x
        own = x.shape[0] // shard.size
        return x.narrow(0, shard.rank * own, own)

    def all_gather_positions(self, x_BlX: Tensor, shard: HeadTailShard | None) -> Tensor:
        """(B, l, ..) -> (B, L, ..): all ranks' positions, in order. Mirror: this rank's, summed over ranks."""
        if shard is None:
            return x_BlX
        assert self.group is not None
        return shard.in_order(all_gather_sequence(shard.pad(x_BlX, 1), self.group, 1), 1)

    def _to_heads(self, x_BlHR: Tensor, shard: HeadTailShard) -> Tensor:
        assert self.group is not None
        x_SBlhR = shard.pad(x_BlHR, 1).unflatten(2, (shard.size, -1)).movedim(2, 0)
        x_BSlhR = all_to_all_heads(x_SBlhR, self.group).movedim(0, 1)
        return shard.in_order(x_BSlhR.flatten(1, 2), 1)

    def _to_positions(self, x_BLhR: Tensor, shard: HeadTailShard) -> Tensor:
        assert self.group is not None
        x_SBlhR = shard.by_rank(x_BLhR, 1).unflatten(1, (shard.size, -1)).movedim(1, 0)
        x_BlShR = all_to_all_heads(x_SBlhR, self.group).movedim(0, 2)
        return shard.trim(x_BlShR.flatten(2, 3), 1)


def apply_context_parallel(model: nn.Module, group: dist.ProcessGroup, kind: Kind) -> None:
    """Shard the positions of a decoder's sequences over the ranks of `group`, in place.

    Weights are not changed. Each rank's loss covers its own positions, so gradients must be summed over `group`: FSDP2
    does, as it shards the weights over these ranks too.
    """
    cp = ContextParallel(group, kind)
    layers = getattr(model, "layers", nn.ModuleDict())
    knows_cp = [hasattr(getattr(block, "attention", None), "cp") for block in layers.children()]
    if not all(knows_cp) or not hasattr(model, "cp"):
        raise ValueError(
            f"parallelism.context_parallel_degree {group.size()}: the attention of {type(model).__name__} has no `cp`,"
            " through which it would reach the positions of other ranks (spurline/parallel/context.py)"
        )
    for module in model.modules():
        if hasattr(module, "cp"):
            module.cp = cp  # type: ignore[assignment]
