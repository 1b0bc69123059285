"""Run a real training step (trainer, model, meshes) as one of any number of ranks, without a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from spurline.config import RunConfig
from spurline.data import DataSets, open_data
from spurline.data.batch import Batch
from spurline.data.tokenizer import ByteTokenizer
from spurline.hardware import Hardware
from spurline.moe.layer import MoE
from spurline.parallel.degrees import Degrees, resolve_degrees
from spurline.parallel.mesh import build_meshes
from spurline.parallel.pipeline import PipelinedModel
from spurline.parallel.world import World
from spurline.simulate.collectives import Groups
from spurline.simulate.compiled import CompiledGraphs
from spurline.simulate.device import DEVICE, replaced, simulated_device
from spurline.simulate.memory import GRADIENTS, OPTIMIZER, PARAMETERS, Memory
from spurline.simulate.pipeline import OwnPipeline, few_micro_batches
from spurline.simulate.places import ModuleTracker, Place
from spurline.simulate.recorder import Recorder, Trace
from spurline.simulate.routing import RoutingModel
from spurline.simulate.timeline import Efficiency, Timeline
from spurline.train.metrics.step_metrics import StepMetrics
from spurline.train.metrics.timing import StepTimer
from spurline.train.trainer import Trainer, make_trainer

MOST_MICRO_BATCHES = 3
"""Simulate a first, a middle and a last micro-batch; the middle one stands for all others."""


AfterStep = Callable[[Trainer, Recorder, StepMetrics], None]


@dataclass(frozen=True)
class Simulation:
    """One step of one rank."""

    config: RunConfig[Any]
    degrees: Degrees
    hardware: Hardware
    routing: RoutingModel
    trace: Trace
    memory: Memory
    timeline: Timeline
    graphs: CompiledGraphs
    weights: set[tuple[int, ...]]
    """Shapes of parameters: full, and of this rank's shards."""
    float32_bytes: int
    """Bytes of full parameters that stay in float32 whatever the compute dtype: norms and gates."""
    moe_layers: list[str]
    """Paths of the MoE layers of this rank."""
    num_micro_batches: int
    """Micro-batches in the step."""
    simulated_micro_batches: int
    """How many of them were simulated."""
    stage_seconds: dict[tuple[str, int], float]
    """Seconds of a micro-batch in this rank's pipeline stages, by direction (F, B) and stage; empty without stages."""
    layers_of_stages: list[tuple[int, int]]
    """First and end layer of every pipeline stage; empty without stages."""
    step_seconds: float
    """For all micro-batches; with pipeline stages, for the simulated ones, one after the other."""
    totals: dict[tuple[str, str], float]
    """What the step takes with all micro-batches (`Recorder.totals`)."""
    simulation_seconds: float

    @property
    def repeats(self) -> int:
        """How often to count the middle micro-batch."""
        return max(1, self.num_micro_batches - MOST_MICRO_BATCHES + 1)


def simulate_step(
    config: RunConfig[Any],
    num_ranks: int,
    hardware: Hardware,
    routing: RoutingModel | None = None,
    efficiency: Efficiency | None = None,
    after_step: AfterStep | None = None,
    warm_up: bool = False,
    pipeline_rank: int = 0,
) -> Simulation:
    """Build the trainer of `config` as a rank of num_ranks and take its first step, with optimizer state allocated.

    after_step can run more code while everything is recorded, such as logging. With warm_up, the second step is
    recorded: without one-time work, but also without the memory that it allocated and kept. The simulated rank is the
    first one with the stages of `pipeline_rank`.
    """
    started = time.perf_counter()
    routing = routing or RoutingModel()
    degrees = resolve_degrees(config.parallelism, num_ranks)
    num_micro_batches = _num_micro_batches(config, degrees)
    timeline, graphs = Timeline(hardware, efficiency), CompiledGraphs()
    config, simulated = _short(config, degrees, num_micro_batches)
    with fake_world(num_ranks, degrees, pipeline_rank * degrees.stage) as world, graphs.recording(config) as config:
        recorder = _Simulator(config, world, hardware, timeline, routing)
        recorder.graphs, graphs.recorder = graphs, recorder
        with simulated_device(timeline, recorder.waited, recorder.made_of_list):
            trainer = make_trainer(config, world, _data(config), draw_weights=False)
            recorder.run(trainer, after_step, warm_up)
    seconds = timeline.finish()
    if degrees.pp == 1:
        seconds += (max(num_micro_batches, MOST_MICRO_BATCHES) - MOST_MICRO_BATCHES) * _middle_seconds(recorder.trace)
    return Simulation(
        config=config,
        degrees=degrees,
        hardware=hardware,
        routing=routing,
        trace=recorder.trace,
        memory=recorder.memory,
        timeline=timeline,
        graphs=graphs,
        weights=recorder.weights,
        float32_bytes=recorder.float32_bytes,
        moe_layers=recorder.moe_layers,
        num_micro_batches=num_micro_batches,
        simulated_micro_batches=simulated,
        stage_seconds=recorder.stage_seconds,
        layers_of_stages=recorder.layers_of_stages,
        step_seconds=seconds,
        totals=_totals(recorder, num_micro_batches, simulated, degrees.pp),
        simulation_seconds=time.perf_counter() - started,
    )


