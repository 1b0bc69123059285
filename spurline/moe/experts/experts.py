"""The base class of experts: E networks over rows sorted by expert. Each kind of experts adds its formula.

R rows, D width, F hidden width, e experts on this rank.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spurline import accelerator
from spurline.comm.gradients import local
from spurline.lora.adapters import A, Adaptable, B
from spurline.moe.config import MoEConfig
from spurline.moe.kernels.choose import choose_kernel, load_kernels, verdicts
from spurline.moe.kernels.fused_weights import FusedWeights
from spurline.moe.kernels.kernel import Kernel, Verdict, Work
from spurline.moe.kernels.products import Products
from spurline.moe.layout import Axis, axis_names, shape_of
from spurline.moe.registry import LAYOUTS
from spurline.moe.rows import Rows
from spurline.ops.draw import drawn_in_blocks, fill_truncated_normal
from spurline.ops.low_precision import LowPrecision


class Experts(Adaptable):
    """Experts whose weights follow their registered layout.

    A subclass defines `formula`. A weight without a "hidden" axis is the same on all ranks of an expert tensor parallel
    group, whose outputs are summed: what such a weight adds to the output must be divided by `hidden_shards`.
    """

    applies_weights: ClassVar[bool] = False
    """Whether `formula` applies routing weights. Otherwise the output is weighted, and saved for that in training."""
    precision: LowPrecision | None = None
    """Precision of the matmuls, if not the rows' dtype."""

    def __init__(self, config: MoEConfig, init_std: float = 0.02, output_std: float | None = None) -> None:
        super().__init__()
        self.kind, self.backend = config.experts, config.experts_backend
        self.width, self.hidden = config.dim, config.hidden_dim
        self.layout = LAYOUTS[self.kind]
        self.weight_names = tuple(self.layout)
        self.hidden_shards = 1
        self.init_std, self.output_std = init_std, output_std or init_std
        for name in self.layout:
            shape = shape_of(self.layout, name, expert=config.num_experts, hidden=self.hidden, width=self.width)
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.fused_weights = FusedWeights()
        load_kernels(self.backend)

    def formula(self, x_RD: Tensor, products: Products, *weights: Any) -> Tensor:
        """(R, D) -> (R, D): the experts' output, given the weights in the order of the layout.

        Use the weights only through `products`: each is a tensor, or a tensor with its adapter.

        `products.matmul(rows, weight)` multiplies each row by the matrix of its expert; `products.per_row(bias,
        rows)` gives each row the bias of its expert. Experts with `applies_weights` multiply the hidden state of each
        row by its routing weight, `products.weight_R`, if there is one.
        """
        raise NotImplementedError

    @drawn_in_blocks
    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator | None) -> None:
        """Matrices from a truncated normal distribution (output_std for output projections), biases zero."""
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
        """The rows of this rank's experts -> the experts' output."""
        if torch.is_grad_enabled() and self.fused_weights.key is not None:
            self.fused_weights.clear()
        if rows.start is not None:
            rows = rows.started()
        kernel = choose_kernel(self.work(rows), self.backend)
        rows = rows if rows.arrival is None else rows.arrived()
        return self.by_products(kernel, rows) if self.scale_of else kernel.run(self, rows)

    def by_products(self, kernel: Kernel, rows: Rows) -> Rows:
        """Evaluate the formula, one grouped matmul at a time, on any kernel that has `matmul`."""
        x_RD, weight_R = rows.tensor(), rows.weight_to_apply() if self.applies_weights else None
        counts = rows.counts.with_host_count() if kernel.counts_on_host else rows.counts
        products = Products(kernel, counts, weight_R, self.precision)
        y_RD = self.formula(x_RD, products, *map(self.weight_of, self.weight_names))
        return rows.output(y_RD, is_weighed=weight_R is not None)

    def weights(self) -> list[Tensor]:
        """This rank's shard of each weight, in the order of the layout, without adapters."""
        return list(map(local, map(self._parameters.__getitem__, self.weight_names)))  # type: ignore[arg-type]

    def adaptable_weights(self) -> tuple[str, ...]:
        """The stacked matrices, not the biases."""
        return tuple(name for name in self.weight_names if len(axis_names(self.layout, name)) == 3)

    def add_adapter(self, name: str, rank: int, scale: float) -> None:
        super().add_adapter(name, rank, scale)
        expert, outputs, inputs = self.layout[name]
        self.layout = {
            **self.layout,
            name + A: (expert, Axis("rank"), inputs),
            name + B: (expert, outputs, Axis("rank")),
        }

    def can_cache(self) -> bool:
        """Whether copies of the weights may be cached: every change to the weights must be detectable.

        FSDP2 gathers parameters into memory that it reuses, which can't be detected, and tensors created in inference
        mode have no version counter.
        """
        if getattr(self, "_is_fsdp_managed_module", False):
            return False
        return not any(weight.is_inference() for weight in self._parameters.values() if weight is not None)

    def work(self, rows: Rows) -> Work:
        """Everything that the choice of a kernel for these rows depends on."""
        grad, host_e, fewest_and_most = torch.is_grad_enabled(), rows.counts.host_e, rows.counts.group_range
        equal_rows = host_e[0] if host_e is not None and len(set(host_e)) == 1 else None
        if fewest_and_most is not None and len(set(fewest_and_most)) > 1:
            equal_rows = None  # on every rank, or one rank would reject its kernel while others wait for it
        cacheable = grad or (equal_rows is not None and self.can_cache())
        x = rows.x
        return Work(
            self.kind,
            accelerator.stand_in or x.device.type,
            x.dtype,
            self.width,
            self.hidden // self.hidden_shards,
            equal_rows,
            grad,
            cacheable,
            "none" if self.precision is None else self.precision.recipe,
            adapted=bool(self.scale_of),
        )

    def check_backend(self, device: str, dtype: torch.dtype, hidden_shards: int = 0) -> None:
        """Raise a ValueError if the configured kernel can't compute these experts on this device, whatever the rows.

        hidden_shards: of the hidden width, if they are not sharded yet.
        """
        precision = "none" if self.precision is None else self.precision.recipe
        adapted, device = bool(self.scale_of), accelerator.stand_in or device
        hidden = self.hidden // (hidden_shards or self.hidden_shards)
        work = Work(self.kind, device, dtype, self.width, hidden, 1, precision=precision, adapted=adapted)
        choose_kernel(work, self.backend)

    def verdicts(self, rows: Rows) -> dict[str, Verdict]:
        """Each kernel's verdict on these rows, best first."""
        return verdicts(self.work(rows))

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name} {tuple(weight.shape)}" for name, weight in self.named_parameters())
        return f"{self.kind}, {shapes}, backend {self.backend}"
