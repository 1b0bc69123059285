"""What steps have done that the host has not read yet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spurline.comm.metrics import Metric, Offered, reduce_metrics
from spurline.config import RunConfig

_TOKENS, _FAILURE = "tally/tokens", "tally/failure"


class StepTally:
    """Counts tokens and remembers the first step that was not finite, on the device until it is read.

    A step that is not finite changes nothing: its update is masked. The host learns of it with the next reading, which
    raises a ValueError: at the latest with the next step that is logged, and before a checkpoint is written.
    """

    def __init__(self, config: RunConfig[Any], device: torch.device) -> None:
        self.tokens_seen = 0
        """Tokens of all steps up to the last reading."""
        self._config = config
        self._num_tokens = torch.zeros((), dtype=torch.int64, device=device)
        self._failure_3 = torch.zeros(3, device=device)  # step (0: none), loss, gradient norm

    @torch.no_grad()
    def note(self, step: int, num_tokens: Tensor, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Add a step; returns 1.0 on the device if it is not finite, else 0.0."""
        self._num_tokens += num_tokens
        failed = ~torch.isfinite(loss + grad_norm)
        is_first = failed & (self._failure_3[0] == 0)
        number = torch.full_like(loss, step)
        self._failure_3 = torch.where(is_first, torch.stack([number, loss, grad_norm]), self._failure_3)
        return failed.float()

    def offered(self) -> list[Offered]:
        """For a reading together with other metrics, whose record goes to `take`."""
        return [
            Offered(_TOKENS, "", Metric(self._num_tokens, "same")),
            Offered(_FAILURE, "", Metric(self._failure_3, "same")),
        ]

    def take(self, record: dict[str, Any]) -> None:
        """Take out of a record what `offered` put in, and begin anew; a ValueError tells of a step that failed."""
        read = record.pop("tally")
        self.tokens_seen += read["tokens"]
        self._num_tokens.zero_()
        self._failure_3.zero_()
        step, loss, grad_norm = read["failure"]
        if step:
            raise diverged(self._config, int(step), f"the loss is {loss} and the gradient norm {grad_norm}")

    def read(self) -> None:
        """Read what there is, in one copy."""
        self.take(reduce_metrics(self.offered()).read())


def diverged(config: RunConfig[Any], step: int, what: str) -> ValueError:
    return ValueError(
        f"step {step}: {what}. Try a lower --optimizer.lr (now {config.optimizer.lr})"
        " or a longer --lr_scheduler.warmup_steps"
    )
