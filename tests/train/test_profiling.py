import json
import re

import pytest
import torch
from torch import nn

from spurline.moe import MoE, MoEConfig
from spurline.parallel.remat import apply_remat
from spurline.train import profiling
from spurline.train.profiling import StepProfiler


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.Linear(32, 32)
        self.moe = MoE(MoEConfig(dim=32, hidden_dim=64, num_experts=4, top_k=2, experts_backend="loop"))

    def forward(self, x):
        return x + self.moe(self.attention(x).tanh())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 32)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def profile_run(folder, steps, first, last, by_layer=True, remat="none"):
    model = Model()
    apply_remat(model, remat)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    profiler = StepProfiler(model if by_layer else None, folder / "profile", first, last)
    for step in range(1, steps + 1):
        with profiler.step(step):
            model(torch.arange(10).view(2, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    profiler.finish()
    assert not any(module._forward_hooks for module in model.modules()) or steps < first


def names_in_trace(folder):
    return {event.get("name") for event in json.loads((folder / "profile/trace.json").read_text())["traceEvents"]}


def rows(folder):
    """(layer, operation) -> calls, of the second table."""
    operations = (folder / "profile/ops.txt").read_text().split("\n\n")[1]
    found = re.findall(r"^(\S+) +[\d.]+ +[\d.]+% +(\d+)  (.+)$", operations, re.MULTILINE)
    return {(layer, op): int(calls) for layer, calls, op in found}


@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_asked_steps_are_traced_and_their_operations_counted_by_layer(tmp_path, remat, monkeypatch):
    monkeypatch.setattr(profiling, "_OPS_A_LAYER", 100)
    profile_run(tmp_path, steps=4, first=2, last=4, remat=remat)
    names = names_in_trace(tmp_path)
    assert {"step 2", "step 3", "layer: layers.1.moe.experts"} <= names
    assert not {"step 1", "step 4"} & names
    counted = rows(tmp_path)
    # Two steps; a linear layer's backward makes two products and belongs to its forward's layer.
    assert counted["layers.0.attention", "aten::addmm"] == 2 * (2 if remat == "full" else 1)
    assert counted["layers.0.attention", "aten::mm"] == 2 * 2
    assert counted["layers.1.moe.experts", "aten::silu_backward"] == 2
    # To the optimizer belong steps, not layers.
    assert counted["optimizer", "aten::addcdiv_"] > 0
    layers = (tmp_path / "profile/ops.txt").read_text().split("\n\n")[0]
    assert {"embedding", "layers.1.moe.router", "layers.0.moe", "optimizer"} <= {
        line.split()[0] for line in layers.splitlines()
    }


def test_each_layer_has_its_costliest_operations_and_shares_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "_OPS_A_LAYER", 3)
    profile_run(tmp_path, steps=1, first=1, last=2)
    assert sum(layer == "layers.1.attention" for layer, _ in rows(tmp_path)) == 3
    layers = (tmp_path / "profile/ops.txt").read_text().split("\n\n")[0]
    shares = [float(share) for share in re.findall(r"([\d.]+)%", layers)]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100, abs=1)


def test_a_run_that_ends_early_keeps_what_it_has(tmp_path):
    profile_run(tmp_path, steps=2, first=2, last=9)
    assert "step 2" in names_in_trace(tmp_path)


def test_a_run_that_never_gets_there_writes_nothing(tmp_path):
    profile_run(tmp_path, steps=2, first=3, last=4)
    assert not (tmp_path / "profile").exists()


def test_without_layers_operations_are_told_alone(tmp_path):
    profile_run(tmp_path, steps=1, first=1, last=2, by_layer=False)
    assert {layer for layer, _ in rows(tmp_path)} == {"(outside)", "optimizer"}
