import warnings

import pytest
import torch
from torch import nn

from spurline.train.checkpoint.manager import CheckpointManager


class Model(nn.Module):
    """A stack with what checkpoints have to carry: matrices, a norm, persistent and other buffers, an unused weight."""

    def __init__(self, hidden: int = 8, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(4, hidden)
        self.norm = nn.RMSNorm(hidden)
        self.down = nn.Linear(hidden, 4, bias=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("expert_bias", torch.zeros(2))
        self.register_buffer("scratch", torch.full((2,), float(seed)), persistent=False)

    def forward(self, x):
        return self.down(self.norm(self.up(x)).relu()) + self.expert_bias.sum()


def adamw(model, fused=True, **settings):
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused, **settings)


def train(model, optimizer, steps):
    for step in steps:
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
        model.expert_bias += 0.001 * step


def assert_same_bits(model, other):
    assert model.state_dict().keys() == other.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def saved_run(folder, keep_latest_k=0, steps=(1,)):
    checkpoints = CheckpointManager(folder, interval=1, keep_latest_k=keep_latest_k)
    model = Model()
    for step in steps:
        checkpoints.save(step, model, adamw(model), {"step": step})
    return checkpoints


def folder_names(checkpoints):
    return sorted(path.name for path in checkpoints.folder.iterdir())


@pytest.mark.parametrize("fused", [False, True])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, fused):
    straight = Model()
    straight_optimizer = adamw(straight, fused)
    train(straight, straight_optimizer, range(1, 9))

    first = Model()
    first_optimizer = adamw(first, fused)
    train(first, first_optimizer, range(1, 5))
    CheckpointManager(tmp_path, 4, 0).save(4, first, first_optimizer, {})
    train(first, first_optimizer, range(5, 9))  # saving must not disturb the run that saves
    assert_same_bits(first, straight)

    resumed = Model(seed=1)
    resumed_optimizer = adamw(resumed, fused)
    checkpoints = CheckpointManager(tmp_path, 4, 0)
    checkpoints.load(checkpoints.latest(), resumed, resumed_optimizer)
    train(resumed, resumed_optimizer, range(5, 9))
    assert_same_bits(resumed, straight)


def test_a_checkpoint_before_the_first_step_leaves_no_trace_in_the_optimizer(tmp_path):
    straight = Model()
    train(straight, adamw(straight), range(1, 4))

    model = Model()
    optimizer = adamw(model)
    checkpoints = CheckpointManager(tmp_path, 1, 0)
    checkpoints.save(0, model, optimizer, {})
    assert not optimizer.state
    resumed = Model(seed=1)
    resumed_optimizer = adamw(resumed)
    checkpoints.load(0, resumed, resumed_optimizer)
    train(resumed, resumed_optimizer, range(1, 4))
    assert_same_bits(resumed, straight)


def test_loading_into_a_run_that_has_gone_on_takes_it_back(tmp_path):
    model = Model()
    optimizer = adamw(model)
    checkpoints = CheckpointManager(tmp_path, 1, 0)
    train(model, optimizer, [1, 2])
    checkpoints.save(2, model, optimizer, {})
    train(model, optimizer, [3])
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(model, optimizer, [4, 5])
    weight = model.up.weight
    checkpoints.load(2, model, optimizer)
    train(model, optimizer, [3])
    assert model.up.weight is weight
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_loading_changes_the_version_of_weights_so_that_caches_notice(tmp_path):
    checkpoints = saved_run(tmp_path)
    model = Model(seed=1)
    version = model.up.weight._version
    checkpoints.load(1, model, None)
    assert model.up.weight._version > version


def test_a_model_whose_state_dict_is_made_of_copies_is_restored(tmp_path):
    other = Model(seed=1)
    other.register_state_dict_post_hook(
        lambda _, state, *__: state.update({name: tensor.clone() for name, tensor in state.items()})
    )
    saved_run(tmp_path).load(1, other, None)
    assert_same_bits(other, Model())


def test_persistent_buffers_are_restored_and_others_left_alone(tmp_path):
    model = Model()
    model.expert_bias.copy_(torch.tensor([0.25, -0.5]))
    checkpoints = CheckpointManager(tmp_path, 1, 0)
    checkpoints.save(1, model, adamw(model), {})
    other = Model(seed=3)
    checkpoints.load(1, other, adamw(other))
    assert other.expert_bias.tolist() == [0.25, -0.5]
    assert other.scratch.tolist() == [3.0, 3.0]


def test_model_alone_can_be_loaded(tmp_path):
    checkpoints = saved_run(tmp_path)
    other = Model(seed=1)
    assert checkpoints.load(1, other, None) == {"step": 1}
    assert_same_bits(other, Model())


def test_optimizer_settings_stay_those_of_the_config(tmp_path):
    model = Model()
    optimizer = adamw(model, weight_decay=0.5)
    train(model, optimizer, [1])
    checkpoints = CheckpointManager(tmp_path, 1, 0)
    checkpoints.save(1, model, optimizer, {})
    changed = adamw(model, weight_decay=0.25)
    checkpoints.load(1, model, changed)
    assert changed.param_groups[0]["weight_decay"] == 0.25
    assert changed.state[model.up.weight]["step"].item() == 1


