"""Published peaks by jax's device names, measured peaks, and which attention a run gets on a GPU."""

import dataclasses
import re
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate import gpus
from megajax.estimate.gpus import PEAKS, device_peak, find_gpu, measured_peak, published_peak, with_attention


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
def test_published_peaks_are_found_by_device_name(device_kind, precision, tera):
    peak = published_peak(device_kind, precision)
    assert peak is None if tera is None else peak == pytest.approx(tera * 1e12)


def test_no_row_is_shadowed_by_an_earlier_one():
    for index, (pattern, half, full) in enumerate(PEAKS):
        assert half > full
        for above, above_half, above_full in PEAKS[:index]:
            assert above not in pattern or (above_half, above_full) == (half, full)


@pytest.mark.parametrize("count", [1, 8])
def test_a_measured_peak_is_flops_over_seconds_and_cpu_devices_share_it(monkeypatch, count):
    """With a clock that advances a quarter of a second each time it is read, a matmul takes that long."""
    readings = iter(range(100))
    monkeypatch.setattr(gpus, "time", SimpleNamespace(perf_counter=lambda: next(readings) / 4))
    assert measured_peak(jax.devices()[:count], "bf16", seconds=1) == 2 * 1024**3 / 0.25 / count


@pytest.mark.slow
def test_a_measured_peak_is_about_numpys_rate():
    """numpy's matmul uses another library and all cores too; the best of several, as the machine may be busy."""
    matrix, seconds = np.ones((1024, 1024), np.float32), []
    for _ in range(10):
        start = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - start)
    peak = max(measured_peak(jax.devices()[:1], "fp32") for _ in range(2))
    assert 1 / 5 < peak / (2 * 1024**3 / min(seconds)) < 5


@pytest.mark.slow
def test_measuring_takes_well_under_a_second():
    measured_peak(jax.devices(), "fp32", seconds=0.05)  # compiles
    start = time.perf_counter()
    measured_peak(jax.devices(), "fp32")
    assert time.perf_counter() - start < 1.0  # 0.15 s and a compilation, with room for a busy machine


def test_a_device_without_a_published_peak_is_measured():
    peak = device_peak(jax.devices(), "fp32")
    assert peak.source == "measured" and peak.flops > 0


@pytest.mark.parametrize(
    ("model", "gpu", "precision", "runs"),
    [
        ("gpt3-175b", "a100-80gb", "bf16", "cudnn"),  # heads of 128
        ("gpt3-530b", "a100-80gb", "bf16", "tokamax"),  # of 160: cuDNN's from Hopper on
        ("gpt3-530b", "h100-80gb", "bf16", "cudnn"),
        ("gpt3-175b", "h100-80gb", "fp32", "xla"),
        ("gpt2-xl", "h100-80gb", "bf16", "xla"),  # dropout
    ],
)
def test_auto_attention(model, gpu, precision, runs):
    run = RunConfig(preset(model), ParallelConfig(), TrainConfig(precision=precision))
    assert with_attention(run, find_gpu(gpu)).parallel.attention == runs
    plain = dataclasses.replace(run, parallel=ParallelConfig(attention="xla"))
    assert with_attention(plain, find_gpu(gpu)) == plain


def test_cudnn_is_refused_where_it_is_not_supported():
    run = RunConfig(preset("gpt3-530b"), ParallelConfig(attention="cudnn"), TrainConfig())
    with pytest.raises(ConfigError, match="attention = cudnn, but cuDNN's head size is a multiple of 8 up to 128"):
        with_attention(run, find_gpu("a100-80gb"))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("h200", "did you mean h200-141gb or b200?"),  # b200 is spelled alike, and another GPU
        ("H100", "did you mean h100-80gb or h100-pcie or h100-nvl?"),
        ("gb200", "did you mean gb200-nvl72 or b200 or b300?"),
        ("a100-80g", "did you mean a100-80gb"),
        ("b100", "did you mean b300 or b200"),
        ("a", "choose from a100-40gb, "),
    ],
)
def test_an_unknown_gpu_is_answered_with_those_whose_names_begin_so(name, hint):
    with pytest.raises(ConfigError, match="is not known: " + re.escape(hint)):
        find_gpu(name)
