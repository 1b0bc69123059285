"""The degrees of parallelism: resolved for a number of ranks, and validated. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from math import gcd, log2, prod
from typing import Any

from spurline.config import ParallelFacts, Parallelism, Training
from spurline.parallel.stages import micro_batch_problem, num_stages


@dataclass(frozen=True)
class Degrees:
    """The sizes of the axes of both views of the ranks.

    pp x dp_replicate x dp_shard x cp x tp = pp x dp_replicate x efsdp x ep x etp = world.
    """

    dp_replicate: int
    dp_shard: int
    tp: int
    ep: int
    etp: int
    cp: int = 1
    pp: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.stage

    @property
    def stage(self) -> int:
        """The number of ranks that have the same layers."""
        return self.dp * self.cp * self.tp

    @property
    def dp(self) -> int:
        """The number of parts that a batch is split into."""
        return self.dp_replicate * self.dp_shard

    @property
    def efsdp(self) -> int:
        """The number of ranks that the same experts are sharded over by FSDP2."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)


def resolve_degrees(parallelism: Parallelism, world_size: int) -> Degrees:
    """The degrees on world_size ranks, with -1 replaced by the remaining ranks."""
    shard = parallelism.data_parallel_shard_degree
    return Degrees(
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=world_size // _ranks_without_shard(parallelism) if shard == -1 else shard,
        tp=parallelism.tensor_parallel_degree,
        ep=parallelism.expert_parallel_degree,
        etp=parallelism.expert_tensor_parallel_degree,
        cp=parallelism.context_parallel_degree,
        pp=parallelism.pipeline_parallel_degree,
    )


def degree_problems(parallelism: Parallelism, world_size: int, *, model: Any, training: Training) -> list[str]:
    """Why the degrees, each valid by itself, don't work on world_size ranks; the last line suggests what would.

    A model without `parallel_facts` is assumed to be divisible in any way.
    """
    facts = model.parallel_facts() if hasattr(model, "parallel_facts") else None
    found = _problems(parallelism, world_size, facts, training)
    if found:
        all_of_these = " for all of these" if len(found) > 1 else ""
        found[-1] += f"; nearest that works{all_of_these}: {_nearest(parallelism, world_size, facts, training)}"
        enough = _nearest_world(parallelism, world_size)
        if not _problems(parallelism, enough, facts, training):
            starter = " (torchrun starts them)" if world_size == 1 else ""
            found[-1] += f", or the same degrees on {_count(enough, 'rank')}{starter}"
    return found


def _problems(parallelism: Parallelism, world_size: int, facts: ParallelFacts | None, training: Training) -> list[str]:
    found = _split_problems(parallelism, world_size, facts, training)
    d = resolve_degrees(parallelism, world_size)
    if _has_shard_degree(parallelism, world_size) and _batch_options(training, d, parallelism):
        found += _batch_problems(training, d, parallelism.pipeline_parallel_schedule)
    return found


def _batch_problems(training: Training, d: Degrees, schedule: str) -> list[str]:
    local, total = training.local_batch_size, training.global_batch_size
    # With dp 1, the training section itself checks that local_batch_size divides the batch.
    if total > 0 and total % (local * d.dp):
        if d.dp == 1:
            return []
        return [
            f"training.global_batch_size {total} is not a multiple of training.local_batch_size"
            f" {local} x data_parallel_replicate_degree {d.dp_replicate} x data_parallel_shard_degree {d.dp_shard}"
            f" = {local * d.dp}"
        ]
    number = total // (local * d.dp) if total > 0 else 1
    needed = micro_batch_problem(schedule, d.pp, number)
    return [
        f"parallelism.pipeline_parallel_schedule {schedule} of pipeline_parallel_degree {d.pp} needs {needed}; a step"
        f" has {number}, of training.local_batch_size {local} each"
    ]


