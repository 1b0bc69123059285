"""`spurline replay` takes a step again and finds the place where it stops being finite."""

import json
import os
import re
import shutil
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from spurline.config import Job, Lora, Parallelism
from spurline.models.common.feed_forward import FeedForward
from spurline.moe.dispatch.capacity import capacity_factors
from spurline.testing.tiny import tiny_model, tiny_run, write_words
from spurline.train.recorded_step import read_recorded_step
from spurline.train.replay import examine
from spurline.train.run import train
from spurline.train.trainer import Trainer


@pytest.fixture
def config(tmp_path):
    (tmp_path / "text").mkdir()
    return tiny_run(
        write_words(tmp_path / "text"),
        job=Job(str(tmp_path / "run")),
        training={"local_batch_size": 2, "global_batch_size": 4},
        checkpoint={"enable": True, "interval": 2},
        metrics={"validation_batches": 0, "sample_tokens": 0, "tensorboard": False},
    )


def run(config):
    train("deepseek_v3", "deepseek_v3_debugmodel", config)


def read_records(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_forward_pass_that_overflows_is_followed_to_the_first_module(spurline, config, tmp_path, capsys):
    rate = replace(config.optimizer, lr=1e38)
    schedule = replace(config.lr_scheduler, warmup_steps=0, decay_ratio=0.0)
    with pytest.raises(ValueError, match=r"step 2: .*`spurline replay .*run --step 2` looks for the place"):
        run(replace(config, optimizer=rate, lr_scheduler=schedule))
    capsys.readouterr()
    code, out, err = spurline("replay", "run", "--step", "2")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("from the initial weights: ")
    assert lines[1:3] == ["taking steps 1 to 1", "step 2: sequences 4 to 7, in micro-batches of 2"]
    assert lines[3] == "micro-batch 1: loss nan"
    # The update of step 1 was finite, and the weights that it led to are not.
    first = "  forward: the output of embedding (Embedding) is the first that is not finite; its input is finite,"
    assert lines[4].startswith(f"{first} its weights are not finite, of magnitude ")


def test_a_product_that_overflows_is_followed_to_the_modules_around_it(spurline, config, tmp_path, capsys):
    rate = replace(config.optimizer, lr=1e18)
    schedule = replace(config.lr_scheduler, warmup_steps=0, decay_ratio=0.0)
    with pytest.raises(ValueError, match=r"step 2: the loss is nan"):
        run(replace(config, optimizer=rate, lr_scheduler=schedule))
    capsys.readouterr()
    out = spurline("replay", "run", "--step", "2").out
    # Between the products with w1 and w3 and the one with w2 there is no module.
    assert (
        "  forward: the output of layers.0.feed_forward.w2 (Linear) is the first that is not finite;"
        " the one before it was that of layers.0.feed_forward.w3 (Linear), of magnitude "
    ) in out
    assert " its input is not finite either, its weights are finite, of magnitude 1e+18 at most\n" in out


def test_an_operation_whose_gradient_alone_is_not_finite_is_named_with_its_line(spurline, config, tmp_path):
    right = FeedForward.forward

    def square_root_of_zero(self, x):
        y = right(self, x)
        return y + torch.sqrt(y * 0)

    with mock.patch.object(FeedForward, "forward", square_root_of_zero):
        with pytest.raises(ValueError, match=r"step 1: .*its loss is finite, its gradient is not"):
            run(config)
        code, out, _ = spurline("replay", "run", "--step", "1")
    assert code == 0
    assert "forward:" not in out
    assert "micro-batch 1: loss 5." in out
    assert "  backward: the gradient of the output of layers.0." in out
    assert "; the one before it was that of layers.0.feed_forward (FeedForward), of magnitude " in out
    assert re.search(r"anomaly detection: Function 'MulBackward0' returned nan values .*in square_root_of_zero \(", out)
    assert "gradients that are not finite, the last layers first: layers.0.feed_forward." in out


def test_a_step_that_is_finite_is_taken_as_it_was_from_the_checkpoint_before_it(spurline, config, tmp_path):
    run(config)
    records = read_records(tmp_path)
    code, out, _ = spurline("replay", "run", "--step", "6")
    assert code == 0
    assert "from the checkpoint of step 4" in out
    assert "taking steps 5 to 5\nstep 6: sequences 20 to 23, in micro-batches of 2" in out
    assert f"all micro-batches: the gradient norm is {records[5]['grad_norm']:.4g}\nthe step is finite here" in out
    direct = spurline("replay", "run", "--step", "6", "--direct").out
    assert "taking steps" not in direct
    assert f"the gradient norm is {records[5]['grad_norm']:.4g}\n" not in direct


def check_same_numbers(out, record):
    """Loss and gradient norm of the replayed step are those of the run's step."""
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+), finite", out)]
    assert sum(losses) / len(losses) == pytest.approx(record["loss"], abs=1e-3)
    assert f"the gradient norm is {record['grad_norm']:.4g}\n" in out


