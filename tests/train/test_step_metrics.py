import pytest
import torch
from torch import nn

from spurline import device
from spurline.moe import MoE, MoEConfig, telemetry
from spurline.train.metrics.step_metrics import PaddedRows, compute_rate, routing_metrics


def test_the_share_of_the_peak_is_told_where_the_peak_is_known():
    assert compute_rate(100.0, 6.0, None) == {"flops_per_second": 600.0}
    assert compute_rate(100.0, 6.0, 2400.0) == {"flops_per_second": 600.0, "mfu": 0.25}


def test_a_peak_is_known_by_the_name_of_a_device(monkeypatch):
    names = {
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA L40S": 362e12,
        "NVIDIA L40": 181e12,
        "Some Other": None,
    }
    accelerator = torch.device("cu" + "da")
    for name, peak in names.items():
        monkeypatch.setattr(f"torch.{accelerator.type}.get_device_name", lambda _, name=name: name)
        assert device.peak_flops(accelerator, torch.bfloat16) == peak
        assert device.peak_flops(accelerator, torch.float32) is None
    assert device.peak_flops(torch.device("cpu"), torch.bfloat16) is None


def test_routing_of_each_layer_with_the_bounds_of_a_bias_that_moves():
    config = MoEConfig(dim=4, hidden_dim=4, num_experts=4, top_k=1, bias_update_rate=0.1)
    model = nn.ModuleDict({"moving": MoE(config), "still": MoE(MoEConfig(4, 4, 4, 1, bias_update_rate=0.0))})
    model["moving"].router.expert_bias_E.copy_(torch.tensor([0.0, -0.5, 0.25, 0.0]))
    health = routing_metrics(model, {"moving": [4, 0, 0, 0], "still": [1, 1, 1, 1]})
    assert health["moving"] == {"load": 4.0, "entropy": 0.0, "dead_experts": 3.0, "bias_min": -0.5, "bias_max": 0.25}
    assert health["still"] == {"load": 1.0, "entropy": pytest.approx(1.0), "dead_experts": 0.0}


def test_padded_rows_are_those_since_the_last_reading(monkeypatch):
    padded = PaddedRows()
    assert padded.read() == {}
    monkeypatch.setattr(telemetry, "_counts", {"exchange.equal_split.padding_rows": 5})
    assert padded.read() == {"padded_rows": 5}
    telemetry._counts["exchange.equal_split.padding_rows"] = 12
    assert padded.read() == {"padded_rows": 7}
