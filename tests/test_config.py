from dataclasses import dataclass, field, replace

import pytest
import torch

from spurline.config import (
    ActivationCheckpoint,
    Checkpoint,
    Compile,
    Data,
    Debug,
    LRScheduler,
    Metrics,
    Optimizer,
    Parallelism,
    RunConfig,
    Training,
)
from spurline.data.mixture import shuffled
from spurline.models.deepseek_v3.configs import deepseek_v3_debugmodel


@dataclass(frozen=True)
class Part:
    ratio: float = 0.0


@dataclass(frozen=True)
class Model:
    part: Part = field(default_factory=Part)
    complaints: tuple[str, ...] = ()

    def problems(self) -> list[str]:
        return list(self.complaints)


def problems(**sections) -> list[str]:
    return RunConfig(**{"model": Model(), **sections}).problems()


def test_defaults_are_sound():
    assert problems() == []
    assert deepseek_v3_debugmodel().problems() == []


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"training": Training(steps=0)}, "training.steps must be at least 1, got 0"),
        ({"training": Training(seq_len=0)}, "training.seq_len must be at least 1, got 0"),
        ({"training": Training(local_batch_size=-1)}, "training.local_batch_size must be at least 1, got -1"),
        ({"training": Training(global_batch_size=0)}, "training.global_batch_size must be positive or -1, got 0"),
        ({"training": Training(global_batch_size=-2)}, "training.global_batch_size must be positive or -1, got -2"),
        ({"training": Training(max_grad_norm=-0.5)}, "training.max_grad_norm must be at least 0, got -0.5"),
        ({"training": Training(threads=-1)}, "training.threads must be at least 0, got -1"),
        ({"training": Training(seed=10**20)}, f"training.seed must be between -2**63 and 2**63 - 1, got {10**20}"),
        (
            {"training": Training(seed=-(10**20))},
            f"training.seed must be between -2**63 and 2**63 - 1, got {-(10**20)}",
        ),
        ({"optimizer": Optimizer(lr=-1.0)}, "optimizer.lr must be at least 0, got -1.0"),
        ({"optimizer": Optimizer(beta1=1.0)}, "optimizer.beta1 must be in [0, 1), got 1.0"),
        ({"optimizer": Optimizer(beta2=-0.1)}, "optimizer.beta2 must be in [0, 1), got -0.1"),
        ({"optimizer": Optimizer(lr=float("inf"))}, "optimizer.lr must be a finite number, got inf"),
        ({"lr_scheduler": LRScheduler(decay_ratio=1.5)}, "lr_scheduler.decay_ratio must be between 0 and 1, got 1.5"),
        ({"lr_scheduler": LRScheduler(warmup_steps=-1)}, "lr_scheduler.warmup_steps must be at least 0, got -1"),
        (
            {"parallelism": Parallelism(expert_parallel_degree=0)},
            "parallelism.expert_parallel_degree must be positive, got 0",
        ),
        (
            {
                "parallelism": Parallelism(pipeline_parallel_degree=2, pipeline_parallel_schedule="ZBV"),
                "compile": Compile(enable=True),
            },
            "parallelism.pipeline_parallel_schedule ZBV computes gradients of inputs and of weights in two passes,"
            " which compiled blocks can't: use 1F1B or Interleaved1F1B",
        ),
        (
            {
                "parallelism": Parallelism(pipeline_parallel_degree=2, pipeline_parallel_schedule="DualPipeV"),
                "activation_checkpoint": ActivationCheckpoint("full"),
            },
            "parallelism.pipeline_parallel_schedule DualPipeV computes gradients of inputs and of weights in two"
            " passes, which would recompute each block twice: use 1F1B or Interleaved1F1B, or"
            " activation_checkpoint.mode none",
        ),
        (
            {"parallelism": Parallelism(pipeline_parallel_degree=2, fsdp_reduce_each_micro_batch=True)},
            "parallelism.fsdp_reduce_each_micro_batch is not for pipeline stages, which reduce gradients at the end of"
            " a step",
        ),
        (
            {"parallelism": Parallelism(data_parallel_shard_degree=0)},
            "parallelism.data_parallel_shard_degree must be positive or -1, got 0",
        ),
        (
            {"compile": Compile(components="model,optimizer")},
            "compile.components must be model, loss or model,loss, got 'model,optimizer'",
        ),
        ({"compile": Compile(components=",")}, "compile.components must be model, loss or model,loss, got ','"),
        ({"checkpoint": Checkpoint(interval=0)}, "checkpoint.interval must be at least 1, got 0"),
        ({"data": Data(validation_fraction=1.0)}, "data.validation_fraction must be in [0, 1), got 1.0"),
        ({"metrics": Metrics(log_interval=0)}, "metrics.log_interval must be at least 1, got 0"),
        ({"debug": Debug(stop_after=-1)}, "debug.stop_after must be at least 0, got -1"),
        ({"model": Model(part=Part(ratio=float("nan")))}, "model.part.ratio must be a finite number, got nan"),
        ({"model": Model(complaints=("part.ratio is odd",))}, "model.part.ratio is odd"),
        ({"model": Model(complaints=("does not fit",))}, "model: does not fit"),
        (
            {"training": Training(local_batch_size=4, global_batch_size=6)},
            "training.global_batch_size 6 is not a multiple of training.local_batch_size 4",
        ),
    ],
)
def test_problem_names_its_option(sections, expected):
    assert problems(**sections) == [expected]


def test_problems_of_all_sections_are_told():
    config = replace(deepseek_v3_debugmodel(), training=Training(steps=0, seq_len=0), debug=Debug(stop_after=-1))
    assert len(config.problems()) == 3


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1])
def test_each_seed_that_is_allowed_can_be_used(seed):
    assert problems(training=Training(seed=seed)) == []
    torch.manual_seed(seed)
    torch.Generator().manual_seed(seed + 10**6)  # of a sample of text
    assert sorted(shuffled(5, seed, (0,))) == [0, 1, 2, 3, 4]


def test_compile_components_may_have_spaces():
    assert Compile(components=" loss, model ").parts == {"model", "loss"}
