"""Faults on purpose: how they are written, and that each happens once, where it was asked for."""

import pytest
import torch

from spurline.testing.faults import KINDS, POINTS, SPECIAL, Fault, _Injector
from spurline.train.trainer import Trainer


def test_fault_is_a_kind_a_point_and_where():
    fault = Fault.parse(" slow@data:step=4,rank=2,attempt=1,seconds=0.5")
    assert fault == Fault("slow", "data", step=4, rank=2, attempt=1, seconds=0.5)
    assert Fault.parse("kill@start") == Fault("kill", "start")


def test_every_kind_has_a_point():
    for kind in KINDS:
        assert Fault.parse(f"{kind}@{SPECIAL.get(kind, POINTS[0])}").kind == kind


@pytest.mark.parametrize("text", ["", "kill", "kill@nowhere", "burn@step", "nan@data", "kill@step:when=3"])
def test_fault_that_does_not_exist_is_one_line(text):
    with pytest.raises(ValueError, match="SPURLINE_FAULTS") as caught:
        Fault.parse(text)
    assert "\n" not in str(caught.value)


def test_faults_of_a_forward_pass_hand_on_what_a_pipeline_stage_is_given(monkeypatch):
    given = []

    def loss_of(trainer, batch, model=None, **options):
        given.append((batch, model, options))
        return torch.zeros(())

    monkeypatch.setattr(Trainer, "loss_of", loss_of)
    _Injector([Fault("nan", "forward", step=1)])._in_forward_and_backward()
    Trainer.loss_of(None, "batch", "stage", hidden_BlD="hidden")
    assert given == [("batch", "stage", {"hidden_BlD": "hidden"})]
