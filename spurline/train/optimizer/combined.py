"""Several optimizers that step, save and load as one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


class CombinedOptimizer(torch.optim.Optimizer):
    """One optimizer made of several, each with its own parameters.

    Parameter groups and state are the same objects here and in the parts. So whatever reads or sets them on a torch
    optimizer (schedules, checkpoints, torch.distributed.checkpoint.state_dict) reaches all parts.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], defaults={})
        for part in self.parts:
            assert not part.state, "combine optimizers before their first step"
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.found_inf = getattr(self, "found_inf", None)  # type: ignore[attr-defined]
            part.step()
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called at the end of load_state_dict, with new groups in the old order, and new state."""
        super().__setstate__(state)
        groups = iter(self.param_groups)
        for part in self.parts:
            part.__setstate__({"state": self.state, "param_groups": [next(groups) for _ in part.param_groups]})
