"""What a run that resumes may change, and what is refused."""

from dataclasses import asdict, fields, replace

import pytest

from spurline.config import Data, Job
from spurline.data import open_data
from spurline.data.prepare import prepare
from spurline.data.tokenizer import ByteTokenizer
from spurline.moe.config import SAME_NUMBERS, SAME_WEIGHTS, MoEConfig
from spurline.testing.tiny import tiny_model, tiny_run, write_words
from spurline.train import fingerprint as fingerprint_module
from spurline.train.fingerprint import check_fingerprint, fingerprint
from spurline.train.run import train
from spurline.typed_json import flattened


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").mkdir()
    return write_words(tmp_path / "text")


def of(config):
    return fingerprint(config, config.training.local_batch_size, open_data(config.data, config.training.seq_len, 0))


def differences(old, new, allow_changes=False):
    """What is said, and what is refused."""
    said = []
    try:
        check_fingerprint(of(old), of(new), 4, allow_changes, said.append)
    except ValueError as error:
        return said, str(error).splitlines()
    return said, []


CHANGES = {
    "seed": ({"training": {"seed": 1}}, "training.seed: 0 -> 1"),
    "rate": ({"optimizer": {"lr": 1e-3}}, "optimizer.lr: 0.004 -> 0.001"),
    "optimizer": ({"optimizer": {"name": "muon"}}, 'optimizer.name: "adamw" -> "muon"'),
    "schedule": ({"lr_scheduler": {"warmup_steps": 5}}, "lr_scheduler.warmup_steps: 4 -> 5"),
    "clipping": ({"training": {"max_grad_norm": 2.0}}, "training.max_grad_norm: 1.0 -> 2.0"),
    "dtype": ({"training": {"dtype": "bfloat16"}}, 'training.dtype: "float32" -> "bfloat16"'),
    "masks": ({"data": {"mask_documents": True}}, "data.mask_documents: false -> true"),
    "rows that may be dropped": (
        {"model": tiny_model(moe={"dispatcher": "capacity"})},
        'model.moe.dispatcher: "one that keeps all rows" -> "capacity"',
    ),
    "rounded rows": (
        {"model": tiny_model(moe={"exchange_dtype": "float8"})},
        'model.moe.exchange_dtype: "same" -> "float8"',
    ),
    "model": ({"model": tiny_model(moe={"top_k": 1})}, "model.moe.top_k: 2 -> 1"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_the_run_is_refused_or_listed_and_accepted(text, name):
    change, line = CHANGES[name]
    said, refused = differences(tiny_run(text), tiny_run(text, **change))
    assert said == []
    assert refused[0] == "the checkpoint of step 4 is of a run with other options or data:"
    assert refused[1:-1] == [f"  {line}"]
    assert "--job.allow_changes" in refused[-1]
    said, refused = differences(tiny_run(text), tiny_run(text, **change), allow_changes=True)
    assert (said, refused) == ([f"changed since the checkpoint of step 4: {line}"], [])


@pytest.mark.parametrize(
    "change",
    [
        {"job": {"dump_folder": "elsewhere", "allow_changes": True}},
        {"metrics": {"log_interval": 5, "validation_interval": 0}},
        {"checkpoint": {"interval": 3}, "compile": {"enable": True}},
        {"parallelism": {"expert_parallel_degree": 2}, "comm": {"timeout_seconds": 9}},
        {"training": {"threads": 2, "device": "cpu"}, "debug": {"stop_after": 3}},
        {"model": tiny_model(moe={"experts_backend": "loop"})},
        {"model": tiny_model(moe={"equal_split": "forced", "row_multiple": 8, "check_exchange": True})},
        {"model": tiny_model(moe={"dispatcher": "deep_ep"})},
    ],
)
def test_what_computes_the_same_run_may_change(text, change):
    assert differences(tiny_run(text), tiny_run(text, **change)) == ([], [])


CAPACITY = {"dispatcher": "capacity"}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"capacity_factor": 2.0}, "model.moe.capacity_factor: 1.25 -> 2.0"),
        ({"overflow": "grow"}, 'model.moe.overflow: "drop_last" -> "grow"'),
        ({"row_multiple": 8}, "model.moe.row_multiple: 1 -> 8"),  # places are rounded up to it
        ({"dispatcher": "local"}, 'model.moe.dispatcher: "capacity" -> "one that keeps all rows"'),
    ],
)
def test_what_decides_which_rows_are_dropped_is_refused(text, change, line):
    old, new = (tiny_run(text, model=tiny_model(moe=CAPACITY | more)) for more in ({}, change))
    assert differences(old, new)[1][1:-1] == [f"  {line}"]