@pytest.fixture
def base(config, tmp_path):
    """The folder of a run whose weights differ from those that the seed of `config` gives."""
    job, training = Job(str(tmp_path / "base")), replace(config.training, seed=5, steps=2)
    run(replace(config, job=job, training=training))
    return str(tmp_path / "base")


@pytest.mark.parametrize("kind", ["adapters", "initial_load_path"])
@pytest.mark.parametrize("step", [1, 6])
def test_a_run_with_other_weights_to_begin_with_is_replayed_with_them(spurline, config, tmp_path, base, kind, step):
    if kind == "adapters":
        config = replace(config, lora=Lora(rank=4, base=base))
    else:
        config = replace(config, checkpoint=replace(config.checkpoint, initial_load_path=base))
    run(config)
    code, out, err = spurline("replay", "run", "--step", str(step))
    assert (code, err) == (0, "")
    check_same_numbers(out, read_records(tmp_path)[step - 1])


def test_a_base_that_is_gone_or_is_another_one_is_one_line(spurline, config, tmp_path, base):
    run(replace(config, lora=Lora(rank=4, base=base)))
    shutil.move(base, tmp_path / "moved")
    code, _, err = spurline("replay", "run", "--step", "6")
    assert (code, len(err.splitlines())) == (2, 1)
    assert f"lora.base {base}: there is no such folder" in err
    run(replace(config, job=Job(base), training=replace(config.training, steps=2)))
    code, _, err = spurline("replay", "run", "--step", "6")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "the adapters were trained on other weights" in err


def run_on_ranks(rank, config):
    with mock.patch.dict(os.environ, {"WORLD_SIZE": str(dist.get_world_size())}):
        run(config)


@pytest.mark.parametrize("saves", [True, False])
def test_the_default_batch_is_that_of_the_ranks_that_took_the_step(spurline, ranks, config, tmp_path, saves):
    """Two ranks take steps 1 to 6, and if there is a checkpoint to resume from, one rank steps 7 and 8."""
    training = replace(config.training, global_batch_size=-1, steps=8 if saves else 6)
    checkpoint = replace(config.checkpoint, enable=saves, interval=3, keep_latest_k=0)
    config = replace(config, training=training, checkpoint=checkpoint)
    ranks.run(run_on_ranks, 2, replace(config, debug=replace(config.debug, stop_after=6), parallelism=Parallelism(1)))
    if saves:
        run(config)
    records = read_records(tmp_path)
    for step in (2, 5, 8) if saves else (2,):
        out = spurline("replay", "run", "--step", str(step)).out
        first, size = (4 * (step - 1), 4) if step <= 6 else (24 + 2, 2)
        assert f"step {step}: sequences {first} to {first + size - 1}, in micro-batches of 2\n" in out
        check_same_numbers(out, records[step - 1])


def test_a_step_that_was_not_saved_has_the_batch_of_the_last_start(spurline, ranks, config, tmp_path):
    training = replace(config.training, global_batch_size=-1)
    config = replace(config, training=training, checkpoint=replace(config.checkpoint, interval=100))
    run(replace(config, debug=replace(config.debug, stop_after=2)))
    path = tmp_path / "run" / "config.json"
    stored = json.loads(path.read_text())
    stored["environment"]["ranks"] = 3  # that resumed, and ended before they saved
    path.write_text(json.dumps(stored))
    assert "\nstep 3: sequences 4 to 9, in micro-batches of 2\n" in spurline("replay", "run", "--step", "3").out
    del stored["environment"]
    path.write_text(json.dumps(stored))
    assert "\nstep 3: sequences 4 to 5, in micro-batches of 2\n" in spurline("replay", "run", "--step", "3").out
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    code, out, err = spurline("replay", "run", "--step", "3")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "run: the sequences in a step are unknown, as neither a checkpoint nor the environment in config.json" in err


@pytest.mark.parametrize("dispatcher", ["deep_ep", "hybrid_ep"])
def test_a_run_is_replayed_without_its_library_and_its_kernel(spurline, config, tmp_path, dispatcher):
    run(config)
    path = tmp_path / "run" / "config.json"
    stored = json.loads(path.read_text())
    stored["model"]["moe"].update(dispatcher=dispatcher, experts_backend="triton")
    path.write_text(json.dumps(stored))
    code, out, err = spurline("replay", "run", "--step", "6")
    assert (code, err) == (0, "")
    assert "\nexperts_backend 'auto' computes the experts here: experts_backend 'triton' " in out
    assert "choose 'loop'" not in out
    check_same_numbers(out, read_records(tmp_path)[5])


