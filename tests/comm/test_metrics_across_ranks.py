"""Metrics of modules: reduced over ranks in one collective, and read in the form of a line of metrics."""

import math
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from spurline.comm.metrics import Metric, Offered, collect_metrics, reduce_metrics, reset_metrics
from spurline.testing import RankPool


class Counting(nn.Module):
    """Offers a number of each kind, made of `seed`."""

    def __init__(self, seed: float) -> None:
        super().__init__()
        self.seed = seed

    def metrics(self) -> dict[str, Metric]:
        seed = torch.tensor(self.seed)
        return {
            "rows": Metric(torch.tensor([2**53 - 7, 3]) if self.seed == 1 else torch.tensor([4, 5]), "sum"),
            "norm": Metric(seed, "mean"),
            "extent/high": Metric(seed, "max"),
            "extent/low": Metric(seed, "min"),
            "limit": Metric(torch.tensor(7.0), "same"),
            "penalty": Metric(2 * seed, "sum", per_layer=False),
            "worst": Metric(seed, "max", per_layer=False),
        }


def model_of(rank: int) -> nn.Module:
    return nn.ModuleDict({"a": Counting(1.0 + rank), "b": nn.ModuleDict({"c": Counting(10.0 * (1 + rank))})})


def reduced_on_rank(rank: int) -> tuple[dict[str, Any], Counter[str]]:
    calls: Counter[str] = Counter()
    all_reduce = dist.all_reduce

    def counted(*args: Any, **options: Any) -> Any:
        calls["all_reduce"] += 1
        return all_reduce(*args, **options)

    with mock.patch.object(dist, "all_reduce", counted):
        reduced = reduce_metrics(collect_metrics(model_of(rank)), dist.group.WORLD)
        return reduced.read(), calls


def norm_of_shards(rank: int) -> float:
    weight = distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    offered = [
        Offered("norm", "", Metric(weight.norm(), "same")),
        Offered("limit", "", Metric(torch.tensor(7.0), "max")),
    ]
    return reduce_metrics(offered, dist.group.WORLD).read()["norm"]


def test_a_metric_of_a_sharded_parameter_is_that_of_the_whole(ranks: RankPool) -> None:
    assert ranks.run(norm_of_shards, 2) == [pytest.approx(55**0.5)] * 2


def test_ranks_reduce_all_metrics_in_one_collective(ranks: RankPool) -> None:
    expected = {
        "rows": {"a": [2**53 - 3, 8], "b.c": [8, 10]},
        "norm": {"a": 1.5, "b.c": 15.0},
        "extent": {"a": {"high": 2.0, "low": 1.0}, "b.c": {"high": 20.0, "low": 10.0}},
        "limit": {"a": 7.0, "b.c": 7.0},
        "penalty": 2.0 * (1 + 2 + 10 + 20),
        "worst": 20.0,
    }
    for record, calls in ranks.run(reduced_on_rank, 2):
        assert record == expected
        assert calls == {"all_reduce": 1}
        assert all(type(rows) is int for rows in record["rows"]["a"])


def test_one_process_reads_its_own_values() -> None:
    record = reduce_metrics(collect_metrics(model_of(0))).read()
    assert record["rows"] == {"a": [2**53 - 7, 3], "b.c": [4, 5]}
    assert record["extent"]["b.c"] == {"high": 10.0, "low": 10.0}
    assert (record["penalty"], record["worst"]) == (22.0, 10.0)
    assert reduce_metrics([]).read() == {}


def not_a_number_on_rank(rank: int) -> dict[str, Any]:
    value = torch.tensor(math.nan if rank == 1 else 1.0)
    kinds = ("sum", "mean", "max", "min")
    return reduce_metrics([Offered(kind, "", Metric(value, kind)) for kind in kinds], dist.group.WORLD).read()


def test_what_is_not_a_number_on_one_rank_is_seen_by_all(ranks: RankPool) -> None:
    for record in ranks.run(not_a_number_on_rank, 2):
        assert [math.isnan(value) for value in record.values()] == [True] * 4


def same_on_rank(rank: int) -> dict[str, Any]:
    with mock.patch.object(dist, "all_reduce", side_effect=AssertionError("nothing is to be communicated")):
        return reduce_metrics([Offered("loss", "", Metric(torch.tensor(2.5), "same"))], dist.group.WORLD).read()


def test_values_that_all_ranks_have_are_not_communicated(ranks: RankPool) -> None:
    assert ranks.run(same_on_rank, 2) == [{"loss": 2.5}] * 2


class Accumulating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.sum()
        return x

    def metrics(self) -> dict[str, Metric]:
        return {"total": Metric(self.total, "sum")}

    def reset_metrics(self) -> None:
        self.total.zero_()


class Part(Accumulating):
    metrics_of_parent = True


def test_modules_start_anew_and_a_part_may_stand_for_its_parent() -> None:
    model = nn.Sequential(Accumulating(), nn.Sequential(Part()))
    model(torch.ones(3))
    model(torch.ones(3))
    reduced = reduce_metrics(collect_metrics(model))
    reset_metrics(model)
    assert reduced.read() == {"total": {"0": 6.0, "1": 6.0}}, "what was reduced is a copy"
    model(torch.ones(3))
    assert reduce_metrics(collect_metrics(model)).read() == {"total": {"0": 3.0, "1": 3.0}}


def test_module_that_is_called_metrics_is_no_method() -> None:
    model = nn.ModuleDict({"metrics": nn.Linear(1, 1)})
    assert collect_metrics(nn.Sequential(model)) == []


def test_names_that_clash_are_refused() -> None:
    one = Metric(torch.tensor(1.0), "sum")
    with pytest.raises(ValueError, match=r"metric 'loss' of the model is offered twice"):
        reduce_metrics([Offered("loss", "", one), Offered("loss", "", one)]).read()
    with pytest.raises(ValueError, match=r"metric 'loss': 'loss' is a number already"):
        reduce_metrics([Offered("loss", "", one), Offered("loss", "layer", one)]).read()
    with pytest.raises(ValueError, match=r"reduction must be one of same, sum, mean, max, min, got 'median'"):
        Metric(torch.tensor(1.0), "median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must be one number with a reduction"):
        Metric(torch.ones(2), "sum", per_layer=False)
