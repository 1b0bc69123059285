"""Which layouts `spurline plan --search` tries."""

from dataclasses import astuple

from spurline.hardware import HARDWARE
from spurline.models import family_configs
from spurline.simulate.search import layouts


def test_every_layout_has_whole_degrees() -> None:
    tried = list(layouts(family_configs("qwen3")["qwen3_30b_a3b"](), 32, HARDWARE["h100"]))
    assert {one.expert_parallel_degree for one in tried} == {1, 4, 8, 16, 32}
    assert {type(value) for one in tried for value in astuple(one)} <= {int, str, bool}