def test_nothing_that_a_run_writes_is_touched(spurline, config, tmp_path):
    config = replace(
        config,
        debug=replace(config.debug, record_routing=str(tmp_path / "routing"), record_routing_weights=True),
        metrics=replace(config.metrics, tensorboard=True, sample_tokens=4, sample_interval=1, validation_batches=1),
        profile=replace(config.profile, enable=True, first_step=2, steps=1),
        checkpoint=replace(config.checkpoint, interval=3),
    )
    run(config)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert tmp_path / "routing" / "step-00000004-rank-00000.npz" in before
    check_same_numbers(spurline("replay", "run", "--step", "5").out, read_records(tmp_path)[4])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_routing_that_was_replayed_from_a_recording_is_replayed_again(spurline, config, tmp_path):
    config = replace(config, model=tiny_model({"score_func": "sigmoid", "route_scale": 50.0}))
    recording, debug = str(tmp_path / "routing"), config.debug
    training = replace(config.training, seed=5)
    run(replace(config, job=Job("other"), training=training, debug=replace(debug, record_routing=recording)))
    run(replace(config, debug=replace(debug, replay_routing=recording)))
    check_same_numbers(spurline("replay", "run", "--step", "6").out, read_records(tmp_path)[5])


def test_capacity_that_grew_is_replayed(spurline, config, tmp_path):
    tight = tiny_model({"dispatcher": "capacity", "capacity_factor": 0.5, "overflow": "grow"})
    run(replace(config, model=tight))
    records, replayed = read_records(tmp_path), []

    def look(trainer, *args):
        replayed.append(capacity_factors(trainer.model))
        return examine(trainer, *args)

    with mock.patch("spurline.train.replay.examine", look):
        for step in (2, 6):  # from the initial weights, and from a checkpoint
            check_same_numbers(spurline("replay", "run", "--step", str(step)).out, records[step - 1])
    of_run = [records[step - 1]["capacity"] for step in (1, 2, 6)]
    first, *then = [{layer: of["factor"] for layer, of in layers.items()} for layers in of_run]
    assert set(first.values()) == {0.5}
    assert min(then[0].values()) > 0.5
    assert replayed == then


def test_the_micro_batch_of_a_rank_is_found_among_those_of_all_ranks(spurline, config, tmp_path):
    run(config)
    recorded = {"step": 3, "first_sequence": 16, "global_batch_size": 8, "local_batch_size": 2, "data_ranks": 2}
    (tmp_path / "run" / "bad_steps.jsonl").write_text(json.dumps(recorded) + "\n")
    loss_of, asked = Trainer.loss_of, []

    def poisoned(self, batch):
        # Of 8 sequences from 16 on, rank 1 has 18 and 19 in its first micro-batch, 22 and 23 in its second one.
        asked.append(torch.equal(batch.tokens_BL, self.data.train.batch(22, 2).tokens_BL))
        return loss_of(self, batch) * (float("nan") if asked[-1] else 1)

    with mock.patch.object(Trainer, "loss_of", poisoned):
        out = spurline("replay", "run", "--step", "3").out
    assert "step 3: sequences 16 to 23, in micro-batches of 2\n" in out
    assert "\nmicro-batch 2 of data rank 0: loss 5." in out
    assert "\nmicro-batch 2 of data rank 1: loss nan\n" in out
    assert any(asked)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["run"], "--step is missing"),
        (["--step", "1"], "expected one run folder first"),
        (["nowhere", "--step", "1"], "nowhere/config.json: can't read"),
    ],
)
def test_wrong_use_is_one_line(spurline, argv, told):
    code, out, err = spurline("replay", *argv)
    assert (code, out) == (2, "")
    assert err.startswith("spurline replay: ")
    assert told in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("content", ["[]", "{", '{"step": 1}', '{"step": 1, "first_sequence": -1}'])
def test_a_damaged_record_is_one_line(spurline, config, tmp_path, content):
    from spurline import config_io

    (tmp_path / "run").mkdir()
    config_io.save(tmp_path / "run" / "config.json", "deepseek_v3", "deepseek_v3_debugmodel", config)
    (tmp_path / "run" / "bad_steps.jsonl").write_text(content)
    code, _, err = spurline("replay", "run", "--step", "1")
    assert code == 2
    assert "run/bad_steps.jsonl: " in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("size", ["global_batch_size", "local_batch_size"])
def test_a_record_of_a_batch_that_no_memory_holds_is_refused(tmp_path, size):
    record = {"step": 1, "first_sequence": 0, "global_batch_size": 8, "local_batch_size": 4, "data_ranks": 2}
    path = tmp_path / "bad_steps.jsonl"
    path.write_text(json.dumps(record | {size: 2**17}))
    assert getattr(read_recorded_step(tmp_path, 1), size) == 2**17
    path.write_text(json.dumps(record | {size: 2**52}))
    with pytest.raises(ValueError, match=r"bad_steps.jsonl: a batch of 4,503,599,627,370,496 sequences is too large"):
        read_recorded_step(tmp_path, 1)
