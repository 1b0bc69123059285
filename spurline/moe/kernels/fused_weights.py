"""Expert weights laid out for batched matmuls, cached between calls while gradients are off.

e experts, D width, F hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from spurline.moe.telemetry import counted

_optimizer_steps = 0


def _note_optimizer_step(*_: object) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


# Fused optimizers write weights without bumping their version counter, so steps count as changes too.
register_optimizer_step_post_hook(_note_optimizer_step)


class FusedWeights:
    """`cat(w1, w3)` and the transposed w2 as contiguous copies, rebuilt whenever a weight may have changed.

    An entry is valid for one storage, version, shape, dtype and device of each weight and until the next optimizer step
    anywhere. For a DTensor, both its own version and that of its local tensor count: edits bump one or the other. Edits
    through `.data` bump neither: call `clear()` after those.
    """

    def __init__(self) -> None:
        self.clear()

    def __reduce__(self) -> tuple[type[FusedWeights], tuple[()]]:
        """A copy or a pickle of experts is without the cache, which belongs to the memory of the original's weights."""
        return FusedWeights, ()

    def clear(self) -> None:
        self.key: tuple[object, ...] | None = None
        self._sources: tuple[Tensor, ...] = ()
        self._fused: tuple[Tensor, Tensor] | None = None

    def get(self, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, Tensor]:
        """The weights w1, w3 and w2 as (e, D, 2F) and (e, F, D) in dtype; from the cache if they are unchanged."""
        key = (dtype, _optimizer_steps, *(_identity(w) for w in weights))
        return self._hit() if self.key == key and self._fused is not None else self._miss(key, dtype, weights)

    @counted("fused_weights.hits")
    def _hit(self) -> tuple[Tensor, Tensor]:
        assert self._fused is not None
        return self._fused

    @counted("fused_weights.misses")
    def _miss(self, key: tuple[object, ...], dtype: torch.dtype, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        self.clear()
        w1_eFD, w3_eFD, w2_eDF = (_part(w).detach() for w in weights)
        w13_eDX = torch.cat([w1_eFD, w3_eFD], dim=1).to(dtype).transpose(1, 2).contiguous()
        self._fused = w13_eDX, w2_eDF.to(dtype).transpose(1, 2).contiguous()
        # Holding the sources keeps their memory from being reused by other tensors at the same address.
        self.key, self._sources = key, (w1_eFD, w3_eFD, w2_eDF)
        return self._fused


def _part(weight: Tensor) -> Tensor:
    return weight._local_tensor if isinstance(weight, DTensor) else weight


def _identity(weight: Tensor) -> tuple[object, ...]:
    w = _part(weight)
    versions = weight._version, w._version
    return (w.data_ptr(), w.storage_offset(), w.stride(), versions, w.shape, w.dtype, w.device)
