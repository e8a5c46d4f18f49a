import time

import jax
import pytest

from megajax.estimate.hardware import PEAKS, device_peak, measured_peak, published_peak


@pytest.mark.parametrize(
    "device_kind,precision,tera",
    [
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("Tesla V100-PCIE-16GB", "fp32", 14),
        ("Tesla V100S-PCIE-32GB", "fp16", 130),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "fp32", 156),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "fp16", 835),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "bf16", 2500),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40", "bf16", 181.05),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("cpu", "fp32", None),
    ],
)
def test_published_peaks(device_kind, precision, tera):
    peak = published_peak(device_kind, precision)
    assert peak is None if tera is None else peak == pytest.approx(tera * 1e12)


def test_no_row_is_hidden_by_one_above_it():
    for index, (pattern, half, full) in enumerate(PEAKS):
        assert half > full
        for above, above_half, above_full in PEAKS[:index]:
            assert above not in pattern or (above_half, above_full) == (half, full)


def test_cpu_devices_share_one_measured_rate():
    devices = jax.devices()
    measured_peak(devices[:1], "fp32", seconds=0.05)  # warm
    start = time.perf_counter()
    alone = measured_peak(devices[:1], "bf16")
    assert time.perf_counter() - start < 1.0  # 0.5 s, and room for a busy machine
    together = measured_peak(devices, "bf16")
    assert 1e8 < alone < 1e14
    assert alone / together == pytest.approx(len(devices), rel=0.9)


def test_a_device_without_a_published_peak_is_measured():
    peak = device_peak(jax.devices(), "fp32")
    assert peak.source == "measured" and peak.flops > 0
