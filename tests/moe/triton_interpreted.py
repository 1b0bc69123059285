"""What the Triton kernels compute, in Triton's interpreter: prints errors as JSON. Run with TRITON_INTERPRET=1.

A process of its own: Triton decides when a kernel is decorated whether it is interpreted.
"""

import json
import sys

import torch
from torch import Tensor

from spurline import MoE, MoEConfig
from spurline.moe.kernels.grouped import grouped_matmul
from spurline.moe.kernels.triton.experts import triton_experts
from spurline.moe.telemetry import counters, enable
from spurline.ops.rows import gather_rows, scatter_add_rows
from spurline.testing.equivalence import errors_between, layer_results, reference_results, relative_error

NAMES = ("y", "x", "w1", "w3", "w2", "weight", "base")
# Counts of experts; the tiles of the interpreter have 16 rows, columns and elements of the summed dim.
COUNTS = {"uneven": [3, 0, 17, 1, 16], "one full": [0, 0, 33], "one row": [1], "empty": [0, 0]}


def inputs(
    counts: list[int], dtype: torch.dtype, D: int, F: int, on_tokens: bool, weights: bool
) -> list[Tensor | None]:
    """x, w1, w3, w2, weight_S, base_TD, token_S: the last tokens have no rows."""
    e, S = len(counts), sum(counts)
    T = 24 if on_tokens else S
    matrices = [(0.3 * torch.randn(e, *shape)).to(dtype).requires_grad_() for shape in ((F, D), (F, D), (D, F))]
    return [
        torch.randn(T, D).to(dtype).requires_grad_(),
        *matrices,
        torch.rand(S).requires_grad_() if weights else None,
        torch.randn(T, D).to(dtype).requires_grad_() if on_tokens else None,
        torch.randint(T - 2, (S,)) if on_tokens else None,
    ]


def results(run, tensors: list[Tensor | None], dtype: torch.dtype) -> dict[str, Tensor]:
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in tensors[:6]]
    y = run(*leaves, tensors[6])
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    wanted = [leaf for leaf in leaves if leaf is not None]
    grads = iter(torch.autograd.grad(y, wanted, grad))
    found = {name: next(grads) for name, leaf in zip(NAMES[1:], leaves, strict=True) if leaf is not None}
    return {"y": y.detach()} | found


def errors(counts: list[int], dtype: torch.dtype, before: bool, on_tokens: bool, weights: bool = True, D=24, F=40):
    """Of the kernel, and of PyTorch's grouped matmul in the same dtype, against float64."""
    torch.manual_seed(0)
    tensors, count_e = inputs(counts, dtype, D, F, on_tokens, weights), torch.tensor(counts)

    def by_triton(x, w1, w3, w2, weight, base, token):
        return triton_experts(x, w1, w3, w2, weight, base, token, count_e, before, True)[0]

    def by(kernel: str):
        def run(x, w1, w3, w2, weight, base, token):
            rows = x if token is None else gather_rows(x, token)
            scale = 1.0 if weight is None else weight.to(x.dtype).unsqueeze(1)
            rows = rows * scale if before else rows
            gate, up = (grouped_matmul(rows, w, count_e, kernel) for w in (w1, w3))
            y = grouped_matmul(torch.nn.functional.silu(gate) * up, w2, count_e, kernel)
            y = y if before else y * scale
            return y if token is None else scatter_add_rows(y, token, x.shape[0], base)

        return run

    ours = results(by_triton, tensors, dtype)
    exact = results(by("loop"), tensors, torch.float64)
    theirs = results(by("grouped_mm" if dtype != torch.float32 else "loop"), tensors, dtype)
    return {name: [relative_error(of[name], exact[name]) for of in (ours, theirs)] for name in exact}


def layer() -> dict[str, object]:
    """A whole layer against the reference, and what it keeps for its backward pass beside the CPU kernel."""
    enable()
    torch.manual_seed(0)
    config = MoEConfig(dim=24, hidden_dim=40, num_experts=4, top_k=2, num_shared_experts=1, experts_backend="triton")
    moe = MoE(config, init_std=0.4)
    x = torch.randn(2, 11, 24)
    found = {"errors": errors_between(layer_results(moe, x), reference_results(moe, x)), "paths": counters()}
    kept = {}
    for backend in ("triton", "stream"):
        moe.experts.backend = backend
        kept[backend] = bytes_kept(moe, torch.randn(2, 11, 24, requires_grad=True))
    moe.experts.backend = "triton"
    return found | {"kept": kept, "same": torch.equal(moe(x), moe(x))}


def bytes_kept(moe: MoE, x: Tensor) -> int:
    """Bytes that autograd keeps for the backward pass, without weights and inputs."""
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = moe(x)  # alive, so that no storage is used twice
    own = {tensor.untyped_storage().data_ptr() for tensor in (x, y, *moe.parameters())}
    return sum(size for place, size in sizes.items() if place not in own)


def main() -> None:
    found: dict[str, object] = {}
    if "layer" in sys.argv:
        found["layer"] = layer()
    else:
        f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
        found = {
            "uneven, before": errors(COUNTS["uneven"], f32, True, True),
            "rows in order": errors(COUNTS["uneven"], f32, False, False),
            "one row": errors(COUNTS["one row"], f32, False, True, D=3, F=5),
            "empty": errors(COUNTS["empty"], f32, False, True),
            "bfloat16, after": errors(COUNTS["uneven"], bf16, False, True),
        }
        if "more" in sys.argv:
            found |= {
                "uneven, after": errors(COUNTS["uneven"], f32, False, True),
                "rows in order, before, no weights": errors(COUNTS["uneven"], f32, True, False, weights=False),
                "whole tiles": errors([16, 32], f32, False, True, D=32, F=16),
                "one full": errors(COUNTS["one full"], f32, False, True),
                "bfloat16, before": errors(COUNTS["uneven"], bf16, True, True),
                "float16": errors(COUNTS["uneven"], f16, False, True),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
