"""The degrees of parallelism: what they come to on a number of ranks, and why they can't be. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import gcd, log2
from typing import Any

from spurline.config import ParallelFacts, Parallelism, Training


@dataclass(frozen=True)
class Degrees:
    """The sizes of the axes of both views: dp_replicate x dp_shard x tp = dp_replicate x efsdp x ep x etp = world."""

    dp_replicate: int
    dp_shard: int
    tp: int
    ep: int
    etp: int

    @property
    def world(self) -> int:
        return self.dp * self.tp

    @property
    def dp(self) -> int:
        """The parts that a batch is split into."""
        return self.dp_replicate * self.dp_shard

    @property
    def efsdp(self) -> int:
        """The ranks that share the parameters of the same experts."""
        return self.dp_shard * self.tp // (self.ep * self.etp)


def resolve_degrees(parallelism: Parallelism, world_size: int) -> Degrees:
    """The degrees on world_size ranks, with the ranks that are left in place of -1."""
    replicate, tensor = parallelism.data_parallel_replicate_degree, parallelism.tensor_parallel_degree
    shard = parallelism.data_parallel_shard_degree
    return Degrees(
        dp_replicate=replicate,
        dp_shard=world_size // (replicate * tensor) if shard == -1 else shard,
        tp=tensor,
        ep=parallelism.expert_parallel_degree,
        etp=parallelism.expert_tensor_parallel_degree,
    )


def degree_problems(parallelism: Parallelism, world_size: int, *, model: Any, training: Training) -> list[str]:
    """Why the degrees, each of them valid by itself, don't work on world_size ranks; the last line says what would.

    A model without `parallel_facts` is taken to be one that can be split in any way.
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
    found = _split_problems(parallelism, world_size, facts, training.seq_len)
    d = resolve_degrees(parallelism, world_size)
    # With dp 1, that local_batch_size divides the batch is a matter of the training section alone.
    if d.dp > 1 and _has_shard_degree(parallelism, world_size) and _batch_options(training, d.dp):
        local = training.local_batch_size
        found.append(
            f"training.global_batch_size {training.global_batch_size} is not a multiple of training.local_batch_size"
            f" {local} x data_parallel_replicate_degree {d.dp_replicate} x data_parallel_shard_degree {d.dp_shard}"
            f" = {local * d.dp}"
        )
    return found


def _split_problems(parallelism: Parallelism, world_size: int, facts: ParallelFacts | None, seq_len: int) -> list[str]:
    """Why the ranks can't be arranged, or the sequences and the model can't be split, in this way."""
    d = resolve_degrees(parallelism, world_size)
    found = _rank_problems(d, world_size, _has_shard_degree(parallelism, world_size))
    if d.etp > 1 and d.ep == 1:
        found.append(f"parallelism.expert_tensor_parallel_degree {d.etp} needs an expert_parallel_degree above 1")
    if 0 < seq_len < d.tp:
        found.append(
            f"training.seq_len {seq_len} is shorter than parallelism.tensor_parallel_degree {d.tp}, whose ranks share"
            " the positions of a sequence"
        )
    return found + (_model_problems(d, facts) if facts is not None else [])


def _rank_problems(d: Degrees, world_size: int, has_shard_degree: bool) -> list[str]:
    replicate, tensor = f"data_parallel_replicate_degree {d.dp_replicate}", f"tensor_parallel_degree {d.tp}"
    are = "is" if world_size == 1 else "are"
    but_there_are = f"but there {are} {_count(world_size, 'rank')}"
    if not has_shard_degree:
        product = d.dp_replicate * d.tp
        return [f"parallelism: {replicate} x {tensor} = {product} must divide the number of ranks, {but_there_are}"]
    shard, found = f"data_parallel_shard_degree {d.dp_shard}", []
    if d.world != world_size:
        found.append(f"parallelism: {replicate} x {shard} x {tensor} = {d.world}, {but_there_are}")
    if d.dp_shard * d.tp % (d.ep * d.etp):
        found.append(
            f"parallelism: expert_parallel_degree {d.ep} x expert_tensor_parallel_degree {d.etp} = {d.ep * d.etp}"
            f" does not divide {shard} x {tensor} = {d.dp_shard * d.tp}"
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


def _has_shard_degree(parallelism: Parallelism, world_size: int) -> bool:
    """Whether the shard degree was given, or can be filled in."""
    others = parallelism.data_parallel_replicate_degree * parallelism.tensor_parallel_degree
    return parallelism.data_parallel_shard_degree != -1 or world_size % others == 0


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


# From the one that a person is least likely to want changed.
_NAMES = (
    "tensor_parallel_degree",
    "expert_parallel_degree",
    "expert_tensor_parallel_degree",
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
)


def _nearest(parallelism: Parallelism, world_size: int, facts: ParallelFacts | None, training: Training) -> str:
    """The options that change as little as possible of what was asked for, and make it work on world_size ranks."""

    def changes(other: Parallelism) -> list[str]:
        return [name for name in _NAMES if getattr(other, name) != getattr(parallelism, name)]

    def batch_options(other: Parallelism) -> list[str]:
        return _batch_options(training, resolve_degrees(other, world_size).dp)

    def distance(other: Parallelism) -> tuple[int, int, list[bool], float]:
        changed = changes(other)
        which = [name in changed for name in _NAMES]
        doublings = sum(abs(log2(getattr(other, name) / getattr(parallelism, name))) for name in changed)
        # Rounded, so that the last bits of a logarithm don't decide between equals.
        return len(changed), len(batch_options(other)), which, round(doublings, 6)

    combinations = _combinations(world_size, keep_minus_one=parallelism.data_parallel_shard_degree == -1)
    working = [other for other in combinations if not _split_problems(other, world_size, facts, training.seq_len)]
    nearest = min(working, key=distance)
    options = [f"--parallelism.{name} {getattr(nearest, name)}" for name in changes(nearest)]
    return " ".join(options + batch_options(nearest))


def _combinations(world_size: int, keep_minus_one: bool) -> Iterator[Parallelism]:
    """Every way to arrange world_size ranks in both views; of two that are as near, the first is the better."""
    for replicate in _divisors(world_size):
        for tensor in _divisors(world_size // replicate):
            shard = world_size // (replicate * tensor)
            for expert_tensor in _divisors(shard * tensor):
                for expert in _divisors(shard * tensor // expert_tensor):
                    yield Parallelism(replicate, -1 if keep_minus_one else shard, tensor, expert, expert_tensor)


@cache
def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _batch_options(training: Training, dp: int) -> list[str]:
    """The options that let dp ranks share the sequences of a step evenly; none if they already do."""
    local, total = training.local_batch_size, training.global_batch_size
    if local < 1 or total < 1 or total % (local * dp) == 0:
        return []
    if total % dp == 0:  # global_batch_size decides what is learned, local_batch_size only how
        return [f"--training.local_batch_size {max(b for b in range(1, local + 1) if total // dp % b == 0)}"]
    return [f"--training.global_batch_size {_nearest_multiple(total, local * dp)}"]


def _nearest_world(parallelism: Parallelism, world_size: int) -> int:
    """The number of ranks nearest to world_size that these degrees make up."""
    d = resolve_degrees(parallelism, world_size)
    if parallelism.data_parallel_shard_degree != -1:
        return d.world
    least_shard = d.ep * d.etp // gcd(d.ep * d.etp, d.tp)
    return _nearest_multiple(world_size, d.dp_replicate * least_shard * d.tp)


def _nearest_multiple(number: int, of: int) -> int:
    return max(1, round(number / of)) * of
