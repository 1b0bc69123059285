"""Build the parts of a trainer: process-wide settings, data, model, loss and timer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from spurline.config import RunConfig
from spurline.data import DataSets, open_data
from spurline.lora.attach import attach_adapters
from spurline.models.common.init import initialize_buffers, initialize_parameters
from spurline.moe.experts.experts import Experts
from spurline.parallel.compile import compile_function
from spurline.parallel.fsdp import Sharding
from spurline.parallel.model import parallelize_model
from spurline.parallel.pipeline import PipelinedModel, make_layout
from spurline.parallel.precision import convert_layers
from spurline.parallel.world import World
from spurline.train.freezing import freeze
from spurline.train.loss import make_loss_sum
from spurline.train.metrics.timing import StepTimer, watch_layers
from spurline.train.optimizer.groups import parameter_groups


def set_up_torch(config: RunConfig[Any]) -> None:
    """Set threads, determinism and the seed for the process."""
    if config.training.threads:
        torch.set_num_threads(config.training.threads)
    torch.use_deterministic_algorithms(config.debug.deterministic)
    torch.manual_seed(config.training.seed)


def open_data_for_model(config: RunConfig[Any]) -> DataSets:
    """The data of config.data; a ValueError if its tokens do not fit the model's vocabulary."""
    data = open_data(config.data, config.training.seq_len, config.training.seed)
    if data.tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"the tokenizer has {data.tokenizer.vocab_size} tokens, more than --model.vocab_size"
            f" {config.model.vocab_size}: raise that to at least {data.tokenizer.vocab_size}"
        )
    return data


def build_model(config: RunConfig[Any], world: World, draw_weights: bool = True) -> nn.Module:
    """The model on this rank's device: built on the meta device, then sharded, then filled with its initial weights.

    With draw_weights=False its parameters are uninitialized memory, for weights that are about to be loaded.
    """
    with torch.device("meta"):
        model: nn.Module = config.model.build()
    if config.lora.rank:
        attach_adapters(model, config.lora.rank, config.lora.alpha, config.lora.targets)
    freeze(model, config.training.freeze)
    convert_layers(model, config.precision, world.device, getattr(torch, config.training.dtype))
    check_backends(model, world.device, getattr(torch, config.training.dtype), world.degrees.etp)
    per_param_mesh = False if config.debug.separate_expert_units else None
    remat, sharding = config.activation_checkpoint.mode, sharding_of(config)
    kind = config.parallelism.context_parallel_kind

    def parallelize(model: nn.Module) -> None:
        parallelize_model(model, world.meshes, remat, config.compile, per_param_mesh, sharding, kind)
        model.to_empty(device=world.device)
        initialize_buffers(model)

    if world.meshes is not None and world.meshes.pp is not None:
        schedule = config.parallelism.pipeline_parallel_schedule
        layout = make_layout(config.model, config.training.seq_len, schedule, world.meshes.pp.get_group())
        parameter_groups(model, config.optimizer)  # raises if a rule matches nothing of the whole model
        model = PipelinedModel(model, layout, parallelize)
    else:
        parallelize(model)
    if draw_weights:
        initialize_parameters(model, config.training.seed)
        weights_changed(model)
    model.compute_dtype = getattr(torch, config.training.dtype)
    return model


def weights_changed(model: nn.Module) -> None:
    """Call it after weights were initialized, loaded or updated: copies of them are brought up to date."""
    if isinstance(model, PipelinedModel):
        model.update_followers()


def check_backends(model: nn.Module, device: torch.device, dtype: torch.dtype, hidden_shards: int = 1) -> None:
    """Raise a ValueError, before the first step, if the experts' backend does not support this device and dtype."""
    if device.type == "meta":
        return
    for module in model.modules():
        if isinstance(module, Experts):
            module.check_backend(device.type, dtype, hidden_shards)


def sharding_of(config: RunConfig[Any]) -> Sharding:
    """How FSDP2 shards the model."""
    training = config.training
    param_dtype = training.dtype if training.mixed_precision_param == "auto" else training.mixed_precision_param
    # Otherwise, every micro-batch of a pipeline would all-gather the weights of its stage again.
    reshard = config.parallelism.fsdp_reshard_after_forward
    if reshard == "default" and config.parallelism.pipeline_parallel_degree > 1:
        reshard = "never"
    return Sharding(
        param_dtype=getattr(torch, param_dtype),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        reshard_after_forward=reshard,
    )


def build_loss(config: RunConfig[Any], model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The summed loss of logits and labels, compiled if the config says so."""
    loss_sum = make_loss_sum(model.tp)
    if config.compile.enable and "loss" in config.compile.parts:
        return compile_function(loss_sum, config.compile.backend)
    return loss_sum


def build_timer(config: RunConfig[Any], model: nn.Module, world: World) -> StepTimer:
    """A step timer that also times the parts of MoE layers, unless the model is compiled."""
    timer = StepTimer(world.device)
    if config.metrics.layer_times and not is_model_compiled(config):
        watch_layers(model, timer)
    return timer


def is_model_compiled(config: RunConfig[Any]) -> bool:
    """Whether blocks are compiled: hooks on their parts would be traced."""
    return config.compile.enable and "model" in config.compile.parts
