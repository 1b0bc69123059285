"""Muon: orthogonalized momentum, for matrices and stacks of matrices, sharded or not."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from spurline.train.optimizer.newton_schulz import orthogonalize, update_scale
from spurline.train.optimizer.shards import local, local_gradient
from spurline.train.optimizer.whole_matrices import (
    Cut,
    cuts_of,
    exchange_matrices_for_parts,
    exchange_parts_for_matrices,
)


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for matrices (A, B) and stacks of them (E, A, B), also as DTensors.

    On one rank a matrix is updated exactly as by torch.optim.Muon if ns_dtype is bfloat16, its only choice; a stack as
    if each of its matrices were a parameter of its own. On many ranks, momentum, decay and update touch only the local
    shard; sharded matrices are reassembled for the orthogonalization (whole_matrices.py says what that costs).

    ns_dtype is the dtype of the orthogonalization: bfloat16 is as good and much faster on accelerators, but slower than
    float32 on most CPUs. None selects bfloat16 on accelerators and float32 on CPUs.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_dtype: torch.dtype | None = None,
        adjust_lr: str = "original",
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr": adjust_lr,
        }
        self.ns_dtype = ns_dtype
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim not in (2, 3):
                    raise ValueError(
                        f"Muon takes matrices and stacks of matrices, not a parameter of {tuple(parameter.shape)}"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for batch, cuts in batches_of(parameters):
                self._update(batch, cuts, group)
        return loss

    def _update(self, parameters: list[Tensor], cuts: tuple[Cut, ...], group: dict[str, Any]) -> None:
        """Update parameters of the same shape and sharding."""
        directions = [self._direction(p, group["momentum"], group["nesterov"]) for p in parameters]
        parts_nab = directions[0] if len(directions) == 1 else torch.cat(directions)
        matrices_kAB = exchange_parts_for_matrices(parts_nab, cuts)
        matrices_kAB = orthogonalize(matrices_kAB, group["ns_steps"])
        parts_nab = exchange_matrices_for_parts(matrices_kAB, cuts, parts_nab.size(0))

        lr, failed = group["lr"], self._failed()
        num_rows, num_columns = parameters[0].shape[-2:]
        scaled_lr = lr * update_scale(num_rows, num_columns, group["adjust_lr"])
        updates = parts_nab.split([direction.size(0) for direction in directions])
        decay: float | Tensor = 1 - lr * group["weight_decay"]
        if failed is not None:
            decay = torch.where(failed, 1.0, decay)
        for parameter, update in zip(parameters, updates, strict=True):
            part = local(parameter)
            update = update if failed is None else torch.where(failed, 0.0, update)
            part.mul_(decay)
            part.add_(update.view_as(part), alpha=-scaled_lr)
        torch.autograd.graph.increment_version(parameters)

    def _direction(self, parameter: Tensor, momentum: float, nesterov: bool) -> Tensor:
        """Update the momentum with this step's gradient, and return the direction to orthogonalize, as a stack."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient, mean = local_gradient(parameter), local(state["momentum_buffer"])
        if (failed := self._failed()) is not None:
            gradient = torch.where(failed, mean, gradient)  # which leaves the mean unchanged
        mean.lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(mean, momentum) if nesterov else mean
        # Cast before the exchange, so that ranks send the narrow dtype that they multiply in.
        direction = direction.to(self._dtype_on(direction.device))
        return direction if direction.ndim == 3 else direction.unsqueeze(0)

    def _failed(self) -> Tensor | None:
        """On the device: whether this step must change nothing. torch's own optimizers read `found_inf` too."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        return None if found_inf is None else found_inf > 0

    def _dtype_on(self, device: torch.device) -> torch.dtype:
        if self.ns_dtype is not None:
            return self.ns_dtype
        return torch.float32 if device.type == "cpu" else torch.bfloat16


def batches_of(parameters: list[Tensor]) -> list[tuple[list[Tensor], tuple[Cut, ...]]]:
    """Parameters to update together, with their cuts; the same on all ranks, in the same order.

    If matrices are sharded, several parameters of one shape are exchanged together, until there is a matrix for each
    rank to work on. If they are not, each parameter is a batch by itself, and nothing is copied.
    """
    batches: list[tuple[list[Tensor], tuple[Cut, ...]]] = []
    open_batches: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        cuts = cuts_of(parameter)
        batch = open_batches.setdefault((cuts, parameter.shape[-2:], local(parameter).shape), [])
        if not batch:
            batches.append((batch, cuts))
        batch.append(parameter)
        num_matrices = sum(math.prod(local(p).shape[:-2]) for p in batch)
        if num_matrices >= math.prod(cut.group.size() for cut in cuts):
            del open_batches[cuts, parameter.shape[-2:], local(parameter).shape]
    return batches
