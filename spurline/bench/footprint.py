"""Memory of a layer: bytes saved for backward, and growth of the process during forward and backward.

Growth is the peak resident size of a separate process, since not all memory comes from torch's allocator.
"""

import json
import resource
import subprocess
import sys

import torch
from torch import Tensor

from spurline.bench.cases import CASES, Case
from spurline.bench.layers import Candidate, make_contest


def saved_bytes(candidate: Candidate) -> int:
    """Bytes saved for backward, without weights and input."""
    ours = {t.untyped_storage().data_ptr() for t in (candidate.x, *candidate.layer.parameters())}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = candidate.layer(candidate.x)
    del y
    return sum(kept.values())


def footprint(case: Case, name: str, threads: int) -> dict[str, int]:
    """Bytes by kind, each measured in a new process: saved, forward (no_grad), training (without weight gradients)."""
    found = {}
    for what in ("saved", "forward", "training"):
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "spurline.bench.footprint",
            case.name,
            name,
            what,
            str(threads),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1:]}")
        found[what] = json.loads(done.stdout)
    return found


def _measure(case: Case, name: str, what: str) -> int:
    # Warm up first: code, threads and tables loaded by a first call don't count.
    for candidate in make_contest(Case("warm-up", 64, 32, 4, 2, 64)).candidates.values():
        candidate.forward_and_backward()
    candidate = make_contest(case, peers=name != "spurline").candidates[name]
    if what == "saved":
        return saved_bytes(candidate)
    candidate.grad = candidate.grad.clone()
    before = resident_bytes()
    if what == "forward":
        candidate.forward()
        return most_resident_bytes() - before
    candidate.forward_and_backward()
    return most_resident_bytes() - before - sum(p.numel() * p.element_size() for p in candidate.layer.parameters())


def resident_bytes() -> int:
    """Current resident size; also resets the peak that most_resident_bytes reports."""
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets VmHWM to the current size
    return resident


def most_resident_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


if __name__ == "__main__":
    case_name, layer_name, kind, num_threads = sys.argv[1:]
    torch.set_num_threads(int(num_threads))
    print(json.dumps(_measure(CASES[case_name], layer_name, kind)))
