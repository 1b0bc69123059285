"""What a step measured: on the device until it is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from spurline.comm.metrics import Metric, Offered, collect_metrics, join_records, reduce_metrics
from spurline.moe.dispatch.capacity import apply_capacity_metrics
from spurline.parallel.mesh import Meshes
from spurline.train.metrics.tally import StepTally


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of the last step, with those that the model's modules offer."""

    step: int
    lr: float
    num_tokens: Tensor
    """Real tokens, of all ranks."""
    loss: Tensor
    grad_norm: Tensor
    model: nn.Module = field(repr=False)
    tally: StepTally = field(repr=False)
    meshes: Meshes | None
    """The ranks that metrics are reduced over; None for a single rank."""
    may_grow: bool = True
    """Whether reading lets `overflow grow` take effect: not where a step is only logged because it is saved."""

    def read(self) -> dict[str, Any]:
        """Reduce all metrics over the ranks and copy them to the host: all ranks together, before the next step.

        The keys of MoE layers are present even without MoE layers. Non-finite steps since the last host read, this one
        included, are reported, by a ValueError if the run is to stop.
        """
        own = {"loss": Metric(self.loss, "same"), "grad_norm": Metric(self.grad_norm, "same")}
        offered = [*(Offered(name, "", metric) for name, metric in own.items()), *collect_metrics(self.model)]
        meshes = self.meshes
        # Other pipeline stages have other modules, and so other metrics.
        reduced = reduce_metrics([*offered, *self.tally.offered()], None if meshes is None else meshes.stage_group)
        record = reduced.read()
        if meshes is not None and meshes.pp is not None:
            record = join_records(record, reduced.reductions(), meshes.pp.get_group())
        self.tally.take(record)
        apply_capacity_metrics(self.model, record, self.may_grow)
        return {
            "step": self.step,
            "lr": self.lr,
            "balance_loss": None,
            "expert_load": {},
            "routing": {},
            **record,
        }
