"""Expert weights laid out for batched matmuls, kept between calls while gradients are off.

e experts, c rows per expert, D width, F hidden width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

_optimizer_steps = 0


def _note_optimizer_step(*_: object) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


# Fused optimizers write weights without raising their version, so steps count as edits too.
register_optimizer_step_post_hook(_note_optimizer_step)


class FusedWeights:
    """`cat(w1, w3)` and the transposed w2 as contiguous copies, made anew whenever a weight may have changed.

    An entry is valid for one storage, version, shape, dtype and device of each weight and until the next optimizer step
    anywhere. Edits through `.data` leave no trace in PyTorch: call `clear()` after those.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._sources: tuple[Tensor, ...] = ()
        self._w13_eDX: Tensor | None = None
        self._w2_eFD: Tensor | None = None

    @staticmethod
    def can_hold(*weights: Tensor) -> bool:
        """Tensors made in inference mode have no version, so edits of them could not be noticed."""
        return not any(w.is_inference() for w in weights)

    def swiglu(self, rows_RD: Tensor, num_rows: int, w1_eFD: Tensor, w3_eFD: Tensor, w2_eDF: Tensor) -> Tensor:
        """(R, D), with num_rows rows for every expert -> (R, D), in two batched matmuls."""
        w13_eDX, w2_eFD = self._get(rows_RD.dtype, w1_eFD, w3_eFD, w2_eDF)
        gate_ecF, up_ecF = (rows_RD.reshape(-1, num_rows, rows_RD.shape[1]) @ w13_eDX).chunk(2, dim=-1)
        return ((F.silu(gate_ecF) * up_ecF) @ w2_eFD).flatten(0, 1)

    def _get(self, dtype: torch.dtype, w1_eFD: Tensor, w3_eFD: Tensor, w2_eDF: Tensor) -> tuple[Tensor, Tensor]:
        weights = (w1_eFD, w3_eFD, w2_eDF)
        key = (dtype, _optimizer_steps, *(_identity(w) for w in weights))
        if self._key != key or self._w13_eDX is None or self._w2_eFD is None:
            self.clear()
            self._w13_eDX = torch.cat([w1_eFD, w3_eFD], dim=1).to(dtype).transpose(1, 2).contiguous()
            self._w2_eFD = w2_eDF.to(dtype).transpose(1, 2).contiguous()
            # Holding the sources keeps their memory from being handed to other tensors at the same address.
            self._key, self._sources = key, tuple(w.detach() for w in weights)
        return self._w13_eDX, self._w2_eFD


def _identity(w: Tensor) -> tuple[object, ...]:
    return (w.data_ptr(), w.storage_offset(), w.stride(), w._version, w.shape, w.dtype, w.device)
