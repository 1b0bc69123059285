"""Which parameters are trained: all but those that the config freezes by name."""

from __future__ import annotations

from torch import nn

from spurline.config_io import ConfigError
from spurline.parallel.pipeline import PipelinedModel
from spurline.parameter_rules import matches, names_near


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Freeze the parameters that a pattern matches, except those that a pattern prefixed with `!` matches.

    Call it before the model is sharded. A ConfigError lists the patterns that match nothing.
    """
    parameters = dict(model.named_parameters())
    kept = [pattern.removeprefix("!") for pattern in patterns if pattern.startswith("!")]
    frozen = [pattern for pattern in patterns if not pattern.startswith("!")]
    problems = [
        f"training.freeze {pattern!r}: it matches no parameter{names_near(pattern, parameters)}"
        for pattern in (*frozen, *kept)
        if not any(matches(pattern, name) for name in parameters)
    ]
    if kept and not frozen:
        problems.append("training.freeze: patterns behind ! are exceptions; add what is to be frozen, such as '*'")
    if problems:
        raise ConfigError(problems)
    for name, parameter in parameters.items():
        if any(matches(pattern, name) for pattern in frozen) and not any(matches(pattern, name) for pattern in kept):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError([f"training.freeze {' '.join(patterns)}: no parameter is left to train"])


def num_parameters(model: nn.Module) -> tuple[int, int]:
    """The number of trainable and of all parameters, unsharded, of all pipeline stages."""
    if isinstance(model, PipelinedModel):
        return model.num_parameters
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)
