"""Rates that are tried from the same weights, and what is suggested of them."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from spurline import config_io
from spurline.cli import main
from spurline.parallel.world import World
from spurline.testing.tiny import tiny_model, tiny_run, write_words
from spurline.train import rate_sweep
from spurline.train.rate_sweep import Trial, rates_between, suggest, sweep
from spurline.train.trainer import Trainer, make_trainer

RATES = [1e-4, 1e-3, 1e-2, 1e-1]


def made_up(final: dict[float, float], noise: float = 0.0, seed: int = 0, steps: int = 40) -> list[Trial]:
    """Runs whose losses fall from 5 to `final`; batches are hard or easy for all of them, and a little for each."""
    hard = [random.Random(seed).gauss(0, 10 * noise) for _ in range(steps)]
    trials = []
    for number, (lr, last) in enumerate(final.items()):
        own = random.Random(seed + 1 + number)
        falls = [last + (5 - last) * math.exp(-6 * step / steps) for step in range(steps)]
        losses = [fall + hard[step] + own.gauss(0, noise) for step, fall in enumerate(falls)]
        trials.append(Trial(lr, losses if math.isfinite(last) else [5.0, 9.0], steps))
    return trials


def test_lowest_loss_is_suggested() -> None:
    found = suggest(made_up(dict(zip(RATES, (4.0, 3.0, 2.0, math.inf), strict=True))))
    assert found is not None
    assert (found.lr, found.best, found.at_edge) == (1e-2, 1e-2, "")


@pytest.mark.parametrize("seed", range(8))
def test_noise_of_batches_that_all_rates_share_fools_nobody(seed: int) -> None:
    """Single batches differ by far more than rates do; a ramp would follow them."""
    found = suggest(made_up(dict(zip(RATES, (4.0, 2.6, 2.0, 3.0), strict=True)), noise=0.1, seed=seed))
    assert found is not None
    assert found.lr == 1e-2


def test_of_rates_that_are_equally_good_the_smallest_is_suggested() -> None:
    found = suggest(made_up(dict(zip(RATES, (4.0, 2.001, 2.0, 2.002), strict=True)), noise=0.02))
    assert found is not None
    assert found.lr == 1e-3


def test_best_rate_at_the_end_of_the_range_is_told() -> None:
    found = suggest(made_up(dict(zip(RATES, (4.0, 3.5, 3.0, 2.0), strict=True))))
    assert found is not None
    assert found.at_edge == "upper"
    lower = suggest(made_up(dict(zip(RATES, (2.0, 3.5, 4.0, math.inf), strict=True))))
    assert lower is not None
    assert lower.at_edge == "lower"


def test_nothing_is_suggested_where_nothing_is_learned() -> None:
    assert suggest(made_up(dict(zip(RATES, (5.0, 5.1, 5.3, math.inf), strict=True)))) is None
    assert suggest(made_up(dict.fromkeys(RATES, math.inf))) is None


def test_rates_are_even_by_their_logarithm() -> None:
    assert rates_between(1e-4, 1e-1, 1) == pytest.approx(RATES)
    assert len(rates_between(1e-5, 1e-1, 3)) == 13
    assert rates_between(1e-3, 2e-3, 1) == pytest.approx([1e-3, 2e-3])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    text = write_words(tmp_path_factory.mktemp("text"))
    run = tmp_path_factory.mktemp("runs") / "never-made"
    return tiny_run(text, tiny_model(moe={"bias_update_rate": 1e-2}), job={"dump_folder": str(run)})


def test_each_rate_begins_anew(config: Any) -> None:
    """Weights, optimizer, selection bias and batches: a rate does the same alone and behind another."""
    both = list(sweep(config, World.alone("cpu"), [3e-2, 1e-3], 8, print))
    alone = list(sweep(config, World.alone("cpu"), [1e-3], 8, print))
    assert both[1].losses == alone[0].losses
    assert both[0].losses[0] == both[1].losses[0]
    assert both[0].losses[-1] != both[1].losses[-1]


def test_trials_leave_no_hooks_on_the_model(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of an earlier trial would collect gradients in every step of the later ones."""
    embeddings: list[Any] = []

    def keeping_model(*args: Any, **options: Any) -> Trainer:
        trainer = make_trainer(*args, **options)
        embeddings.append(trainer.model.embedding)
        return trainer

    monkeypatch.setattr(rate_sweep, "make_trainer", keeping_model)
    hooks = [len(embeddings[0]._forward_hooks) for _ in sweep(config, World.alone("cpu"), [1e-3, 1e-2], 1, print)]
    assert hooks == [0, 0]


def test_command_writes_a_page_and_no_run_folder(
    config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "config.json", tmp_path / "rates.html"
    config_io.save(file, "deepseek_v3", "deepseek_v3_debugmodel", config)
    command = f"lr-find --config-file {file} --low 1e-4 --high 1e3 --tries_per_decade 1 --steps 8 --out {page} --json"
    assert main([*command.split(), "--training.max_grad_norm", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["trials"]) == 8
    assert found["suggested"] in [trial["lr"] for trial in found["trials"]]
    assert 1e-3 <= found["suggested"] < 1
    assert found["trials"][-1]["loss"] is None, "a rate of 1000 diverges"
    assert "suggested: " in page.read_text()
    assert not Path(config.job.dump_folder).exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--low 1 --high 0.1", "--low and --high must be positive rates"),
        ("--steps 3", "--steps must be at least 8"),
        ("--out no/such/folder.html", "there is no folder"),
    ],
)
def test_options_that_can_not_be_are_one_line(options: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    start = "lr-find --module deepseek_v3 --config deepseek_v3_debugmodel"
    assert main([*start.split(), *options.split()]) == 2
    assert says in capsys.readouterr().err
