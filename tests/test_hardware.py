"""The table of accelerators: names found as drivers spell them, and bad names answered in one line."""

import subprocess
import sys

import pytest

from spurline.hardware import HARDWARE, find_hardware, hardware_named


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100_40"),
        ("NVIDIA A100-SXM4-80GB", "a100_80"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H100 NVL", "h100_nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("AMD Instinct MI250X", "mi250x"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Intel(R) Data Center GPU Max 1550", "pvc"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_finds_a_device_by_its_drivers_name(device_name: str, name: str | None) -> None:
    found = find_hardware(device_name)
    assert (found.name if found else None) == name


def test_numbers_are_of_one_kind() -> None:
    for hardware in HARDWARE.values():
        assert 2**34 < hardware.memory_bytes < 2**39, hardware
        assert hardware.fp8_flops is None or 1.9 < hardware.fp8_flops / hardware.bf16_flops < 2.1, hardware
        assert hardware.inter_node_bandwidth <= hardware.intra_node_bandwidth < hardware.memory_bandwidth, hardware
        assert 5 < hardware.bf16_flops / hardware.memory_bandwidth < 450, "FLOPs per byte of memory traffic"


def test_unknown_name_is_one_line_with_the_nearest() -> None:
    assert hardware_named("A100").name == "a100_80"
    with pytest.raises(
        ValueError, match=r"^hardware 'h10' is not known\. Did you mean h100\? Choose from: a100_40, .*"
    ):
        hardware_named("h10")


def test_needs_no_torch() -> None:
    code = "import sys, spurline.hardware; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
