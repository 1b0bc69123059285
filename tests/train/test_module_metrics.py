"""Adding a metric takes one file: a user's router with its own metrics, in runs on one and two ranks."""

import json
import os
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from spurline.comm.metrics import Metric
from spurline.config import Data, Job, LRScheduler, Metrics, Parallelism, RunConfig, Training
from spurline.models.common.attention import LatentAttention
from spurline.models.deepseek_v3.model import DeepSeekV3
from spurline.moe import MoEConfig, register_router
from spurline.moe.router import Router
from spurline.report.page import make_page
from spurline.report.read import read_runs
from spurline.testing import RankPool
from spurline.testing.tiny import tiny_model
from spurline.train.run import train

LAYERS = ["layers.1.moe", "layers.2.moe"]
# What the routers of this process saw, by layer: an entry for each micro-batch.
SEEN: dict[int, list[Tensor]] = defaultdict(list)


class ProbedRouter(Router):
    """Offers its largest logit, its number of tokens, and the mean size of its logits, of a step."""

    def __init__(self, config: MoEConfig, init_std: float = 0.02) -> None:
        super().__init__(config, init_std)
        self.logit_MTE: list[Tensor] = []

    def logits(self, x_TD: Tensor) -> Tensor:
        logit_TE = super().logits(x_TD)
        if self.training and torch.is_grad_enabled():
            self.logit_MTE.append(logit_TE.detach())
            SEEN[id(self)].append(logit_TE.detach().clone())
        return logit_TE

    def metrics(self) -> dict[str, Metric]:
        logit_TE = torch.cat(self.logit_MTE)
        return super().metrics() | {
            "largest_logit": Metric(logit_TE.max(), "max"),
            "routed_tokens": Metric(torch.tensor(len(logit_TE)), "sum", per_layer=False),
            "routing/logit_size": Metric(logit_TE.abs().mean(), "mean"),
        }

    def reset_metrics(self) -> None:
        super().reset_metrics()
        self.logit_MTE.clear()


register_router("probed", ProbedRouter)


def make_config(folder: Path, num_ranks: int) -> RunConfig[Any]:
    return RunConfig(
        job=Job(str(folder / "run")),
        model=tiny_model(
            vocab_size=257,
            num_heads=2,
            moe={"num_experts": 4, "router": "probed", "aux_loss": "none", "num_shared_experts": 0},
        ),
        training=Training(steps=4, seq_len=16, local_batch_size=2, global_batch_size=8, threads=1),
        lr_scheduler=LRScheduler(warmup_steps=2),
        parallelism=Parallelism(expert_parallel_degree=num_ranks),
        data=Data(path=str(folder / "text.txt"), validation_fraction=0.1),
        metrics=Metrics(log_interval=2, validation_batches=1, sample_tokens=0),
    )


def norm_among_others(module: nn.Module) -> dict[str, Metric]:
    """In the groups of an MoE layer's metrics, of modules that are none: the model itself, and its attention."""
    norm = next(module.parameters()).detach().norm()
    return {"routing/weight_norm": Metric(norm, "same"), "capacity/weight_norm": Metric(norm, "same")}


def train_on_rank(rank: int, config: RunConfig[Any], num_ranks: int) -> list[list[Tensor]]:
    """What each layer saw, by layer and micro-batch."""
    SEEN.clear()
    with (
        mock.patch.dict(os.environ, {"WORLD_SIZE": str(num_ranks)}),
        mock.patch.object(DeepSeekV3, "metrics", norm_among_others, create=True),
        mock.patch.object(LatentAttention, "metrics", norm_among_others, create=True),
    ):
        train("deepseek_v3", "deepseek_v3_debugmodel", config)
    return list(SEEN.values())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_metric_of_a_module_reaches_every_writer_and_the_report(
    ranks: RankPool, tmp_path: Path, num_ranks: int
) -> None:
    (tmp_path / "text.txt").write_text("a side track carries some of the traffic " * 200)
    config = make_config(tmp_path, num_ranks)
    seen = ranks.run(train_on_rank, num_ranks, config, num_ranks)

    run = tmp_path / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [2, 4]
    micro_batches = 8 // 2 // num_ranks
    for record in records:
        own = slice((record["step"] - 1) * micro_batches, record["step"] * micro_batches)
        for layer, name in enumerate(LAYERS):
            logits = [torch.cat(of_rank[layer][own]) for of_rank in seen]
            assert record["largest_logit"][name] == torch.cat(logits).max().item()
            sizes = [logit_TE.abs().mean().item() for logit_TE in logits]
            assert record["routing"][name]["logit_size"] == pytest.approx(sum(sizes) / num_ranks, rel=1e-6)
            assert record["routing"][name]["load"] >= 1, "those of the router itself are there too"
        for group in ("routing", "capacity"):
            assert record[group]["weight_norm"] > 0
            assert record[group]["layers.0.attention"]["weight_norm"] > 0
        assert record["routed_tokens"] == 8 * 16 * len(LAYERS)

    page = make_page(read_runs([str(run)]))
    charts = re.findall(r'data-chart="([\w/]+)"', page)
    assert {"largest_logit", "routed_tokens", "routing/logit_size"} <= set(charts)

    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for name in (f"largest_logit/{LAYERS[0]}", "routed_tokens", f"routing/{LAYERS[1]}/logit_size"):
        assert [event.step for event in events.Scalars(name)] == [2, 4]


class Greedy(ProbedRouter):
    def metrics(self) -> dict[str, Metric]:
        return {"tokens_seen": Metric(torch.tensor(1.0), "sum", per_layer=False)}


register_router("greedy", Greedy)


def test_name_of_the_trainers_own_metric_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a side track carries some of the traffic " * 200)
    config = make_config(tmp_path, 1)
    model = replace(config.model, moe=replace(config.model.moe, router="greedy"))
    with pytest.raises(ValueError, match="a module offers the metric 'tokens_seen', which the trainer writes"):
        train("deepseek_v3", "deepseek_v3_debugmodel", replace(config, model=model))
