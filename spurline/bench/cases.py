"""The layer shapes and routings to benchmark. Torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    name: str
    dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    num_tokens: int
    routing: str = "balanced"
    """balanced (random scores), zipf (expert n with probability proportional to 1/n), one_hot (all tokens select the
    same experts), uniform (equal row counts)."""

    @property
    def num_rows(self) -> int:
        return self.num_tokens * self.top_k


def _medium(name: str, routing: str = "balanced", num_tokens: int = 4096) -> Case:
    return Case(name, 1024, 512, 64, 6, num_tokens, routing)


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("small", 256, 256, 8, 3, 4096),
        _medium("medium"),
        _medium("medium_zipf", "zipf"),
        _medium("medium_one_hot", "one_hot"),
        _medium("medium_uniform", "uniform"),
        _medium("decode", num_tokens=16),
    )
}
