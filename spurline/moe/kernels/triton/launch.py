"""Launch the Triton kernels: SwiGLU experts forward and backward. Nothing is read from the device.

T tokens, S rows sorted by expert, e experts, D width, F hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from spurline.device import architecture, current_device
from spurline.moe.kernels.triton.products import (
    combine_kernel,
    gate_up_kernel,
    hidden_gradient_kernel,
    outer_kernel,
    rows_kernel,
)
from spurline.moe.kernels.triton.tiles import COMBINED_COLUMNS, Tile, tile_of


class _Launcher:
    """The arguments that all launches for one set of rows share."""

    def __init__(self, x_TD: Tensor, w_eFD: Tensor, weight_S: Tensor | None, token_S: Tensor | None, count_e: Tensor):
        self.token_S, self.weight_S = token_S, weight_S
        self.count_e = count_e.to(x_TD.device)
        self.num_experts, self.hidden, self.width = w_eFD.shape
        self.num_rows = x_TD.shape[0] if token_S is None else token_S.shape[0]
        self.is_interpreted = triton.knobs.runtime.interpret
        self.architecture = "interpreter" if self.is_interpreted else architecture(x_TD.device)
        self.itemsize = x_TD.element_size()
        has_tf32 = not self.architecture.startswith("gfx") or self.architecture == "gfx942"
        self.uses_tf32 = has_tf32 and torch.get_float32_matmul_precision() != "highest"

    def tile(self, kernel: str) -> Tile:
        rows_per_expert, aligned = self.num_rows // max(self.num_experts, 1), not (self.width % 16 or self.hidden % 16)
        return tile_of(kernel, self.architecture, self.itemsize, rows_per_expert, aligned)

    def options(self, tile: Tile, depth: int | None = None) -> dict[str, Any]:
        """The arguments that all matmul kernels take; `depth` is the length of the reduction dim if it is static."""
        even = {} if depth is None else {"EVEN": depth % tile.depth == 0}
        return even | {
            "EXPERTS": max(triton.next_power_of_2(self.num_experts), 2),
            "ROWS": tile.rows,
            "COLUMNS": tile.columns,
            "DEPTH": tile.depth,
            "UPCAST": self.is_interpreted,
            "PRECISION": "tf32" if self.uses_tf32 else "ieee",
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }

    def grid(self, tile: Tile, columns: int) -> tuple[int]:
        """As many programs as any counts can need: each expert may end in a partial tile."""
        most_tiles = min(triton.cdiv(self.num_rows, tile.rows) + self.num_experts, self.num_rows)
        return (most_tiles * triton.cdiv(columns, tile.columns),)

    def empty(self, like: Tensor, *shape: int) -> Tensor:
        return like.new_empty(shape)

    def partial_sums(self, tile: Tile, columns: int, wanted: bool) -> Tensor | None:
        """(tiles, S): one sum per row and tile of columns."""
        if not wanted:
            return None
        device = self.count_e.device
        return torch.empty(triton.cdiv(columns, tile.columns), self.num_rows, device=device, dtype=torch.float32)

    def combine(self, rows_SD: Tensor, base_TD: Tensor | None, num_tokens: int) -> Tensor:
        """(S, D) -> (T, D): the rows of each token, added to base_TD in order."""
        assert self.token_S is not None
        out_TD = self.empty(rows_SD, num_tokens, self.width)
        if not out_TD.numel():
            return out_TD
        token_S, row_S = torch.sort(self.token_S, stable=True)
        end_T = torch.searchsorted(token_S, torch.arange(num_tokens, device=token_S.device), right=True)
        columns = min(triton.next_power_of_2(self.width), COMBINED_COLUMNS)
        combine_kernel[(num_tokens * triton.cdiv(self.width, columns),)](
            rows_SD,
            row_S,
            end_T,
            base_TD,
            out_TD,
            self.width,
            HAS_BASE=base_TD is not None,
            COLUMNS=columns,
            UPCAST=self.is_interpreted,
        )
        return out_TD

    def outer(self, a: Tensor, b: Tensor, like_eOI: Tensor, gather_a: bool, gather_b: bool, weigh_b: bool) -> Tensor:
        """(S, O) and (S, I) -> (e, O, I), in the dtype of `like_eOI`; either may be gathered from tokens."""
        out_eOI, tile = torch.empty_like(like_eOI, memory_format=torch.contiguous_format), self.tile("outer")
        e, num_out, num_in = out_eOI.shape
        has_token = self.token_S is not None
        outer_kernel[(e * triton.cdiv(num_out, tile.rows) * triton.cdiv(num_in, tile.columns),)](
            a,
            b,
            self.token_S,
            self.weight_S,
            self.count_e,
            out_eOI,
            e,
            num_out,
            num_in,
            GATHER_A=gather_a and has_token,
            GATHER_B=gather_b and has_token,
            WEIGH_B=weigh_b,
            **self.options(tile),
        )
        return out_eOI


def forward(
    x_TD: Tensor,
    w1_eFD: Tensor,
    w3_eFD: Tensor,
    w2_eDF: Tensor,
    weight_S: Tensor | None,
    base_TD: Tensor | None,
    token_S: Tensor | None,
    count_e: Tensor,
    weigh_before: bool,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """(T, D) -> (T, D), each row's weighted expert output added to base_TD; and with `keep` what backward needs."""
    x_TD = x_TD.contiguous()
    w1, w3, w2 = (w.to(x_TD.dtype).contiguous() for w in (w1_eFD, w3_eFD, w2_eDF))
    launch = _Launcher(x_TD, w1, weight_S, token_S, count_e)
    S, D, F, e = launch.num_rows, launch.width, launch.hidden, launch.num_experts
    kept_2SF = launch.empty(x_TD, 2, S if keep else 0, F)
    out_SD = launch.empty(x_TD, S, D)
    with current_device(x_TD.device):
        if S:
            hidden_SF, tile = launch.empty(x_TD, S, F), launch.tile("gate_up")
            gate_up_kernel[launch.grid(tile, F)](
                x_TD,
                token_S,
                weight_S,
                w1,
                w3,
                launch.count_e,
                *kept_2SF,
                hidden_SF,
                e,
                D,
                F,
                HAS_TOKEN=token_S is not None,
                BEFORE=weight_S is not None and weigh_before,
                AFTER=weight_S is not None and not weigh_before,
                KEEP=keep,
                **launch.options(tile, D),
            )
            tile = launch.tile("rows")
            rows_kernel[launch.grid(tile, D)](
                hidden_SF,
                w2,
                None,
                None,
                launch.count_e,
                None,
                None,
                None,
                out_SD,
                None,
                S,
                e,
                F,
                D,
                1,
                F,
                HAS_TOKEN=False,
                TWO=False,
                WEIGH=False,
                **launch.options(tile, F),
            )
            del hidden_SF
        if token_S is not None:
            base_TD = None if base_TD is None else base_TD.contiguous()
            return launch.combine(out_SD, base_TD, x_TD.shape[0]), kept_2SF
    return out_SD if base_TD is None else out_SD + base_TD, kept_2SF


def backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    w1_eFD: Tensor,
    w3_eFD: Tensor,
    w2_eDF: Tensor,
    weight_S: Tensor | None,
    token_S: Tensor | None,
    count_e: Tensor,
    kept_2SF: Tensor,
    weigh_before: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, w1, w3, w2 and weight_S; the matrices' are empty unless `need_weights`."""
    x_TD, grad_TD = x_TD.contiguous(), grad_TD.to(x_TD.dtype).contiguous()
    w1, w3, w2 = (w.to(x_TD.dtype).contiguous() for w in (w1_eFD, w3_eFD, w2_eDF))
    launch = _Launcher(x_TD, w1, weight_S, token_S, count_e)
    S, D, F, e = launch.num_rows, launch.width, launch.hidden, launch.num_experts
    before, after = (weight_S is not None and weigh_before is now for now in (True, False))
    if not S:
        dws = [torch.zeros_like(w) if need_weights else w.new_empty(0, *w.shape[1:]) for w in (w1_eFD, w3_eFD, w2_eDF)]
        return torch.zeros_like(x_TD), dws[0], dws[1], dws[2], _no_weights(x_TD, weight_S)
    with current_device(x_TD.device):
        dgate_up_2SF = torch.empty_like(kept_2SF)
        hidden_SF = launch.empty(x_TD, S if need_weights else 0, F)
        tile = launch.tile("hidden_gradient")
        sums = launch.partial_sums(tile, F, after)
        hidden_gradient_kernel[launch.grid(tile, F)](
            grad_TD,
            token_S,
            weight_S,
            w2,
            launch.count_e,
            *kept_2SF,
            *dgate_up_2SF,
            hidden_SF,
            sums,
            S,
            e,
            D,
            F,
            HAS_TOKEN=token_S is not None,
            AFTER=after,
            NEED_HIDDEN=need_weights,
            **launch.options(tile, D),
        )
        dw1, dw3, dw2 = (w.new_empty(0, *w.shape[1:]) for w in (w1_eFD, w3_eFD, w2_eDF))
        if need_weights:
            dw2 = launch.outer(grad_TD, hidden_SF, w2_eDF, True, False, False)
            dw1 = launch.outer(dgate_up_2SF[0], x_TD, w1_eFD, False, True, before)
            dw3 = launch.outer(dgate_up_2SF[1], x_TD, w3_eFD, False, True, before)
        del hidden_SF
        dx_SD, tile = launch.empty(x_TD, S, D), launch.tile("weighed_rows" if before else "rows")
        sums = launch.partial_sums(tile, D, True) if before else sums
        rows_kernel[launch.grid(tile, D)](
            dgate_up_2SF[0],
            w1,
            dgate_up_2SF[1],
            w3,
            launch.count_e,
            x_TD,
            token_S,
            weight_S,
            dx_SD,
            sums if before else None,
            S,
            e,
            F,
            D,
            D,
            1,
            HAS_TOKEN=token_S is not None,
            TWO=True,
            WEIGH=before,
            **launch.options(tile, F),
        )
        dx_TD = dx_SD if token_S is None else launch.combine(dx_SD, None, x_TD.shape[0])
        dweight_S = _no_weights(x_TD, weight_S) if sums is None or weight_S is None else sums.sum(0).to(weight_S.dtype)
    return dx_TD, dw1, dw3, dw2, dweight_S


def _no_weights(x_TD: Tensor, weight_S: Tensor | None) -> Tensor:
    return x_TD.new_empty(0, dtype=torch.float32) if weight_S is None else torch.zeros_like(weight_S)
