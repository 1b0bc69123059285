"""Accelerators by name: memory, peak FLOP/s and bandwidths, as published by their vendors. Torch-free.

A device is what PyTorch calls one: a die of an MI250X, a stack of a Max 1550. FLOP/s are dense. Link bandwidths are in
bytes per second in one direction, the most one device can send while all devices of its node, or all nodes, send too.
"""

from __future__ import annotations

from dataclasses import dataclass

from spurline.registry import unknown

_GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    name: str
    memory_bytes: int
    """What the driver reports for one device; a few hundred MB of it go to the runtime."""
    bf16_flops: float
    fp8_flops: float | None
    """None: no float8 instructions."""
    memory_bandwidth: float
    intra_node_bandwidth: float
    inter_node_bandwidth: float
    """With the network of the vendor's own system: one 400 Gb/s adapter per device unless stated otherwise."""
    gpus_per_node: int
    """Devices connected at intra_node_bandwidth: a full rack for NVL72."""
    marks: tuple[str, ...]
    """Substrings of the driver's name for the device; all of them must match."""


def _gib(size: float) -> int:
    return int(size * _GIB)


# The first entry whose marks match a device's name applies, so longer names come first.
_KNOWN = (
    # NVIDIA GB200 NVL72 data sheet: 72 GPUs in one NVLink domain, ConnectX-7 (400 Gb/s) for each.
    Hardware("gb200", _gib(185), 2.5e15, 5e15, 8e12, 900e9, 50e9, 72, ("GB200",)),
    # NVIDIA DGX B200 data sheet: 8 GPUs, fifth-generation NVLink (1.8 TB/s both ways), ConnectX-7 (400 Gb/s) for each.
    Hardware("b200", _gib(179), 2.25e15, 4.5e15, 8e12, 900e9, 50e9, 8, ("B200",)),
    # Alps (CSCS) nodes: four GH200, each pair joined by 150 GB/s of NVLink; one 200 Gb/s Slingshot adapter for each.
    Hardware("gh200", _gib(95.6), 989e12, 1979e12, 4e12, 450e9, 25e9, 4, ("GH200",)),
    # NVIDIA H200 data sheet; NVL: PCIe cards, four of them joined by an NVLink bridge.
    Hardware("h200_nvl", _gib(140.4), 836e12, 1671e12, 4.8e12, 450e9, 50e9, 4, ("H200", "NVL")),
    Hardware("h200", _gib(140.4), 989e12, 1979e12, 4.8e12, 450e9, 50e9, 8, ("H200",)),
    # NVIDIA H100 data sheet; NVL: pairs of PCIe cards joined by a bridge; PCIe 5 x16 otherwise.
    Hardware("h100_nvl", _gib(93.6), 835e12, 1671e12, 3.9e12, 300e9, 50e9, 2, ("H100", "NVL")),
    Hardware("h100_pcie", _gib(79.6), 756e12, 1513e12, 2e12, 64e9, 50e9, 8, ("H100", "PCIe")),
    Hardware("h100", _gib(79.6), 989e12, 1979e12, 3.35e12, 450e9, 50e9, 8, ("H100",)),
    # NVIDIA A100 data sheet, SXM; DGX A100 has one 200 Gb/s adapter for each GPU.
    Hardware("a100_40", _gib(39.5), 312e12, None, 1.555e12, 300e9, 25e9, 8, ("A100", "40GB")),
    Hardware("a100_80", _gib(79.3), 312e12, None, 2.039e12, 300e9, 25e9, 8, ("A100",)),
    # NVIDIA L40S, L40 and L4 data sheets: PCIe 4 x16 (L4: x8) between devices; a 200 Gb/s adapter for each is usual.
    Hardware("l40s", _gib(45), 362e12, 733e12, 864e9, 32e9, 25e9, 8, ("L40S",)),
    Hardware("l40", _gib(45), 181e12, 362e12, 864e9, 32e9, 25e9, 8, ("L40",)),
    Hardware("l4", _gib(22.5), 121e12, 242.5e12, 300e9, 16e9, 12.5e9, 8, ("L4",)),
    # AMD Instinct MI325X and MI300X data sheets: seven Infinity Fabric links of 64 GB/s each way, one to each peer.
    Hardware("mi325x", _gib(256), 1307.4e12, 2614.9e12, 6e12, 448e9, 50e9, 8, ("MI325X",)),
    Hardware("mi300x", _gib(192), 1307.4e12, 2614.9e12, 5.3e12, 448e9, 50e9, 8, ("MI300X",)),
    # AMD Instinct MI250X data sheet, one of its two dies. Frontier (OLCF): 200 GB/s to the other die and 50 to 100 GB/s
    # to dies of other packages, which are what a collective over the node waits for; four 200 Gb/s adapters for 8 dies.
    Hardware("mi250x", _gib(64), 191.5e12, None, 1.638e12, 100e9, 12.5e9, 8, ("MI250X",)),
    # Intel Data Center GPU Max 1550 product brief (832 TFLOP/s, 3.28 TB/s for both stacks), one stack. Aurora (ALCF):
    # 6 GPUs, an Xe Link of 26.5 GB/s each way to each of five peers, eight 200 Gb/s adapters for 12 stacks.
    Hardware("pvc", _gib(64), 416e12, None, 1.638e12, 132.5e9, 16.7e9, 12, ("Data Center GPU Max 1550",)),
    # Not a product: one CPU rank of a server; roughly what gloo ranks reach over loopback and 25 Gb/s Ethernet.
    Hardware("cpu", _gib(64), 1e12, None, 100e9, 5e9, 3e9, 2, ("CPU",)),
)
HARDWARE = {hardware.name: hardware for hardware in _KNOWN}
ALIASES = {"a100": "a100_80", "max1550": "pvc"}


def hardware_named(name: str) -> Hardware:
    """The entry for a name such as h100 or a100_40; a ValueError that suggests the nearest one."""
    name = ALIASES.get(name.lower(), name.lower())
    if name not in HARDWARE:
        raise ValueError(unknown("hardware", name, HARDWARE)[0].removesuffix(" (--import loads your own)"))
    return HARDWARE[name]


def find_hardware(device_name: str) -> Hardware | None:
    """The entry for what a driver calls its device, such as "NVIDIA H100 80GB HBM3"; None if it is not listed."""
    return next((known for known in _KNOWN if all(mark in device_name for mark in known.marks)), None)