def _split_problems(
    parallelism: Parallelism, world_size: int, facts: ParallelFacts | None, training: Training
) -> list[str]:
    """Why the ranks can't be arranged, or the sequences and the model can't be split, by these degrees."""
    d = resolve_degrees(parallelism, world_size)
    found = _rank_problems(d, world_size, _has_shard_degree(parallelism, world_size))
    if d.etp > 1 and d.ep == 1:
        found.append(f"parallelism.expert_tensor_parallel_degree {d.etp} needs an expert_parallel_degree above 1")
    if 0 < training.seq_len < d.cp * d.tp:
        share = {"context_parallel_degree": d.cp, "tensor_parallel_degree": d.tp}
        found.append(
            f"training.seq_len {training.seq_len} is shorter than parallelism.{_product(share, least=2)}, whose ranks"
            " share the positions of a sequence"
        )
    if facts is None:
        return found
    found += _model_problems(d, facts) + _head_problems(d, facts, parallelism.context_parallel_kind)
    return found + _stage_problems(d, facts, parallelism.pipeline_parallel_schedule)


def _rank_problems(d: Degrees, world_size: int, has_shard_degree: bool) -> list[str]:
    are = "is" if world_size == 1 else "are"
    but_there_are = f"but there {are} {_count(world_size, 'rank')}"
    shard = {"data_parallel_shard_degree": d.dp_shard}
    pipeline = {"pipeline_parallel_degree": d.pp} if d.pp > 1 else {}
    replicate, tensor = {"data_parallel_replicate_degree": d.dp_replicate}, {"tensor_parallel_degree": d.tp}
    context = {"context_parallel_degree": d.cp} if d.cp > 1 else {}
    if not has_shard_degree:
        product = _product(pipeline | replicate | context | tensor)
        return [f"parallelism: {product} must divide the number of ranks, {but_there_are}"]
    found = []
    if d.world != world_size:
        found.append(f"parallelism: {_product(pipeline | replicate | shard | context | tensor)}, {but_there_are}")
    if d.dp_shard * d.cp * d.tp % (d.ep * d.etp):
        experts = {"expert_parallel_degree": d.ep, "expert_tensor_parallel_degree": d.etp}
        found.append(f"parallelism: {_product(experts)} does not divide {_product(shard | context | tensor)}")
    return found


def _product(degrees: dict[str, int], least: int = 1) -> str:
    """Text such as `a 2 x b 3 = 6`, of the degrees that are at least `least`."""
    shown = {name: degree for name, degree in degrees.items() if degree >= least}
    factors = " x ".join(f"{name} {degree}" for name, degree in shown.items())
    return factors if len(shown) == 1 else f"{factors} = {prod(shown.values())}"


def _head_problems(d: Degrees, facts: ParallelFacts, kind: str) -> list[str]:
    """Why context parallelism can't split the heads of a tensor parallel rank."""
    if kind != "ulysses" or d.cp == 1:
        return []
    found = []
    for number, what in ((facts.num_heads, "attention head"), (facts.num_kv_heads, "key and value head")):
        if number is not None and number % d.tp == 0 and number // d.tp % d.cp:
            own = f"a rank's {_count(number // d.tp, what)}" if d.tp > 1 else f"the model's {_count(number, what)}"
            relation = "is more than" if number // d.tp < d.cp else "does not divide"
            found.append(
                f"parallelism.context_parallel_degree {d.cp} {relation} {own}, which context_parallel_kind ulysses"
                " shares: all_gather has no such limit"
            )
    return found


def _model_problems(d: Degrees, facts: ParallelFacts) -> list[str]:
    found: list[str] = []

    def require_divides(name: str, degree: int, number: int, what: str) -> None:
        if number % degree:
            found.append(f"parallelism.{name} {degree} does not divide the model's {_count(number, what)}")

    require_divides("tensor_parallel_degree", d.tp, facts.num_heads, "attention head")
    if facts.num_kv_heads is not None:
        require_divides("tensor_parallel_degree", d.tp, facts.num_kv_heads, "key and value head")
    for option, width in facts.split_widths:
        if width % d.tp:
            found.append(f"parallelism.tensor_parallel_degree {d.tp} does not divide model.{option} {width}")
    if facts.num_experts < 1:
        if d.ep > 1:
            found.append(f"parallelism.expert_parallel_degree {d.ep} needs a model with experts, and this one has none")
        return found
    if d.ep > facts.num_experts:
        experts = _count(facts.num_experts, "expert")
        found.append(f"parallelism.expert_parallel_degree {d.ep} is more than the model's {experts}")
    else:
        require_divides("expert_parallel_degree", d.ep, facts.num_experts, "expert")
    if facts.expert_hidden_dim % d.etp:
        found.append(
            f"parallelism.expert_tensor_parallel_degree {d.etp} does not divide the experts' hidden width"
            f" {facts.expert_hidden_dim}"
        )
    return found