@contextmanager
def fake_world(num_ranks: int, degrees: Degrees, rank: int = 0) -> Iterator[World]:
    """A world of num_ranks ranks on a fake process group, seen from one of them."""
    if num_ranks == 1:
        yield World(DEVICE, degrees)
        return
    if dist.is_initialized():
        raise ValueError("a step can't be simulated inside a process group: run it in a process of its own")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield World(DEVICE, degrees, build_meshes(degrees, DEVICE.type))
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it holds meshes of this world, which equal those of the next


class _Simulator(Recorder):
    """The recorder of one trainer's step."""

    def __init__(
        self, config: RunConfig[Any], world: World, hardware: Hardware, timeline: Timeline, routing: RoutingModel
    ) -> None:
        groups = Groups(world.meshes, hardware.gpus_per_node)
        super().__init__(DEVICE, timeline, groups, self._module, self._experts)
        self.routing, self.degrees = routing, world.degrees
        self.moe = getattr(config.model, "moe", None)
        self.tracker = ModuleTracker(nn.Module())
        self.moe_layers: list[str] = []
        self._chosen: dict[tuple[str, int], Tensor] = {}
        self.stage_seconds: dict[tuple[str, int], float] = {}
        self.layers_of_stages: list[tuple[int, int]] = []

    def _module(self) -> str:
        return self.tracker.current

    def _experts(self, num_tokens: int, num_experts: int, top_k: int) -> Tensor | None:
        """(T, K): the experts of tokens; None if the top-k is over something else, such as expert groups."""
        if self.moe is None or (num_experts, top_k) != (self.moe.num_experts, self.moe.top_k):
            return None
        layer = self.tracker.current.removesuffix(".router")
        if (layer, num_tokens) not in self._chosen:
            counts = self.routing.counts(layer, num_tokens, top_k, num_experts, self.degrees.ep)
            expert_S = torch.repeat_interleave(torch.arange(num_experts), torch.tensor(counts))
            self._chosen[layer, num_tokens] = expert_S.view(top_k, num_tokens).t().contiguous()
        return self._chosen[layer, num_tokens]

    def run(self, trainer: Trainer, after_step: AfterStep | None, warm_up: bool) -> None:
        model, optimizer = trainer.model, trainer.optimizer
        self.tracker = ModuleTracker(model)
        trainer.timer = _PhaseTimer(self, model)
        if isinstance(model, PipelinedModel):
            self._simulate_pipeline(trainer, model)
        with self:
            if warm_up:
                trainer.step(1)
            else:
                fill_optimizer_state(model, optimizer)
        start = Place("", "")
        for tensors, holder in (
            ([*model.parameters(), *model.buffers()], PARAMETERS),
            ([t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)], OPTIMIZER),
        ):
            for tensor in tensors:
                self.memory.add(tensor, holder, "", start, "")
        self.weights = {tuple(shape) for p in model.parameters() for shape in (p.shape, _local_shape(p))}
        self.moe_layers = [path for path, module in model.named_modules() if isinstance(module, MoE)]
        exact = [module for module in model.modules() if getattr(module, "keeps_float32", False)]
        self.float32_bytes = 4 * sum(p.numel() for module in exact for p in module.parameters(recurse=False))
        is_compiled = trainer.config.compile.enable and "model" in trainer.config.compile.parts
        self.recording = True
        with self, replaced(torch.UntypedStorage, "resize_", self._resize()):
            if is_compiled:  # module hooks would be traced
                self._step(trainer, after_step, 1 + warm_up)
            else:
                with self.tracker.watch():
                    self._step(trainer, after_step, 1 + warm_up)
        self.recording = False
        if isinstance(trainer.pipeline, OwnPipeline):
            self.stage_seconds = trainer.pipeline.stage_seconds()

    def _simulate_pipeline(self, trainer: Trainer, model: PipelinedModel) -> None:
        """Replace the pipeline by one that exchanges nothing with its neighbors, which do not exist."""
        tokens_BL = trainer.micro_batches(1)[0].tokens_BL
        number = len(trainer.micro_batches_on_host(1))
        pipeline = OwnPipeline(model, number, tokens_BL, trainer.timer.phase)
        pipeline.timeline, trainer.pipeline = self.timeline, pipeline
        setattr(model, "exchanged_with_other_end", torch.empty_like)  # noqa: B010
        self.layers_of_stages = model.layout.layers

    def _step(self, trainer: Trainer, after_step: AfterStep | None, number: int) -> None:
        with trainer.timer.step():
            metrics = trainer.step(number)
        self.tracker.at("")
        self.trace.phases.append(("end", self.memory.moment, self.timeline.compute.tail))
        if after_step is not None:
            after_step(trainer, self, metrics)

    def _resize(self) -> Callable[..., Any]:
        resize, memory = torch.UntypedStorage.resize_, self.memory

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            memory.resized(storage, int(size))
            return result

        return resize_


