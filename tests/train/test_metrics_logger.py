import torch

from spurline import device
from spurline.moe import telemetry
from spurline.train.metrics.logger import PaddedRows, compute_rate


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


def test_padded_rows_are_those_since_the_last_reading(monkeypatch):
    padded = PaddedRows()
    assert padded.read() == {}
    monkeypatch.setattr(telemetry, "_counts", {"exchange.equal_split.padding_rows": 5})
    assert padded.read() == {"padded_rows": 5}
    telemetry._counts["exchange.equal_split.padding_rows"] = 12
    assert padded.read() == {"padded_rows": 7}