def _stage_problems(d: Degrees, facts: ParallelFacts, schedule: str) -> list[str]:
    """Why the layers can't be split into the stages of a pipeline."""
    if d.pp == 1:
        return []
    degree = f"parallelism.pipeline_parallel_degree {d.pp}"
    if facts.num_layers < 1:
        return [f"{degree} needs a model that can be cut into stages, and this one can't"]
    stages = num_stages(schedule, d.pp)
    if stages + max(facts.first_stage_layers, 1) - 1 <= facts.num_layers:
        return []
    makes = f"makes {stages} stages with pipeline_parallel_schedule {schedule}, more than"
    if stages <= facts.num_layers:
        has_more = f", of which the first stage needs {facts.first_stage_layers}"
        return [f"{degree} {makes} the model's {_count(facts.num_layers, 'layer')} can be cut into{has_more}"]
    return [f"{degree} {makes} the model's {_count(facts.num_layers, 'layer')}"]


def _has_shard_degree(parallelism: Parallelism, world_size: int) -> bool:
    """Whether the shard degree was given, or can be inferred."""
    return parallelism.data_parallel_shard_degree != -1 or world_size % _ranks_without_shard(parallelism) == 0


def _ranks_without_shard(parallelism: Parallelism) -> int:
    """The product of all dense degrees but data_parallel_shard_degree."""
    p = parallelism
    dense = p.data_parallel_replicate_degree * p.context_parallel_degree * p.tensor_parallel_degree
    return p.pipeline_parallel_degree * dense


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


# From the degree that a user is least likely to want changed; with the names of axes in `Degrees`.
_NAMES = {
    "pipeline_parallel_degree": "pp",
    "context_parallel_degree": "cp",
    "tensor_parallel_degree": "tp",
    "expert_parallel_degree": "ep",
    "expert_tensor_parallel_degree": "etp",
    "data_parallel_replicate_degree": "dp_replicate",
    "data_parallel_shard_degree": "dp_shard",
}


def _nearest(parallelism: Parallelism, world_size: int, facts: ParallelFacts | None, training: Training) -> str:
    """The options that change the request as little as possible, and make it work on world_size ranks."""

    def changes(other: Parallelism) -> list[str]:
        return [name for name in _NAMES if getattr(other, name) != getattr(parallelism, name)]

    def batch_options(other: Parallelism) -> list[str]:
        return _batch_options(training, resolve_degrees(other, world_size), other)

    def distance(other: Parallelism) -> tuple[int, int, list[bool], float]:
        changed = changes(other)
        which = [name in changed for name in _NAMES]
        doublings = sum(abs(log2(getattr(other, name) / getattr(parallelism, name))) for name in changed)
        # Rounded, so that the last bits of a logarithm don't decide between equals.
        return len(changed), len(batch_options(other)), which, round(doublings, 6)

    values = {name: _suitable(name, parallelism, world_size, facts) for name in _NAMES}
    working: list[Parallelism] = []
    for num_changed in range(len(_NAMES) + 1):  # few changes leave few arrangements to try
        for changed in combinations(_NAMES, num_changed):
            others = _arrangements(world_size, parallelism, changed, values)
            working += [other for other in others if not _split_problems(other, world_size, facts, training)]
        if working:
            break
    nearest = min(working, key=distance)
    options = [f"--parallelism.{name} {getattr(nearest, name)}" for name in changes(nearest)]
    return " ".join(options + batch_options(nearest))


