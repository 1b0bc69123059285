"""Which optimizer updates each parameter, and with which options: by the rules of the config, else by its kind."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from spurline.config import Optimizer
from spurline.config_io import ConfigError
from spurline.moe.layer import MoE
from spurline.parallel.blocks import blocks_of
from spurline.parallel.pipeline import PipelinedModel
from spurline.parameter_rules import ONLY_FOR, ParameterRule, names_near


class Kind(NamedTuple):
    """What the parameters of one group have in common; groups come in this order."""

    rule: int
    """The first rule that matches their names; without one, the number of rules."""
    optimizer: str
    is_vector: bool


def parameter_groups(model: nn.Module, config: Optimizer) -> list[dict[str, Any]]:
    """The trainable parameters, each in exactly one group, in the model's order.

    Groups are in the format of torch's optimizers, with two extra keys: `optimizer` (adamw or muon) and `lr_factor`.
    Weight decay applies to whatever has two dims or more (embeddings, gates and stacked experts too), not to norms and
    biases, unless a rule says otherwise. A ConfigError lists everything that is wrong with the rules; those of a
    pipelined model are checked before it is cut, because a rule need not match a parameter of every stage.
    """
    rules = config.rules
    hidden = hidden_matrices(model) if config.name == "muon" else set()
    members: dict[Kind, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            position = _first_match(rules, name)
            optimizer = rules[position].optimizer if position < len(rules) else None
            kind = Kind(position, optimizer or ("muon" if parameter in hidden else "adamw"), parameter.ndim < 2)
            members.setdefault(kind, {})[name] = parameter
    if not isinstance(model, PipelinedModel):
        is_trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        if problems := _problems(rules, members, is_trained):
            raise ConfigError(problems)
    members = members or {Kind(len(rules), "adamw", False): {}}  # a pipeline stage may be frozen as a whole
    no_rule = ParameterRule(text="", pattern="")
    return [
        {"params": list(members[kind].values()), **_options(kind, (*rules, no_rule)[kind.rule], config)}
        for kind in sorted(members)
    ]


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """The matrices that Muon is for: those of blocks, including stacked experts, except the gates of routers.

    Embeddings, output heads and gates are matrices as well, but their rows belong to tokens and experts, some of them
    rare: orthogonalization would move these as far as the others. AdamW suits them better.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    gates = {p for layer in layers for p in layer.router.parameters()}
    stacked_biases = {p for layer in layers for p in layer.experts.parameters() if p.ndim < 3}
    matrices = {p for block in blocks_of(model) for p in block.parameters() if p.ndim >= 2 and p.shape[-2] > 1}
    return matrices - gates - stacked_biases


def _options(kind: Kind, rule: ParameterRule, config: Optimizer) -> dict[str, Any]:
    def chosen(name: str, otherwise: Any) -> Any:
        value = getattr(rule, name)
        return otherwise if value is None else value

    options: dict[str, Any] = {
        "optimizer": kind.optimizer,
        "lr_factor": chosen("lr_factor", 1.0),
        "weight_decay": chosen("weight_decay", 0.0 if kind.is_vector else config.weight_decay),
    }
    if kind.optimizer == "muon":
        options["momentum"] = chosen("momentum", config.momentum)
    else:
        options["betas"] = (chosen("beta1", config.beta1), chosen("beta2", config.beta2))
        options["eps"] = chosen("eps", config.eps)
    return options | {"lr": config.lr * options["lr_factor"]}


def _first_match(rules: tuple[ParameterRule, ...], name: str) -> int:
    """The position of the first rule that matches; without one, the number of rules."""
    return next((i for i, rule in enumerate(rules) if rule.matches(name)), len(rules))


def _problems(
    rules: tuple[ParameterRule, ...], members: dict[Kind, dict[str, Tensor]], is_trained: dict[str, bool]
) -> list[str]:
    """What is wrong with rules now that the parameters are known."""
    trained = [name for name in is_trained if is_trained[name]]
    taken = {_first_match(rules, name) for name in trained}
    found = []
    for position, rule in enumerate(rules):
        about = f"optimizer.groups {rule.text!r}:"
        if position not in taken:
            if any(map(rule.matches, trained)):
                found.append(f"{about} rules before it match all that {rule.pattern} matches; the first match counts")
            elif rule.lr_factor != 0 or not any(map(rule.matches, is_trained)):  # what is frozen has no rate anyway
                hint = names_near(rule.pattern, trained)
                found.append(f"{about} {rule.pattern} matches no trainable parameter{hint}")
        for kind, of_kind in sorted(members.items()):
            if kind.rule == position:
                found += [f"{about} {problem}" for problem in _misfits(kind.optimizer, rule, of_kind)]
    return found


def _misfits(optimizer: str, rule: ParameterRule, members: dict[str, Tensor]) -> list[str]:
    """Why parameters that a rule matches can't be updated as it says."""
    found = []
    other_shapes = {name: tuple(p.shape) for name, p in members.items() if p.ndim not in (2, 3)}
    if optimizer == "muon" and other_shapes:
        name, shape = next(iter(other_shapes.items()))
        more = f" (and {len(other_shapes) - 1} more)" if len(other_shapes) > 1 else ""
        found.append(
            f"muon takes matrices and stacks of matrices, not {name} of shape {shape}{more};"
            " narrow the pattern, or put a rule with optimizer=adamw before it"
        )
    found += [
        f"{option} is an option of {owner}, but {optimizer} updates {next(iter(members))}; add optimizer={owner}"
        for option, owner in ONLY_FOR.items()
        if getattr(rule, option) is not None and owner != optimizer
    ]
    return found
