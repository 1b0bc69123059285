"""What all experts share: E networks over rows that lie sorted by expert. A kind of experts adds its formula.

R rows, D width, F hidden width, e experts on this rank.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from spurline import accelerator
from spurline.comm.gradients import local
from spurline.moe.config import MoEConfig
from spurline.moe.kernels.choose import choose_kernel, load_kernels, verdicts
from spurline.moe.kernels.fused_weights import FusedWeights
from spurline.moe.kernels.kernel import Kernel, Verdict, Work
from spurline.moe.kernels.products import Products
from spurline.moe.layout import axis_names, shape_of
from spurline.moe.registry import LAYOUTS
from spurline.moe.rows import Rows
from spurline.ops.draw import drawn_in_blocks, fill_truncated_normal
from spurline.ops.low_precision import LowPrecision


class Experts(nn.Module):
    """Experts whose weights are as their registered layout says.

    A subclass gives `formula`. A weight without a "hidden" axis is the same on all ranks of an expert tensor parallel
    group, whose outputs are added up: what such a weight adds to the output must be divided by `hidden_shards`.
    """

    applies_weights: ClassVar[bool] = False
    """Whether `formula` applies routing weights. Otherwise the output is weighed, and kept for that in training."""
    precision: LowPrecision | None = None
    """How matrices are multiplied, if not in the rows' dtype."""

    def __init__(self, config: MoEConfig, init_std: float = 0.02, output_std: float | None = None) -> None:
        super().__init__()
        self.kind, self.backend = config.experts, config.experts_backend
        self.width, self.hidden = config.dim, config.hidden_dim
        self.layout = LAYOUTS[self.kind]
        self.hidden_shards = 1
        self.init_std, self.output_std = init_std, output_std or init_std
        for name in self.layout:
            shape = shape_of(self.layout, name, expert=config.num_experts, hidden=self.hidden, width=self.width)
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.fused_weights = FusedWeights()
        load_kernels(self.backend)

    def formula(self, x_RD: Tensor, products: Products, *weights: Tensor) -> Tensor:
        """(R, D) -> (R, D): the experts' output, with the weights in the order of the layout.

        `products.matmul(rows, weight)` multiplies each row with the matrix of its expert; `products.per_row(bias,
        rows)` gives each row the bias of its expert. Experts that say `applies_weights` multiply the hidden state of
        each row by its routing weight, `products.weight_R`, if there is one.
        """
        raise NotImplementedError

    @drawn_in_blocks
    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator | None) -> None:
        """Matrices from a truncated normal distribution (output_std for those that write the output), biases zero."""
        axes = axis_names(self.layout, name)
        if len(axes) < 3:
            tensor.zero_()
            return
        std = self.output_std if axes[-2:] == ("width", "hidden") else self.init_std
        fill_truncated_normal(tensor, std, generator)

    def train(self, mode: bool = True) -> Experts:
        if mode:
            self.fused_weights.clear()
        return super().train(mode)

    def forward(self, rows: Rows) -> Rows:
        """The rows of this rank's experts -> what the experts make of them."""
        if torch.is_grad_enabled() and self.fused_weights.key is not None:
            self.fused_weights.clear()
        if rows.start is not None:
            rows = rows.started()
        kernel = choose_kernel(self.work(rows), self.backend)
        return kernel.run(self, rows if rows.arrival is None else rows.arrived())

    def by_products(self, kernel: Kernel, rows: Rows) -> Rows:
        """The formula, product by product, on any kernel that multiplies."""
        x_RD, weight_R = rows.tensor(), rows.weight_to_apply() if self.applies_weights else None
        counts = rows.counts.with_host_count() if kernel.counts_on_host else rows.counts
        y_RD = self.formula(x_RD, Products(kernel, counts, weight_R, self.precision), *self.weights())
        return rows.output(y_RD, is_weighed=weight_R is not None)

    def weights(self) -> list[Tensor]:
        """This rank's part of each weight, in the order of the layout."""
        return list(map(local, self.parameters(recurse=False)))

    def can_cache(self) -> bool:
        """Whether copies of the weights may be kept: every edit of them must leave a trace.

        FSDP2 gathers parameters into memory that it reuses, without a trace; and tensors made in inference mode have no
        version.
        """
        if getattr(self, "_is_fsdp_managed_module", False):
            return False
        return not any(weight.is_inference() for weight in self._parameters.values() if weight is not None)

    def work(self, rows: Rows) -> Work:
        """What the choice of a kernel for these rows depends on."""
        grad, host_e, fewest_and_most = torch.is_grad_enabled(), rows.counts.host_e, rows.counts.group_range
        equal_rows = host_e[0] if host_e is not None and len(set(host_e)) == 1 else None
        if fewest_and_most is not None and len(set(fewest_and_most)) > 1:
            equal_rows = None  # on every rank, or one would refuse its kernel while others wait for it
        cacheable = grad or (equal_rows is not None and self.can_cache())
        x = rows.x
        return Work(
            self.kind,
            accelerator.stand_in or x.device.type,
            x.dtype,
            self.width,
            self.hidden,
            equal_rows,
            grad,
            cacheable,
            "none" if self.precision is None else self.precision.recipe,
        )

    def check_backend(self, device: str, dtype: torch.dtype) -> None:
        """A ValueError if the chosen kernel can't compute these experts on such a device, whatever their rows are."""
        precision = "none" if self.precision is None else self.precision.recipe
        work = Work(self.kind, accelerator.stand_in or device, dtype, self.width, self.hidden, 1, precision=precision)
        choose_kernel(work, self.backend)

    def verdicts(self, rows: Rows) -> dict[str, Verdict]:
        """What each kernel says of these rows, the one that `auto` takes first."""
        return verdicts(self.work(rows))

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name} {tuple(weight.shape)}" for name, weight in self.named_parameters())
        return f"{self.kind}, {shapes}, backend {self.backend}"