def _suitable(name: str, asked: Parallelism, world_size: int, facts: ParallelFacts | None) -> list[int]:
    """The values of a degree that divide the ranks and the model, whatever the other degrees are.

    None is a larger pipeline or context degree than requested: nobody is advised to use what they did not ask for.
    """
    found = _divisors(world_size)
    if name in ("pipeline_parallel_degree", "context_parallel_degree"):
        found = [degree for degree in found if degree <= getattr(asked, name)]
    if facts is None:
        return found
    alone = {degree: replace(Degrees(1, 1, 1, 1, 1), **{_NAMES[name]: degree}) for degree in found}
    schedule = asked.pipeline_parallel_schedule
    return [n for n, d in alone.items() if not _model_problems(d, facts) and not _stage_problems(d, facts, schedule)]


def _arrangements(
    world_size: int, asked: Parallelism, changed: tuple[str, ...], values: dict[str, list[int]]
) -> Iterator[Parallelism]:
    """Ways to arrange world_size ranks in both views that differ from `asked` in exactly these degrees.

    Of two that are equally near, the first is preferred.
    """
    own = {name: [n for n in values[name] if (n != getattr(asked, name)) == (name in changed)] for name in _NAMES}
    pipeline, context, tensor, expert, expert_tensor, replicate, shard = own.values()
    if asked.data_parallel_shard_degree == -1:
        if "data_parallel_shard_degree" in changed:
            return
        shard = values["data_parallel_shard_degree"]
    shards = set(shard)
    for pp, cp, dp_replicate, tp in product(pipeline, context, replicate, tensor):
        dp_shard, rest = divmod(world_size, pp * cp * dp_replicate * tp)
        if rest or dp_shard not in shards:
            continue
        for etp, ep in product(expert_tensor, expert):
            if dp_shard * cp * tp % (etp * ep) == 0:
                yield replace(
                    asked,
                    data_parallel_replicate_degree=dp_replicate,
                    data_parallel_shard_degree=-1 if asked.data_parallel_shard_degree == -1 else dp_shard,
                    tensor_parallel_degree=tp,
                    expert_parallel_degree=ep,
                    expert_tensor_parallel_degree=etp,
                    context_parallel_degree=cp,
                    pipeline_parallel_degree=pp,
                )


@cache
def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _batch_options(training: Training, d: Degrees, parallelism: Parallelism) -> list[str]:
    """Options that split the sequences of a step evenly over dp ranks, in as many micro-batches as the pipeline needs.

    Empty if the given ones already do.
    """
    local, total, schedule = (
        training.local_batch_size,
        training.global_batch_size,
        parallelism.pipeline_parallel_schedule,
    )

    def works(local: int, total: int) -> bool:
        return total % (local * d.dp) == 0 and (
            d.pp == 1 or not micro_batch_problem(schedule, d.pp, total // (local * d.dp))
        )

    if local < 1 or total < -1 or total == 0 or works(local, total if total > 0 else local * d.dp):
        return []
    # global_batch_size changes the training result, local_batch_size only how it is computed.
    if fitting := [b for b in range(1, local + 1) if total > 0 and works(b, total)]:
        return [f"--training.local_batch_size {fitting[-1]}"]
    unit = local * d.dp
    multiples = [unit * number for number in range(1, max(total, 0) // unit + 4 * d.pp + 2)]
    nearest = min((m for m in multiples if works(local, m)), key=lambda multiple: abs(multiple - max(total, unit)))
    return [f"--training.global_batch_size {nearest}"]


def _nearest_world(parallelism: Parallelism, world_size: int) -> int:
    """The number of ranks nearest to world_size that these degrees fit."""
    d = resolve_degrees(parallelism, world_size)
    if parallelism.data_parallel_shard_degree != -1:
        return d.world
    least_shard = d.ep * d.etp // gcd(d.ep * d.etp, d.cp * d.tp)
    return _nearest_multiple(world_size, d.pp * d.dp_replicate * least_shard * d.cp * d.tp)


def _nearest_multiple(number: int, of: int) -> int:
    return max(1, round(number / of)) * of
