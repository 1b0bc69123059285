"""Checkpoints of runs that have diverged: not published, and passed over where an earlier version has."""

import pytest
import torch
import version1_checkpoints as version1
from torch.utils._pytree import tree_leaves, tree_map_only
from two_linears import make, trained

from spurline.train.checkpoint.finite import non_finite_names
from spurline.train.checkpoint.folder import CheckpointFolder
from spurline.train.checkpoint.manager import CheckpointManager


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("in_background", [False, True])
def test_what_is_not_finite_is_not_published(tmp_path, value, in_background):
    checkpoints = CheckpointManager(tmp_path, 1, 0, in_background=in_background)
    checkpoints.save(1, *trained(), {})
    model, optimizer = trained()
    model[1].weight.data[0, 1] = value

    def save():
        checkpoints.save(2, model, optimizer, {})
        checkpoints.wait()

    with pytest.raises(ValueError, match=r"checkpoint of step 2: model\.1\.weight is not finite"):
        save()
    assert CheckpointFolder(tmp_path).named_steps() == [1]
    checkpoints.close()


def test_the_state_of_the_optimizer_is_looked_at_too(tmp_path):
    model, optimizer = trained()
    optimizer.state[model[0].bias]["exp_avg_sq"][2] = float("inf")
    with pytest.raises(ValueError, match=r"optimizer\.exp_avg_sq\.0\.bias is not finite"):
        CheckpointManager(tmp_path, 1, 0).save(1, model, optimizer, {})


class OnAnAccelerator(torch.Tensor):
    """A tensor that claims to be on an accelerator, and is computed on the CPU."""

    @staticmethod
    def __new__(cls, data):
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device="meta")
        made.data_on_cpu = data
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        given = [arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, torch.Tensor)]
        if not all(isinstance(tensor, cls) for tensor in given):
            raise RuntimeError("Expected all tensors to be on the same device")
        args, kwargs = tree_map_only(cls, lambda tensor: tensor.data_on_cpu, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, function(*args, **kwargs))

    def tolist(self):  # refused for subclasses
        return self.data_on_cpu.tolist()


@pytest.mark.parametrize("bad", ["", "moment", "weight", "step"])
def test_step_counts_on_the_host_are_looked_at_beside_weights_on_an_accelerator(bad):
    tensors = {name: torch.ones(2) for name in ("weight", "moment")} | {"step": torch.tensor(3.0)}
    if bad:
        tensors[bad].fill_(float("nan"))
    named = [(name, tensor if name == "step" else OnAnAccelerator(tensor)) for name, tensor in tensors.items()]
    assert non_finite_names(named) == [bad] * bool(bad)


def test_large_values_whose_sum_overflows_are_finite(tmp_path):
    model, optimizer = trained()
    model[0].weight.data.fill_(3e38)
    CheckpointManager(tmp_path, 1, 0).save(1, model, optimizer, {})
    assert CheckpointFolder(tmp_path).steps() == [1]


def test_a_poisoned_checkpoint_is_passed_over_for_an_older_one(tmp_path):
    """As earlier versions published it."""
    good, _ = trained()
    version1.save(tmp_path, 1, *trained(), {"tokens_seen": 1})
    model, optimizer = trained(seed=1)
    model[0].weight.data[0, 0] = float("nan")
    version1.save(tmp_path, 2, model, optimizer, {"tokens_seen": 2})
    said = []
    checkpoints = CheckpointManager(tmp_path, 1, 0, say=said.append)
    with pytest.raises(ValueError, match=r"step 2 is of a run that has diverged: model\.0\.weight is not finite"):
        checkpoints.load(2, *make())
    other, other_optimizer = make(seed=2)
    assert checkpoints.load_newest(other, other_optimizer)[0] == 1
    assert torch.equal(other[0].weight, good[0].weight)
    assert said[0] == (
        "falling back to the checkpoint of step 1: that of step 2 is of a run that has diverged,"
        " model.0.weight is not finite"
    )
