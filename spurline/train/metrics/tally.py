"""Results of steps that the host has not read yet. The first W bad steps are kept one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spurline.comm.metrics import Metric, Offered, reduce_metrics
from spurline.config import RunConfig
from spurline.train.exit_codes import DivergedError

_TOKENS, _FAILED, _NUM_FAILED, _IN_A_ROW = "tally/tokens", "tally/failed", "tally/num_failed", "tally/in_a_row"
_W = 8


class FailedStep(NamedTuple):
    step: int
    loss: float
    grad_norm: float


class StepTally:
    """Counts tokens and records non-finite steps, on the device until the host reads them.

    A non-finite step changes nothing: its update is masked. The host learns of it with the next read: at the latest at
    the next logged step, and before a checkpoint is written.
    """

    def __init__(self, device: torch.device, report: Callable[[list[FailedStep], int, int], None]) -> None:
        """`report` is called after a read with bad steps: the first of them, how many, and how many in a row."""
        self.tokens_seen = 0
        """Tokens of all steps up to the last host read."""
        self._report = report
        self._num_tokens = torch.zeros((), dtype=torch.int64, device=device)
        self._failed_W3 = torch.zeros(_W, 3, device=device)  # step, loss, gradient norm
        self._slot_W = torch.arange(_W, device=device)
        self._num_failed = torch.zeros_like(self._num_tokens)
        self._in_a_row, self._most_in_a_row = torch.zeros_like(self._num_tokens), torch.zeros_like(self._num_tokens)

    @torch.no_grad()
    def note(self, step: int, num_tokens: Tensor, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Add a step; returns 1.0 on the device if it is not finite, else 0.0."""
        self._num_tokens += num_tokens
        failed = ~torch.isfinite(loss + grad_norm)
        row_3 = torch.stack([torch.full_like(loss, step), loss, grad_norm])
        is_its_slot_W = failed & (self._slot_W == self._num_failed)
        self._failed_W3 = torch.where(is_its_slot_W.unsqueeze(1), row_3, self._failed_W3)
        self._num_failed += failed
        self._in_a_row = (self._in_a_row + 1) * failed
        self._most_in_a_row = torch.maximum(self._most_in_a_row, self._in_a_row)
        return failed.float()

    def offered(self) -> list[Offered]:
        """The counters as metrics, to be read along with others; pass the record to `take`."""
        own = {
            _TOKENS: self._num_tokens,
            _FAILED: self._failed_W3,
            _NUM_FAILED: self._num_failed,
            _IN_A_ROW: self._most_in_a_row,
        }
        return [Offered(name, "", Metric(value, "same")) for name, value in own.items()]

    def take(self, record: dict[str, Any]) -> None:
        """Remove from a record what `offered` added, reset the counters, and report bad steps."""
        read = record.pop("tally")
        self.tokens_seen += read["tokens"]
        self._num_tokens.zero_()
        self._num_failed.zero_()
        self._most_in_a_row = torch.zeros_like(self._most_in_a_row)
        if num_failed := read["num_failed"]:
            rows = [read["failed"][i : i + 3] for i in range(0, 3 * min(num_failed, _W), 3)]
            failed = [FailedStep(int(step), loss, grad_norm) for step, loss, grad_norm in rows]
            self._report(failed, num_failed, read["in_a_row"])

    def read(self) -> None:
        """Read the counters alone, in one copy to the host."""
        self.take(reduce_metrics(self.offered()).read())


def diverged(config: RunConfig[Any], step: int, what: str) -> DivergedError:
    return DivergedError(
        f"step {step}: {what}. Try a lower --optimizer.lr (now {config.optimizer.lr})"
        " or a longer --lr_scheduler.warmup_steps"
    )