def test_extra_comes_back_as_it_was(tmp_path):
    extra = {
        "tokens_seen": 7,
        "data": {"files": ["a", "b"], "position": [3, 4], "rate": 1e-17},
        "none": None,
    }
    model = Model()
    checkpoints = CheckpointManager(tmp_path, 1, 0)
    checkpoints.save(1, model, adamw(model), extra)
    assert checkpoints.load(1, model, adamw(model)) == extra


def test_extra_that_is_not_plain_data_is_refused(tmp_path):
    model = Model()
    with pytest.raises(ValueError, match=r"must be plain data .*Tensor"):
        CheckpointManager(tmp_path, 1, 0).save(1, model, adamw(model), {"rng": torch.zeros(1)})


def test_saving_and_loading_is_quiet(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved_run(tmp_path).load(1, Model(), None)


def test_a_checkpoint_is_due_at_the_interval_and_at_the_end():
    checkpoints = CheckpointManager("unused", interval=4, keep_latest_k=0)
    assert [step for step in range(1, 11) if checkpoints.is_due(step, last_step=10)] == [4, 8, 10]


def test_names_are_padded_and_latest_is_by_number(tmp_path):
    checkpoints = saved_run(tmp_path, steps=[9, 100_000_000, 20])
    assert folder_names(checkpoints) == ["step-00000009", "step-00000020", "step-100000000"]
    assert checkpoints.latest() == 100_000_000


def test_only_the_latest_k_stay(tmp_path):
    assert folder_names(saved_run(tmp_path / "all", 0, [1, 2, 3])) == [
        "step-00000001",
        "step-00000002",
        "step-00000003",
    ]
    assert folder_names(saved_run(tmp_path / "two", 2, [1, 2, 3])) == ["step-00000002", "step-00000003"]
    assert folder_names(saved_run(tmp_path / "one", 1, [1, 2, 3])) == ["step-00000003"]


def test_what_was_just_saved_is_never_pruned(tmp_path):
    assert folder_names(saved_run(tmp_path, 1, [1, 7, 2])) == ["step-00000002", "step-00000007"]


def test_nothing_is_pruned_when_the_save_fails(tmp_path, monkeypatch):
    checkpoints = saved_run(tmp_path, 1, [1])

    def disk_full(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr("spurline.train.checkpoint.writer.ChecksummedStream.write", disk_full)
    model = Model()
    with pytest.raises(ValueError, match="disk full"):
        checkpoints.save(2, model, adamw(model), {})
    assert checkpoints.latest() == 1


def test_saving_a_step_again_replaces_it(tmp_path):
    checkpoints = saved_run(tmp_path, steps=[5])
    model = Model(seed=2)
    checkpoints.save(5, model, adamw(model), {"again": True})
    other = Model()
    assert checkpoints.load(5, other, None) == {"again": True}
    assert_same_bits(other, model)
    assert folder_names(checkpoints) == ["step-00000005"]


def test_latest_without_checkpoints_is_none(tmp_path):
    assert CheckpointManager(tmp_path, 1, 0).latest() is None


def test_leftovers_of_a_killed_save_are_ignored_and_removed_by_the_next(tmp_path):
    checkpoints = saved_run(tmp_path, steps=[1])
    leftover = checkpoints.folder / ".step-00000002.tmp"
    leftover.mkdir()
    (leftover / "stale").write_bytes(b"half")
    (leftover / "metadata.json").write_bytes(b"half")
    (checkpoints.folder / "step-00000003").mkdir()  # incomplete
    (checkpoints.folder / "step-notes").mkdir()
    (checkpoints.folder / "step-notes" / "checkpoint.json").write_bytes(b"")
    assert checkpoints.latest() == 1
    model = Model()
    checkpoints.save(2, model, adamw(model), {})
    assert folder_names(checkpoints) == ["step-00000001", "step-00000002", "step-00000003", "step-notes"]
    assert not (checkpoints.folder / "step-00000002" / "stale").exists()
    assert checkpoints.latest() == 2


def test_a_missing_step_is_refused_by_name(tmp_path):
    checkpoints = saved_run(tmp_path, steps=[1, 3])
    with pytest.raises(ValueError, match=r"no complete checkpoint .*step-00000002; steps in that folder: 1, 3$"):
        checkpoints.load(2, Model(), None)


def test_another_model_is_refused_before_anything_changes(tmp_path):
    checkpoints = saved_run(tmp_path)
    other = Model(hidden=6, seed=1)
    del other.unused
    other.added = nn.Parameter(torch.zeros(1))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(ValueError, match="another model") as refused:
        checkpoints.load(1, other, adamw(other))
    message = str(refused.value)
    assert "added is not in the checkpoint; down.weight is (4, 8) in the checkpoint, (4, 6) in the model; " in message
    assert "and 1 more" in message  # of six: up.weight, the last by name
    assert "up.weight" not in message
    assert "\n" not in message
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_a_tensor_the_model_lacks_is_named(tmp_path):
    checkpoints = saved_run(tmp_path)
    other = Model()
    del other.unused
    with pytest.raises(ValueError, match=r"another model: unused is not in the model\. "):
        checkpoints.load(1, other, adamw(other))
