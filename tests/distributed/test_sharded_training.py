"""The trainer on many ranks against the trainer on one, with the same sequences in a step."""

import contextlib
import functools
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from spurline.config import Data, LRScheduler, Metrics, Optimizer, Parallelism, RunConfig, Training
from spurline.models.deepseek_v3.configs import DeepSeekV3Config
from spurline.moe.config import MoEConfig
from spurline.parallel.world import World, joined_world
from spurline.testing import RankPool
from spurline.testing.equivalence import relative_error
from spurline.testing.params import slow_but
from spurline.testing.tiny import tiny_model, write_words
from spurline.train.run import train
from spurline.train.sample import sample_text
from spurline.train.trainer import make_trainer
from spurline.train.validation import Validation, validate

SEQUENCES = 8
"""In a step, over all ranks."""
BALANCED = {
    "score_func": "sigmoid",
    "route_norm": True,
    "bias_update_rate": 1e-3,
    "aux_loss": "sequence",
    "aux_loss_weight": 0.1,
    "z_loss_weight": 0.01,
}


class Layout(NamedTuple):
    """How many ranks there are, and how they share the work."""

    world: int
    dp_replicate: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def dp(self) -> int:
        return self.world // self.tp

    def parallelism(self) -> Parallelism:
        return Parallelism(self.dp_replicate, -1, self.tp, self.ep, self.etp)


ALONE = Layout(1)
FSDP_EP = Layout(2, ep=2)
FSDP_EP_TP = Layout(4, tp=2, ep=2)
FSDP_EP_TP_ETP = Layout(4, tp=2, ep=2, etp=2)
LAYOUTS = {
    "fsdp2": Layout(2),
    "fsdp4": Layout(4),
    "hsdp": Layout(4, dp_replicate=2),
    "tp2": Layout(2, tp=2),
    "tp4": Layout(4, tp=4),
    "hsdp-tp": Layout(4, dp_replicate=2, tp=2),
    "ep2": FSDP_EP,
    "fsdp-ep2": Layout(4, ep=2),
    "ep4": Layout(4, ep=4),
    "hsdp-ep": Layout(4, dp_replicate=2, ep=2),
    "ep-etp": Layout(4, ep=2, etp=2),
    "fsdp-ep-tp": FSDP_EP_TP,
    "tp2-ep4": Layout(4, tp=2, ep=4),
    "tp4-ep4": Layout(4, tp=4, ep=4),
    "fsdp-ep-tp-etp": FSDP_EP_TP_ETP,
}


def params_of(names: str, slow: str) -> list[Any]:
    """The layouts of these names, and those that wait for the slow tests."""
    marks = {name: [] for name in names.split()} | {name: [pytest.mark.slow] for name in slow.split()}
    return [pytest.param(LAYOUTS[name], id=name, marks=marks[name]) for name in marks]


def in_layouts(names: str, slow: str = "") -> Any:
    return pytest.mark.parametrize("layout", params_of(names, slow))


@pytest.fixture(autouse=True, scope="module")
def _leave_torch_as_it_was():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def make_config(tmp_path_factory):
    """Makes the config of a small model with one dense and two MoE layers; sections take dicts of changes."""
    text_folder = write_words(tmp_path_factory.mktemp("text"))

    def make(layout: Layout = ALONE, micro_batches: int = 1, moe=None, **sections) -> RunConfig[DeepSeekV3Config]:
        experts = MoEConfig(hidden_dim=16, num_experts=8, top_k=2, num_shared_experts=1, check_exchange=True)
        config = RunConfig(
            model=tiny_model(moe=replace(experts, **(BALANCED if moe is None else moe))),
            training=Training(
                steps=20,
                seq_len=16,
                local_batch_size=SEQUENCES // (layout.dp * micro_batches),
                global_batch_size=SEQUENCES,
                threads=1,
            ),
            optimizer=Optimizer(lr=4e-3),
            lr_scheduler=LRScheduler(warmup_steps=4),
            parallelism=layout.parallelism(),
            data=Data(path=str(text_folder), validation_fraction=0.03),
            # More than there are: the last batch is smaller than the others, and ranks can't share it evenly.
            metrics=Metrics(validation_batches=100, sample_tokens=4, sample_prompt="t"),
        )
        return replace(
            config, **{name: replace(getattr(config, name), **changes) for name, changes in sections.items()}
        )

    return make


class Run(NamedTuple):
    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]
    """Those of the first step."""
    records: list[dict[str, Any]]
    validation: Validation | None
    sample: str
    num_graphs: list[int]
    """Compiled up to the end of each step."""