def test_every_moe_option_is_of_one_kind():
    """A new one has to be declared: the resume check, initial weights and `spurline verify` depend on its kind."""
    layer = "dim hidden_dim num_experts top_k num_shared_experts shared_gate gate_bias router experts"
    routing = "score_func route_norm route_scale score_before_experts num_groups num_limited_groups force_load_balance"
    balance = "bias_update_rate aux_loss aux_loss_weight z_loss_weight"
    declared = [*layer.split(), *routing.split(), *balance.split(), *SAME_WEIGHTS]
    assert sorted(declared) == sorted(field.name for field in fields(MoEConfig))
    assert set(SAME_NUMBERS) < set(SAME_WEIGHTS)
    names = [f"model.moe.{name}" for name in declared]
    free = {name for name in names if fingerprint_module._is_one_of(name, fingerprint_module.FREE)}
    assert free == {f"model.moe.{name}" for name in (*SAME_NUMBERS, "dispatcher")}


def test_more_steps_and_other_batches_are_reported(text):
    said, refused = differences(tiny_run(text), tiny_run(text, training={"steps": 80, "local_batch_size": 8}))
    assert refused == []
    assert said == [
        "changed since the checkpoint of step 4: training.steps: 8 -> 80",
        "changed since the checkpoint of step 4: training.global_batch_size: 4 -> 8",
    ]


def test_data_is_compared_by_what_is_in_it(text, tmp_path):
    config = tiny_run(text)
    moved = text.rename(tmp_path / "moved")
    in_its_new_place = replace(config, data=replace(config.data, path=str(moved)))
    now = of(in_its_new_place)
    one_letter = (moved / "a.txt").read_text()
    (moved / "a.txt").write_text("x" + one_letter[1:])
    other = of(in_its_new_place)
    assert {name for name in now if now[name] != other[name]} == {"data.content"}
    (moved / "a.txt").write_text(one_letter)
    assert of(in_its_new_place) == now
    (moved / "a.txt").rename(moved / "renamed.txt")  # another order, another split
    assert of(in_its_new_place)["data.content"] != now["data.content"]


def test_prepared_data_is_the_same_as_what_it_was_prepared_from(text, tmp_path):
    raw = Data(path=str(text), validation_fraction=0.1)
    prepare([raw], str(tmp_path / "prepared"), ByteTokenizer())
    config = tiny_run(text, data=raw)
    assert of(replace(config, data=replace(raw, path=str(tmp_path / "prepared")))) == of(config)


def test_each_pattern_is_that_of_an_option(text):
    names = list(flattened(asdict(tiny_run(text))))
    for pattern in (*fingerprint_module.FREE, *fingerprint_module.REPORTED):
        assert any(fingerprint_module._is_one_of(name, (pattern,)) for name in names), pattern


@pytest.mark.parametrize("stored", [None, [], "x", {"training.seed": {"a": [1] * 100}}, {"unknown": 1}])
def test_records_of_strangers_and_of_earlier_versions_are_no_traceback(text, stored):
    if isinstance(stored, dict) and "training.seed" in stored:
        with pytest.raises(ValueError, match=r"training\.seed: .{1,60} -> 0"):
            check_fingerprint(stored, of(tiny_run(text)), 1, False, print)
    else:
        check_fingerprint(stored, of(tiny_run(text)), 1, False, print)


def test_a_run_refuses_to_resume_with_other_options_and_data_and_stays_as_it_was(text, tmp_path, capsys):
    config = tiny_run(
        text,
        job=Job(str(tmp_path / "run")),
        checkpoint={"enable": True, "interval": 2},
        debug={"stop_after": 2},
        metrics={"sample_tokens": 0, "validation_batches": 0, "tensorboard": False},
    )
    train("deepseek_v3", "deepseek_v3_debugmodel", config)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    config = replace(config, debug=replace(config.debug, stop_after=3))
    with (text / "a.txt").open("a") as file:
        file.write(" one more line")
    changed = replace(config, training=replace(config.training, seed=7), optimizer=replace(config.optimizer, lr=1.0))
    with pytest.raises(ValueError, match="other options or data") as refused:
        train("deepseek_v3", "deepseek_v3_debugmodel", changed)
    told = str(refused.value)
    assert "  training.seed: 0 -> 7\n  optimizer.lr: 0.004 -> 1.0\n  data.num_tokens: " in told
    assert "\n  data.content: " in told
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    capsys.readouterr()
    train("deepseek_v3", "deepseek_v3_debugmodel", replace(changed, job=replace(changed.job, allow_changes=True)))
    out = capsys.readouterr().out
    assert "changed since the checkpoint of step 2: optimizer.lr: 0.004 -> 1.0\n" in out
    assert "step 3/8" in out
