"""Fused attention: its interface with XLA's kernel on CPU devices, cuDNN's kernel in programs compiled for H100s."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.config import ConfigError
from megajax.estimate import hlo
from megajax.ops.attention import XLA, causal_attention, choose_attention, fused_attention
from tests import gpu

MANUAL = ("data", "pipe")


@pytest.mark.parametrize(("groups", "shared"), [(4, 1), (2, 3)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["fp32", "bf16"])
def test_equal_to_plain_attention_inside_the_executors_shard_map(groups, shared, dtype):
    """Output and gradients, with heads split over tensor and no communication over it."""
    mesh = jax.make_mesh((2, 2, 2), (*MANUAL, "tensor"), axis_types=(AxisType.Auto,) * 3)
    draw = lambda seed, *shape: jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)  # noqa: E731
    query, gradient = draw(0, 4, 8, groups, shared, 8), draw(1, 4, 8, groups, shared, 8)
    key, value = draw(2, 4, 8, groups, 8), draw(3, 4, 8, groups, 8)
    wide = [np.float32(a) for a in (query, key, value, gradient)]
    plain = lambda *arrays: causal_attention(*arrays, lambda p: p)  # noqa: E731
    output, vjp = jax.vjp(plain, *wide[:3])
    want = (output, *vjp(wide[3]))

    def step(*arrays):
        query, key, value, gradient = (lax.pcast(a, "pipe", to="varying") for a in arrays)
        output, vjp = jax.vjp(lambda *arrays: fused_attention(*arrays, XLA), query, key, value)
        return jax.tree.map(lambda a: a[None], (output, *vjp(gradient)))

    run = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("pipe", "data"), axis_names=set(MANUAL))
    sharding = NamedSharding(mesh, P("data", None, "tensor"))
    sharded = [jax.device_put(a, sharding) for a in (query, key, value, gradient)]
    assert not hlo.collectives(jax.jit(run).lower(*sharded).compile().as_text())
    for got, want_ in zip(jax.jit(run)(*sharded), want, strict=True):
        assert got.dtype == dtype
        tolerance = 1e-5 if dtype == jnp.float32 else 0.03 * np.abs(want_).max()
        np.testing.assert_allclose(np.float32(got[0]), want_, rtol=1e-5, atol=tolerance)


@dataclasses.dataclass
class Device:
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"
    compute_capability: str = "9.0"


A100 = Device(device_kind="NVIDIA A100-SXM4-80GB", compute_capability="8.0")
FITS = dict(head_size=128, dropout=0.0, precision="bf16", device=Device(), cudnn=True)


@pytest.mark.parametrize(
    "case", [{}, {"head_size": 160}, {"head_size": 256}, {"precision": "fp16"}, {"device": A100}, {"head_size": 8}]
)
def test_auto_takes_cudnn_where_it_runs(case):
    assert choose_attention("auto", **FITS | case).name == "cudnn"
    assert choose_attention("cudnn", **FITS | case).name == "cudnn"
    assert choose_attention("xla", **FITS | case).name == "xla"


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ({"head_size": 264}, "a multiple of 8 up to 256 on NVIDIA H100 80GB HBM3, and this is 264"),
        ({"head_size": 160, "device": A100}, "a multiple of 8 up to 128 on NVIDIA A100-SXM4-80GB, and this is 160"),
        ({"head_size": 100}, "a multiple of 8"),
        ({"dropout": 0.1}, "cannot drop the same elements on every mesh, and dropout = 0.1"),
        ({"precision": "fp32"}, "computes in bf16 or fp16, and precision = fp32"),
        ({"device": Device("cpu", "cpu", "")}, "cpu is not an NVIDIA GPU"),
        ({"device": Device("gpu", "MI300X", "gfx942")}, "MI300X is not an NVIDIA GPU"),
        ({"device": Device(device_kind="Tesla V100", compute_capability="7.0")}, "8.0 or more, and Tesla V100 has 7.0"),
        ({"cudnn": False}, "the cuDNN library is not installed"),
        ({"window": 4096}, "fused attention has no sliding window, and sliding_window = 4096"),
    ],
)
def test_unsupported_cudnn_is_an_error_and_auto_explains_the_choice(case, why):
    with pytest.raises(ConfigError, match=f"attention = cudnn, but .*{why}.*: pass --attention xla"):
        choose_attention("cudnn", **FITS | case)
    choice = choose_attention("auto", **FITS | case)
    assert choice.name == "xla" and why in choice.reason


LARGE = gpu.LARGE
MICROBATCHES, RUNS = 4, 8  # of a block, forward and backward, in a step


@gpu.needs_compiler
def test_compiled_for_h100s_the_kernel_runs_once_each_way():
    text, peak = gpu.compile_step(LARGE, MICROBATCHES, data=2, tensor=2, recompute="selective", attention="cudnn")
    assert hlo.read(text).kernels == {"__cudnn$fmhaSoftmax": RUNS, "__cudnn$fmhaSoftmaxBackward": RUNS}
    plain, more = gpu.compile_step(LARGE, MICROBATCHES, data=2, tensor=2, recompute="selective", attention="xla")
    assert not hlo.read(plain).kernels
    scores = LARGE.heads // 2 * LARGE.sequence_length**2 * 2  # bytes of one layer's, on one rank
    assert more - peak > scores


@pytest.mark.slow
@gpu.needs_compiler
@pytest.mark.parametrize(("recompute", "forwards"), [("none", RUNS), ("full", 2 * RUNS)])
def test_compiled_for_h100s_only_full_recompute_runs_the_kernel_twice(recompute, forwards):
    text, _ = gpu.compile_step(LARGE, MICROBATCHES, pipe=2, tensor=2, recompute=recompute, attention="cudnn")
    ticks = (MICROBATCHES + 1) / MICROBATCHES / 2  # one more, on half of the layers
    expected = {"__cudnn$fmhaSoftmax": forwards * ticks, "__cudnn$fmhaSoftmaxBackward": RUNS * ticks}
    assert hlo.read(text).kernels == expected


@pytest.mark.slow
@gpu.needs_compiler
def test_compiled_for_h100s_the_kernel_works_in_a_ring():
    """A rank's own keys and one received block: the kernel runs twice in each direction."""
    text, _ = gpu.compile_step(LARGE, MICROBATCHES, tensor=2, context=2, attention="cudnn")
    assert hlo.read(text).kernels == {"__cudnn$fmhaSoftmax": 2 * RUNS, "__cudnn$fmhaSoftmaxBackward": 2 * RUNS}