def whole(tensor: Tensor) -> Tensor:
    """A copy, in full: an optimizer step changes tensors in place, and what is replicated is not copied otherwise."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def run(config: RunConfig[Any], world: World, num_steps: int) -> Run:
    torch._dynamo.utils.counters.clear()
    trainer = make_trainer(config, world)
    initial = {name: whole(tensor) for name, tensor in trainer.model.state_dict().items()}
    records, graphs, gradients = [], [], {}
    for step in range(1, num_steps + 1):
        records.append(trainer.step(step).read())
        graphs.append(num_graphs())
        if step == 1:
            # AdamW's mean after one step is the gradient, times a constant.
            means = {name: trainer.optimizer.state[p]["exp_avg"] for name, p in trainer.model.named_parameters()}
            gradients = {name: whole(mean) / (1 - config.optimizer.beta1) for name, mean in means.items()}
    return Run(initial, gradients, records, validate(trainer), sample_text(trainer), graphs)


@contextlib.contextmanager
def environment_of_torchrun():
    with mock.patch.dict(os.environ, {"WORLD_SIZE": str(dist.get_world_size())}):
        yield


def run_on_rank(rank: int, config: RunConfig[Any], num_steps: int) -> Run:
    with environment_of_torchrun(), joined_world(config.parallelism) as world:
        assert world.degrees.world == dist.get_world_size()
        return run(config, world, num_steps)


@functools.cache
def run_alone(config: RunConfig[Any], num_steps: int) -> Run:
    return run(config, World.alone(), num_steps)


def forced(config: RunConfig[Any]) -> RunConfig[Any]:
    return replace(config, model=config.model.with_forced_balance())


def num_moved(record: dict[str, Any], other: dict[str, Any]) -> float:
    """How many rows went to other experts."""
    loads = [torch.tensor(list(r["expert_load"].values()), dtype=torch.float32) for r in (record, other)]
    return ((loads[0] - loads[1]).abs().sum() / 2).item()


def assert_same_run(actual: Run, expected: Run, first: float = 1e-5, later: float = 1e-3) -> None:
    for record, one_rank in zip(actual.records, expected.records, strict=True):
        for key in ("loss", "grad_norm", "balance_loss"):
            tolerance = first if record["step"] == 1 else later
            assert record[key] == pytest.approx(one_rank[key], rel=tolerance), f"{key} of step {record['step']}"
        for key in ("step", "lr"):
            assert record[key] == one_rank[key], f"{key} of step {record['step']}"
        # In the long run, a score that two experts share but for rounding may send a row elsewhere.
        assert num_moved(record, one_rank) <= (0 if record["step"] <= 4 else 5), f"expert_load of step {record['step']}"
    if expected.validation is None:
        assert actual.validation is None
    else:
        assert actual.validation == pytest.approx(expected.validation, rel=later)


def check(ranks: RankPool, make_config, layout: Layout, num_steps: int = 3, **options) -> list[Run]:
    """Train in this layout and alone, and compare."""
    runs = ranks.run(run_on_rank, layout.world, make_config(layout, **options), num_steps)
    expected = run_alone(make_config(ALONE, **options), num_steps)
    for of_rank in runs:
        assert_same_run(of_rank, expected)
    return runs


@pytest.fixture(
    scope="module",
    params=params_of(
        "hsdp fsdp-ep-tp-etp",
        slow="tp2 ep-etp fsdp2 ep2 fsdp4 tp4 hsdp-tp fsdp-ep2 ep4 hsdp-ep fsdp-ep-tp tp2-ep4 tp4-ep4",
    ),
)
def layout(request) -> Layout:
    return request.param


@pytest.fixture(scope="module")
def runs(ranks: RankPool, make_config, layout: Layout) -> list[Run]:
    """Three steps in each layout, by rank."""
    return ranks.run(run_on_rank, layout.world, make_config(layout), 3)


def test_initial_weights_do_not_depend_on_the_layout(runs: list[Run], make_config) -> None:
    expected = run_alone(make_config(), 3).initial
    for of_rank in runs:
        assert of_rank.initial.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(of_rank.initial[name], expected[name])] == []


def test_each_gradient_of_the_first_step_is_that_of_one_rank(runs: list[Run], make_config) -> None:
    expected = run_alone(make_config(), 3).gradients
    for of_rank in runs:
        assert of_rank.gradients.keys() == expected.keys()
        errors = {name: relative_error(of_rank.gradients[name], expected[name]) for name in expected}
        assert {name: error for name, error in errors.items() if error > 2e-5} == {}


def test_steps_and_validation_are_those_of_one_rank(runs: list[Run], make_config) -> None:
    expected = run_alone(make_config(), 3)
    for of_rank in runs:
        assert_same_run(of_rank, expected, later=1e-4)
        assert of_rank.sample == expected.sample


def test_forced_balance_trains_like_one_rank(ranks: RankPool, make_config, layout: Layout) -> None:
    # The numbers of positions on each rank are such that its slots are numbered as on one rank.
    steps_only = {"validation_batches": 0, "sample_tokens": 0}
    expected = run_alone(forced(make_config(metrics=steps_only)), 2)
    for of_rank in ranks.run(run_on_rank, layout.world, forced(make_config(layout, metrics=steps_only)), 2):
        assert_same_run(of_rank, expected, later=1e-4)
        assert of_rank.records[0]["expert_load"]["layers.1.moe"] == [SEQUENCES * 16 * 2 // 8] * 8


@in_layouts("", slow="fsdp-ep-tp-etp ep4 hsdp-ep")
def test_twenty_steps_stay_together(ranks: RankPool, make_config, layout: Layout) -> None:
    runs = check(ranks, make_config, layout, num_steps=20)
    losses = [record["loss"] for record in runs[0].records]
    assert losses[-1] < losses[0] - 0.5, "nothing was learned"


@in_layouts("tp2 fsdp-ep-tp", slow="fsdp4 fsdp-ep-tp-etp")
def test_balance_over_the_batch_counts_the_tokens_of_all_ranks(ranks: RankPool, make_config, layout: Layout) -> None:
    check(ranks, make_config, layout, moe={"aux_loss": "batch", "aux_loss_weight": 0.5, "num_shared_experts": 0})


@in_layouts("tp4-ep4", slow="tp2 fsdp-ep-tp-etp")
@pytest.mark.parametrize("seq_len", slow_but([5], [15, 5]))
def test_length_that_the_ranks_of_tensor_parallelism_do_not_divide(
    ranks: RankPool, make_config, layout: Layout, seq_len: int
) -> None:
    check(ranks, make_config, layout, training={"seq_len": seq_len})


@in_layouts("fsdp-ep-tp", slow="tp4-ep4")
def test_masked_documents_train_like_on_one_rank(ranks: RankPool, make_config, layout: Layout, tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i} {'aeinrst'[: i % 8]}"}) + "\n" for i in range(400)))
    data = {"path": str(path), "mask_documents": True}
    check(ranks, make_config, layout, data=data, training={"seq_len": 15})
    masked, unmasked = (run_alone(make_config(data={**data, "mask_documents": mask}), 1) for mask in (True, False))
    assert masked.records[0]["loss"] != unmasked.records[0]["loss"]


@in_layouts("ep2", slow="fsdp-ep-tp")
@pytest.mark.parametrize("moe", [BALANCED, {"aux_loss": "batch"}], ids=["sequence", "batch"])
def test_accumulated_micro_batches_make_the_same_step(
    ranks: RankPool, make_config, layout: Layout, moe: dict[str, Any]
) -> None:
    check(ranks, make_config, layout, micro_batches=2, moe=moe)


@in_layouts("hsdp-ep", slow="fsdp2 fsdp-ep-tp-etp")
def test_experts_in_a_call_of_their_own_train_like_one_rank(ranks: RankPool, make_config, layout: Layout) -> None:
    check(ranks, make_config, layout, debug={"separate_expert_units": True})


@in_layouts("fsdp-ep2", slow="fsdp4")
def test_experts_that_the_ranks_can_not_share_evenly(ranks: RankPool, make_config, layout: Layout) -> None:
    runs = check(ranks, make_config, layout, moe={"num_experts": 6})
    expected = run_alone(make_config(moe={"num_experts": 6}), 3).initial
    assert all(torch.equal(runs[0].initial[name], weight) for name, weight in expected.items())


def test_bfloat16_on_ranks_is_close_to_bfloat16_on_one(ranks: RankPool, make_config) -> None:
    bfloat16 = {"dtype": "bfloat16"}
    expected = run_alone(make_config(training=bfloat16), 3)
    in_float32 = run_alone(make_config(), 3)
    for of_rank in ranks.run(run_on_rank, FSDP_EP_TP.world, make_config(FSDP_EP_TP, training=bfloat16), 3):
        for record, one_rank, exact in zip(of_rank.records, expected.records, in_float32.records, strict=True):
            assert record["loss"] == pytest.approx(one_rank["loss"], rel=2e-3)
            assert record["grad_norm"] == pytest.approx(one_rank["grad_norm"], rel=3e-2)
            assert record["loss"] != exact["loss"]
        assert {weight.dtype for weight in of_rank.initial.values()} == {torch.float32}


# With graphs.

AOT_EAGER = {"enable": True, "components": "model,loss", "backend": "aot_eager"}
# The check speaks of its layer by name, so with it every layer has a graph of its own.
UNCHECKED = {**BALANCED, "check_exchange": False}


def run_eager_and_compiled(rank: int, config: RunConfig[Any]) -> tuple[Run, Run, dict[str, int]]:
    eager = run_on_rank(rank, replace(config, compile=replace(config.compile, enable=False)), 4)
    compiled = run_on_rank(rank, config, 4)
    return eager, compiled, dict(torch._dynamo.utils.counters["graph_break"])


def check_compiled(ranks: RankPool, config: RunConfig[Any], world: int, timeout: float) -> None:
    for eager, compiled, graph_breaks in ranks.run(run_eager_and_compiled, world, config, timeout=timeout):
        assert_same_run(compiled, eager, later=1e-5)
        assert compiled.sample == eager.sample
        assert compiled.num_graphs == [3] * 4, "one for each kind of block, one for the loss"
        assert graph_breaks == {}


@in_layouts("ep2", slow="fsdp-ep-tp-etp fsdp2 fsdp-ep-tp")
def test_compiled_training_equals_eager_without_a_graph_break_or_a_graph_for_each_step(
    ranks: RankPool, make_config, layout: Layout
) -> None:
    metrics = {"validation_batches": int(layout is FSDP_EP)}
    config = make_config(layout, moe=UNCHECKED, compile=AOT_EAGER, metrics=metrics)
    check_compiled(ranks, config, layout.world, timeout=280)


@pytest.mark.slow
def test_training_with_generated_code_equals_eager(ranks: RankPool, make_config) -> None:
    config = make_config(FSDP_EP_TP, moe=UNCHECKED, compile={**AOT_EAGER, "backend": "inductor"})
    check_compiled(ranks, config, FSDP_EP_TP.world, timeout=900)


# Whole runs, with their folder.


def train_on_rank(rank: int, config: RunConfig[Any]) -> tuple[str, dict[str, Tensor]]:
    """What the run prints, and the weights it ends with."""
    made = []

    def noted(*args: Any, **options: Any) -> Any:
        made.append(make_trainer(*args, **options))
        return made[-1]

    out = io.StringIO()
    with (
        environment_of_torchrun(),
        mock.patch("spurline.train.run.make_trainer", noted),
        contextlib.redirect_stdout(out),
    ):
        train("deepseek_v3", "deepseek_v3_debugmodel", config)
    return out.getvalue(), {name: whole(tensor) for name, tensor in made[0].model.state_dict().items()}


def records_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what differs from run to run."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    repeats = ("step", "loss", "balance_loss", "grad_norm", "lr", "tokens_seen", "expert_load", "routing")
    return [{key: record[key] for key in repeats} for record in records]


@pytest.mark.slow  # test_resume.py has runs of fewer steps
def test_stopped_run_goes_on_as_if_it_had_never_stopped(ranks: RankPool, make_config, tmp_path: Path) -> None:
    def config(folder: str, stop_after: int = 0) -> RunConfig[Any]:
        return make_config(
            FSDP_EP,
            job={"dump_folder": str(tmp_path / folder)},
            training={"steps": 6},
            checkpoint={"enable": folder == "stopped", "interval": 2},
            debug={"stop_after": stop_after},
            metrics={"sample_tokens": 0},
        )

    uninterrupted = ranks.run(train_on_rank, 2, config("whole"))
    ranks.run(train_on_rank, 2, config("stopped", stop_after=3))
    resumed = ranks.run(train_on_rank, 2, config("stopped"))
    assert "resuming from the checkpoint of step 3" in resumed[0][0]
    assert records_of(tmp_path / "stopped") == records_of(tmp_path / "whole")
    for (_, actual), (_, expected) in zip(resumed, uninterrupted, strict=True):
        assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


@pytest.mark.slow
def test_two_calls_compile_too_and_the_first_rank_says_what_that_costs(
    ranks: RankPool, make_config, tmp_path: Path
) -> None:
    options = {"moe": UNCHECKED, "metrics": {"validation_batches": 0, "sample_tokens": 0}}
    config = make_config(
        FSDP_EP,
        job={"dump_folder": str(tmp_path)},
        compile=AOT_EAGER,
        debug={"separate_expert_units": True, "stop_after": 3},
        **options,
    )
    (first, _), (second, _) = ranks.run(train_on_rank, 2, config, timeout=120)
    assert second == ""
    about_graphs = [line for line in first.splitlines() if "graph" in line]
    assert about_graphs == ["experts are separate FSDP units, so blocks with experts compile into several graphs"]
    for record, one_rank in zip(records_of(tmp_path), run_alone(make_config(**options), 3).records, strict=True):
        assert record["loss"] == pytest.approx(one_rank["loss"], rel=1e-5)
        assert record["grad_norm"] == pytest.approx(one_rank["grad_norm"], rel=1e-4)
        assert record["expert_load"] == one_rank["expert_load"]
