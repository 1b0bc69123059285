"""The benchmark suites: each yields its results as they are measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch

from spurline.bench.cases import CASES, Case
from spurline.bench.dispatchers import dispatchers
from spurline.bench.figures import Figure
from spurline.bench.footprint import footprint
from spurline.bench.layers import Contest, check_agreement, make_contest
from spurline.bench.measure import Timing, interleave
from spurline.bench.ranks import ranks
from spurline.bench.step import step

_KINDS = {"forward": "forward", "forward+backward": "forward_and_backward"}
# These allocate a gradient of all experts' weights for every expert: a minute per round.
_TOO_SLOW = {"forward+backward": {"transformers eager", "transformers batched_mm"}, "forward": set[str]()}
_SWEPT = Case("sweep", 256, 256, 8, 2, 2048)


def layers(threads: int, seconds: float, cases: list[str], device: str = "cpu") -> Iterator[Figure]:
    """The full layer including the router, in float32, as ratios to the floor and to the best peer."""
    for name in cases:
        contest = _agreed(make_contest(CASES[name], device=device), 1e-4)
        for what in _KINDS:
            yield from _timed("layers", CASES[name], contest, what, threads, seconds)


def bf16(threads: int, seconds: float, cases: list[str], device: str = "cpu") -> Iterator[Figure]:
    """The same in bfloat16, and the relative error of each output against float64."""
    for name in cases:
        if name not in ("small", "medium"):
            continue
        contest = _agreed(make_contest(CASES[name], torch.bfloat16, device=device), 0.1)
        for what in _KINDS:
            yield from _timed("bf16", CASES[name], contest, what, threads, seconds)
        yield from _with_ratios([Figure("bf16", name, "error", *error, "", threads) for error in _errors(contest)])


def memory(threads: int, seconds: float, cases: list[str]) -> Iterator[Figure]:
    """Bytes saved for backward, and growth of the process; each candidate in its own process."""
    kinds = {"saved": "saved for backward", "forward": "forward workspace", "training": "training workspace"}
    for name in cases:
        if name != "medium":
            continue
        found = {who: footprint(CASES[name], who, threads) for who in _names(name, skip=_TOO_SLOW["forward+backward"])}
        for kind, what in kinds.items():
            yield from _with_ratios(
                [Figure("memory", name, what, who, sizes[kind] / 1e6, "MB", threads) for who, sizes in found.items()]
            )


def sweep(threads: int, seconds: float, cases: list[str]) -> Iterator[Figure]:
    """Forward and backward of our layer with growing numbers of tokens, experts per token and experts."""
    for field, values in (
        ("num_tokens", (1024, 2048, 4096, 8192)),
        ("top_k", (1, 2, 4, 8)),
        ("num_experts", (8, 32, 128, 512)),
    ):
        base = dataclasses.replace(_SWEPT, num_experts=64) if field == "top_k" else _SWEPT
        grown = [Case(**(dataclasses.asdict(base) | {"name": f"{field} {value}", field: value})) for value in values]
        runs = {case.name: make_contest(case, peers=False) for case in grown}
        for who in ("floor", "spurline"):
            candidates = {name: _run(contest, who, "forward+backward") for name, contest in runs.items()}
            for name, timing in interleave(candidates, seconds).items():
                yield _figure("sweep", name, "forward+backward", who, timing, threads, None)


def _timed(part: str, case: Case, contest: Contest, what: str, threads: int, seconds: float) -> Iterator[Figure]:
    names = [name for name in contest.candidates if name not in _TOO_SLOW[what] or case.name == "decode"]
    times = interleave({name: _run(contest, name, what) for name in ("floor", *names)}, seconds)
    figures = [_figure(part, case.name, what, name, times[name], threads, times["floor"]) for name in times]
    yield from _with_ratios(figures, times)


def _run(contest: Contest, name: str, what: str) -> Callable[[], object]:
    subject = contest.floor if name == "floor" else contest.candidates[name]
    return getattr(subject, _KINDS[what])


def _figure(part: str, case: str, what: str, who: str, timing: Timing, threads: int, floor: Timing | None) -> Figure:
    to_floor = timing.ratio_to(floor) if floor else None
    return Figure(part, case, what, who, timing.median * 1e3, "ms", threads, timing.spread, to_floor)


def _with_ratios(figures: list[Figure], times: dict[str, Timing] | None = None) -> list[Figure]:
    """Fill in the ratios to the best peer: medians over rounds if times are given, else of the values."""
    peers = [figure for figure in figures if figure.candidate.split()[0] not in ("floor", "spurline")]
    if not peers:
        return figures
    best = min(peers, key=lambda figure: figure.value)
    ratios = {
        figure.candidate: times[figure.candidate].ratio_to(times[best.candidate])
        if times
        else figure.value / best.value
        for figure in figures
    }
    return [dataclasses.replace(figure, to_best_peer=ratios[figure.candidate]) for figure in figures]


def _agreed(contest: Contest, tolerance: float) -> Contest:
    for problem in check_agreement(contest, tolerance):
        raise ValueError(f"the candidates are not equivalent: {problem}")
    return contest


def _names(case: str, skip: set[str]) -> list[str]:
    # A tiny layer, only to find out which peers are installed.
    there = make_contest(
        dataclasses.replace(CASES[case], dim=16, hidden_dim=16, num_experts=8, num_tokens=8)
    ).candidates
    return [name for name in there if name not in skip]


def _errors(contest: Contest) -> Iterator[tuple[str, float]]:
    exact = _exact_output(contest)
    for name, candidate in contest.candidates.items():
        yield name, ((candidate.forward().double() - exact).norm() / exact.norm()).item()


def _exact_output(contest: Contest) -> torch.Tensor:
    ours = contest.candidates["spurline"]
    layer = type(ours.layer)(ours.layer.config).to(ours.x.device).double()
    layer.load_state_dict({name: tensor.double() for name, tensor in ours.layer.state_dict().items()})
    with torch.no_grad():
        return layer(ours.x.double())


SUITES: dict[str, Callable[..., Iterator[Figure]]] = {
    "layers": layers,
    "bf16": bf16,
    "memory": memory,
    "sweep": sweep,
    "dispatchers": dispatchers,
    "ranks": ranks,
    "step": step,
}