class _PhaseTimer(StepTimer):
    """Reports the phases of a step to the recorder."""

    def __init__(self, recorder: _Simulator, model: nn.Module) -> None:
        super().__init__()
        self.recorder, self.model = recorder, model

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with super().phase(name), self.recorder.in_phase(name):
            self.recorder.tracker.at("")
            yield
            if name == "backward":
                self.recorder.memory.hold(gradients_of(self.model), GRADIENTS)


def fill_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer allocate its state, as from the second step on."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def gradients_of(model: nn.Module) -> Iterator[Tensor]:
    """Gradients of parameters, and unsharded gradients that FSDP2 accumulates until they are reduced."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            yield parameter.grad
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in fsdp_groups(module):
                for parameter in group.fsdp_params:
                    if (gradient := parameter.unsharded_accumulated_grad) is not None:
                        yield gradient


def fsdp_groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    return list(several) if several is not None else [g for g in [state._fsdp_param_group] if g is not None]


def _local_shape(parameter: Tensor) -> torch.Size:
    return getattr(parameter, "_local_tensor", parameter).shape


def _num_micro_batches(config: RunConfig[Any], degrees: Degrees) -> int:
    training = config.training
    if training.global_batch_size < 1:
        return 1
    return max(1, training.global_batch_size // (training.local_batch_size * degrees.dp))


def _short(config: RunConfig[Any], degrees: Degrees, num_micro_batches: int) -> tuple[RunConfig[Any], int]:
    """The config with as few micro-batches as represent the step, and their number."""
    few = min(num_micro_batches, MOST_MICRO_BATCHES)
    if degrees.pp > 1:
        few = few_micro_batches(config.parallelism.pipeline_parallel_schedule, degrees.pp, num_micro_batches)
    if few == num_micro_batches:
        return config, few
    size = config.training.local_batch_size * degrees.dp * few
    return replace(config, training=replace(config.training, global_batch_size=size)), few


def _middle_seconds(trace: Trace) -> float:
    """Seconds of a micro-batch between the first and the last."""
    starts = [seconds for name, _, seconds in trace.phases if name == "forward"]
    return starts[2] - starts[1] if len(starts) > 2 else 0.0


def _totals(recorder: Recorder, num_micro_batches: int, simulated: int, pp: int) -> dict[tuple[str, str], float]:
    """What the step takes with all micro-batches: those not simulated take as much as those in the middle."""
    found, trace = recorder.totals(), recorder.trace
    if simulated == num_micro_batches:
        return found
    names = [name for name, _, _ in trace.phases]
    forwards = [index for index, name in enumerate(names) if name == "forward"]
    if pp == 1:
        begin, end, number = forwards[1], forwards[2], 1
    else:  # their forward and backward passes alternate
        last = max(index for index, name in enumerate(names) if name == "backward")
        begin, end, number = forwards[0], last + 1, simulated
    before, after = (trace.totals[index] for index in (begin, end))
    more = (num_micro_batches - simulated) / number
    return {name: value + more * (after.get(name, 0) - before.get(name, 0)) for name, value in found.items()}


def _data(config: RunConfig[Any]) -> DataSets:
    """Data with batches of the right shapes; pictures are generated."""
    if config.data.kind == "pictures":
        return open_data(replace(config.data, path=""), config.training.seq_len, config.training.seed)
    return DataSets(ByteTokenizer(), _Zeros(config), None, 0, 0)  # type: ignore[arg-type]


class _Zeros:
    def __init__(self, config: RunConfig[Any]) -> None:
        self.seq_len, self.by_documents = config.training.seq_len, config.data.separates_documents

    def batch(self, start: int, count: int) -> Batch:
        tokens_BL = torch.zeros(count, self.seq_len, dtype=torch.int64)
        documents_BL = torch.zeros_like(tokens_BL) if self.by_documents else None
        return Batch(tokens_BL, tokens_BL.clone(), documents_BL=documents_BL)
