"""Fused attention: its interface on CPU devices, and the kernels of programs that are compiled for H100s."""

import dataclasses
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.config import ConfigError
from megajax.estimate import hlo
from megajax.ops import attention_choice
from megajax.ops.attention import Scoring, document_starts, fused_attention, plain_attention
from megajax.ops.attention_choice import choose_attention
from megajax.ops.attention_kernels import INTERPRETED, XLA, with_one_size, with_window
from tests import gpu
from tests.gradients import both_ways

MANUAL = ("data", "pipe")


@pytest.mark.parametrize(
    ("dtype", "groups", "shared"),
    [
        pytest.param(jnp.float32, 2, 3, id="fp32-2-3"),
        pytest.param(jnp.bfloat16, 4, 1, id="bf16-4-1", marks=pytest.mark.slow),
        pytest.param(jnp.float32, 4, 1, id="fp32-4-1", marks=pytest.mark.slow),
        pytest.param(jnp.bfloat16, 2, 3, id="bf16-2-3", marks=pytest.mark.slow),
    ],
)
def test_equal_to_plain_attention_inside_the_executors_shard_map(groups, shared, dtype):
    """Output and gradients, with heads split over tensor and no communication over it."""
    mesh = jax.make_mesh((2, 2, 2), (*MANUAL, "tensor"), axis_types=(AxisType.Auto,) * 3)
    draw = lambda seed, *shape: jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)  # noqa: E731
    query, gradient = draw(0, 4, 8, groups, shared, 8), draw(1, 4, 8, groups, shared, 8)
    key, value = draw(2, 4, 8, groups, 8), draw(3, 4, 8, groups, 8)
    wide = [np.float32(a) for a in (query, key, value, gradient)]
    plain = lambda *arrays: plain_attention(*arrays, Scoring())  # noqa: E731
    want = both_ways(plain)(wide[3], *wide[:3])

    def step(*arrays):
        query, key, value, gradient = (lax.pcast(a, "pipe", to="varying") for a in arrays)
        output, vjp = jax.vjp(lambda *arrays: fused_attention(*arrays, XLA), query, key, value)
        return jax.tree.map(lambda a: a[None], (output, *vjp(gradient)))

    run = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("pipe", "data"), axis_names=set(MANUAL))
    sharding = NamedSharding(mesh, P("data", None, "tensor"))
    sharded = [jax.device_put(a, sharding) for a in (query, key, value, gradient)]
    compiled = jax.jit(run).lower(*sharded).compile()
    assert not hlo.collectives(compiled.as_text())
    for got, want_ in zip(compiled(*sharded), want, strict=True):
        assert got.dtype == dtype
        tolerance = 1e-5 if dtype == jnp.float32 else 0.03 * np.abs(want_).max()
        np.testing.assert_allclose(np.float32(got[0]), want_, rtol=1e-5, atol=tolerance)


def softmax_of_all(query, key, value, lengths):
    """Attention without a causal mask to the first tokens of each sample, in a loop: fp64 [b, s, g, n, d]."""
    out = np.zeros(query.shape)
    for place in np.ndindex(query.shape[:-1]):
        sample, group, length = place[0], place[2], lengths[place[0]]
        scores = key[sample, :length, group].astype(float) @ query[place] / query.shape[-1] ** 0.5
        weights = np.exp(scores - scores.max())
        out[place] = weights @ value[sample, :length, group] / weights.sum()
    return out


PADDED = tuple(
    np.float32(np.random.default_rng(seed).normal(size=(4, 10, 2, *[2] * (seed < 2), 8))) for seed in range(4)
)
LENGTHS = np.array([10, 7, 1, 4])


@cache
def padded_results(kernel):
    """Output and gradients of PADDED's queries, output gradients, keys and values; None: of plain attention."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    query, gradient, key, value = PADDED

    def attend(padding, *arrays):
        if kernel is None:
            return plain_attention(*arrays, Scoring(), causal=False, padding=padding)
        return fused_attention(*arrays, kernel, None, padding, False)

    def step(padding, *arrays):
        output, vjp = jax.vjp(partial(attend, padding), *arrays[:3])
        return output, *vjp(arrays[3])

    run = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    return jax.jit(run)(np.int32(10 - LENGTHS), query, key, value, gradient)


@pytest.mark.parametrize(
    "kernel", [None, XLA, pytest.param(INTERPRETED, marks=pytest.mark.slow)], ids=["plain", "xla", "interpreted"]
)
def test_attention_to_all_tokens_but_the_padding(kernel):
    """Output against a loop; the gradients of fused kernels against those of plain attention. 10 tokens, one without."""
    got, (query, _, key, value) = padded_results(kernel), PADDED
    np.testing.assert_allclose(got[0], softmax_of_all(query, key, value, LENGTHS), rtol=1e-5, atol=1e-5)
    if kernel is not None:
        for got_, want in zip(got, padded_results(None), strict=True):
            np.testing.assert_allclose(got_, want, rtol=1e-5, atol=1e-5)


MASKS = {
    "documents": ([[1, 1, 5, 5, 5, 5, 5, 5, 5, 7], [0] * 9 + [1]], None),
    "window": (None, 3),
    "both": ([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1]] * 2, 4),
    "sinks": (None, None),
    "all": ([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1]] * 2, 4),
}
SINKS = ("sinks", "all")
QUICK = ("all-xla", "all-interpreted")


@pytest.mark.parametrize(
    ("documents", "window", "with_sinks", "kernel"),
    [
        pytest.param(
            *mask,
            kind in SINKS,
            kernel,
            id=f"{kind}-{name}",
            marks=() if f"{kind}-{name}" in QUICK else pytest.mark.slow,
        )
        for kind, mask in MASKS.items()
        for name, kernel in (("xla", XLA), ("interpreted", INTERPRETED))
    ],
)
def test_documents_windows_and_sinks_equal_plain_attention_inside_the_executors_shard_map(
    kernel, documents, window, with_sinks
):
    """Two groups of two heads, split over tensor; a document ends after every number that changes."""
    mesh = jax.make_mesh((2, 2, 2), (*MANUAL, "tensor"), axis_types=(AxisType.Auto,) * 3)
    draw = lambda seed, *shape: np.float32(np.random.default_rng(seed).normal(size=shape))  # noqa: E731
    query, gradient, key, value = (draw(seed, 2, 10, 2, *[2] * (seed < 2), 8) for seed in range(4))
    sinks = (draw(4, 2, 2) + 1,) if with_sinks else ()
    numbers = None if documents is None else jnp.array(documents, jnp.int32)

    def plain(query, key, value, *sinks):
        return plain_attention(
            query, key, value, Scoring(sinks=sinks[0] if sinks else None), document=numbers, window=window
        )

    want = both_ways(plain)(gradient, query, key, value, *sinks)

    def step(numbers, sinks, *arrays):
        query, key, value, gradient = (lax.pcast(a, "pipe", to="varying") for a in arrays)
        sinks = [lax.pcast(one, MANUAL, to="varying") for one in sinks]
        starts = None if numbers is None else document_starts(numbers)

        def attend(query, key, value, *sinks):
            return fused_attention(query, key, value, with_window(kernel, window), starts, None, True, *sinks)

        output, vjp = jax.vjp(attend, query, key, value, *sinks)
        *of_arrays, of_sinks = *vjp(gradient), *[None] * (not sinks)
        return jax.tree.map(lambda a: a[None], ((output, *of_arrays), of_sinks))

    run = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P("data"), P(), *[P("data")] * 4),
        out_specs=(P("pipe", "data"), P(("pipe", "data"))),
        axis_names=set(MANUAL),
    )
    sharding = NamedSharding(mesh, P("data", None, "tensor"))
    sharded = [jax.device_put(a, sharding) for a in (query, key, value, gradient)]
    of_arrays, of_sinks = jax.jit(run)(numbers, jax.device_put(sinks, NamedSharding(mesh, P("tensor"))), *sharded)
    got = [one[0] for one in of_arrays] + ([of_sinks[:2].sum(0)] if with_sinks else [])
    for got_, want_ in zip(got, want, strict=True):
        np.testing.assert_allclose(got_, want_, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(6, 4), (4, 6)], ids=str)
@pytest.mark.parametrize(
    "kernel",
    [XLA, with_one_size(XLA), pytest.param(INTERPRETED, marks=pytest.mark.slow)],
    ids=["xla", "zeros", "interpreted"],
)
def test_values_of_another_size_equal_plain_attention(kernel, sizes):
    """Two groups of two heads: output, and all gradients, of a kernel that has both sizes or gets zeros."""
    draw = lambda seed, *shape: np.float32(np.random.default_rng(seed).normal(size=shape))  # noqa: E731
    query, key, value = draw(0, 2, 10, 2, 2, sizes[0]), draw(1, 2, 10, 2, sizes[0]), draw(2, 2, 10, 2, sizes[1])
    gradient = draw(3, 2, 10, 2, 2, sizes[1])
    want = both_ways(lambda *arrays: plain_attention(*arrays, Scoring()))(gradient, query, key, value)
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        got = jax.jit(both_ways(lambda *arrays: fused_attention(*arrays, kernel)))(gradient, query, key, value)
    for got_, want_ in zip(got, want, strict=True):
        np.testing.assert_allclose(got_, want_, rtol=1e-5, atol=1e-5)


def test_document_starts():
    assert document_starts(jnp.array([[3, 3, 3], [0, 1, 0], [0, 1, 1]])).tolist() == [[0, 0, 0], [0, 1, 2], [0, 1, 1]]


@dataclasses.dataclass
class Device:
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"
    compute_capability: str = "9.0"


CPU = Device("cpu", "cpu", "")
A100 = Device(device_kind="NVIDIA A100-SXM4-80GB", compute_capability="8.0")
B200 = Device(device_kind="NVIDIA B200", compute_capability="10.0")
FITS = dict(head_sizes=(128, 128), dropout=0.0, precision="bf16", device=Device(), installed=("cudnn", "tokamax"))


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"head_sizes": (160, 160)},
        {"head_sizes": (256, 256)},
        {"precision": "fp16"},
        {"device": A100},
        {"head_sizes": (8, 8)},
    ],
)
def test_auto_takes_cudnn_where_it_runs(case):
    assert choose_attention("auto", **FITS | case).name == "cudnn"
    assert choose_attention("cudnn", **FITS | case).name == "cudnn"
    assert choose_attention("xla", **FITS | case).name == "xla"


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ({"head_sizes": (264, 264)}, "at most 256, and this is 264"),
        ({"dropout": 0.1}, "cannot drop the same elements on every mesh, and dropout = 0.1"),
        ({"precision": "fp32"}, "computes in bf16 or fp16, and precision = fp32"),
        ({"device": CPU}, "cpu is not an NVIDIA GPU"),
        ({"device": Device("gpu", "MI300X", "gfx942")}, "MI300X is not an NVIDIA GPU"),
        ({"device": Device(device_kind="Tesla V100", compute_capability="7.0")}, "8.0 or more, and Tesla V100 has 7.0"),
    ],
)
def test_where_no_fused_kernel_runs_it_is_an_error_and_auto_explains_the_choice(case, why):
    for name in ("cudnn", "tokamax") if case != {"device": CPU} else ("cudnn",):
        with pytest.raises(ConfigError, match=f"attention = {name}, but .*{why}.*: pass --attention xla"):
            choose_attention(name, **FITS | case)
    choice = choose_attention("auto", **FITS | case)
    assert choice.name == "xla" and why in choice.reason


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (
            {"head_sizes": (160, 160), "device": A100},
            "a multiple of 8 up to 128 on NVIDIA A100-SXM4-80GB, and this is 160",
        ),
        ({"head_sizes": (100, 100)}, "a multiple of 8"),
        ({"installed": ("tokamax",)}, "the cuDNN library is not installed"),
        ({"mask": "documents"}, "no document mask, which --reset-attention-mask needs"),
        ({"mask": "documents", "context": 2}, "no document mask"),
        ({"mask": "padding"}, "not used with a padding mask"),
        ({"window": 7, "context": 2}, "no sliding window between the pieces of context = 2 ranks"),
    ],
)
def test_where_cudnn_does_not_run_tokamax_does_and_auto_explains_the_choice(case, why):
    with pytest.raises(ConfigError, match=f"attention = cudnn, but .*{why}.*: pass --attention xla"):
        choose_attention("cudnn", **FITS | case)
    choice = choose_attention("auto", **FITS | case)
    assert choice.name == "tokamax" and why in choice.reason
    assert choose_attention("tokamax", **FITS | case).name == "tokamax"
    others = [name for name in (FITS | case)["installed"] if name != "tokamax"]
    without = choose_attention("auto", **FITS | case | {"installed": others})
    assert without.name == "xla" and why in without.reason and "pip install 'megajax[cuda12]'" in without.reason


def test_on_blackwell_auto_takes_tokamax_but_for_windows():
    assert choose_attention("auto", **FITS | {"device": B200}).name == "tokamax"
    assert choose_attention("auto", **FITS | {"device": B200, "installed": ("cudnn",)}).name == "cudnn"
    assert choose_attention("auto", **FITS | {"device": B200}, window=7).name == "cudnn"
    rtx = Device(device_kind="NVIDIA RTX PRO 6000", compute_capability="12.0")
    assert choose_attention("auto", **FITS | {"device": rtx}).name == "cudnn"


@pytest.mark.parametrize(
    ("sizes", "capabilities"),
    [
        ((128, 128), "8.0 8.9 9.0 10.0 12.0"),
        ((64, 128), "8.0 8.9 9.0 10.0 12.0"),
        ((192, 128), "9.0 10.0"),
        ((192, 192), "9.0"),
        ((256, 256), "9.0 10.0"),
    ],
    ids=str,
)
def test_cudnn_has_the_sizes_of_its_support_matrix(sizes, capabilities):
    """Those of the backward, as NVIDIA's documentation of cuDNN 9.18 has them by architecture; smaller heads get zeros."""
    for capability in ("8.0", "8.9", "9.0", "10.0", "12.0"):
        fits = FITS | {"head_sizes": sizes, "device": Device(compute_capability=capability), "installed": ("cudnn",)}
        assert (choose_attention("auto", **fits).name == "cudnn") == (capability in capabilities.split()), capability


def test_tokamax_that_is_not_installed_is_an_error_with_what_to_install():
    with pytest.raises(
        ConfigError, match="attention = tokamax, but tokamax is not installed: on Python 3.12 .*pip install"
    ):
        choose_attention("tokamax", **FITS | {"installed": ("cudnn",)})


def test_cudnn_has_windows_and_tokamax_is_interpreted_on_cpus():
    assert choose_attention("auto", **FITS, window=7)[::2] == ("cudnn", 7)
    choice = choose_attention("tokamax", **FITS | {"device": CPU, "precision": "fp32", "installed": ("cudnn",)})
    assert choice.interpreted and "interpreter: cpu is not an NVIDIA GPU" in choice.reason


LARGE = gpu.LARGE
MICROBATCHES, RUNS = 4, 8  # of a block, forward and backward, in a step


@pytest.mark.compiler
def test_compiled_for_h100s_the_kernel_runs_once_each_way():
    layout = {"data": 2, "tensor": 2, "recompute": "selective"}
    text, peak = gpu.compile_step(LARGE, MICROBATCHES, **layout, attention="cudnn")
    counts = hlo.loop_trip_counts(gpu.run_of(LARGE, MICROBATCHES, **layout, attention="cudnn"))
    assert hlo.read(text, counts).kernels == {"__cudnn$fmhaSoftmax": RUNS, "__cudnn$fmhaSoftmaxBackward": RUNS}
    plain, more = gpu.compile_step(LARGE, MICROBATCHES, **layout, attention="xla")
    assert not hlo.read(plain).kernels
    scores = LARGE.heads // 2 * LARGE.sequence_length**2 * 2  # bytes of one layer's, on one rank
    assert more - peak > scores


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize(("recompute", "forwards"), [("none", RUNS), ("full", 2 * RUNS)])
def test_compiled_for_h100s_only_full_recompute_runs_the_kernel_twice(recompute, forwards):
    text, _ = gpu.compile_step(LARGE, MICROBATCHES, pipe=2, tensor=2, recompute=recompute, attention="cudnn")
    ticks = (MICROBATCHES + 1) / MICROBATCHES / 2  # one more, on half of the layers
    expected = {"__cudnn$fmhaSoftmax": forwards * ticks, "__cudnn$fmhaSoftmaxBackward": RUNS * ticks}
    assert hlo.read(text).kernels == expected


@pytest.mark.slow
@pytest.mark.compiler
def test_compiled_for_h100s_the_kernel_works_in_a_ring():
    """A rank's own keys and one received block: the kernel runs twice in each direction."""
    text, _ = gpu.compile_step(LARGE, MICROBATCHES, tensor=2, context=2, attention="cudnn")
    assert hlo.read(text).kernels == {"__cudnn$fmhaSoftmax": 2 * RUNS, "__cudnn$fmhaSoftmaxBackward": 2 * RUNS}


@pytest.mark.slow
@pytest.mark.compiler
def test_compiled_for_h100s_documents_have_a_kernel_without_scores():
    """tokamax's forward and two of ours backward. The stash holds what it holds for cuDNN's, and the documents' starts."""
    pytest.importorskip("tokamax")
    shape = dataclasses.replace(LARGE, sequence_length=1536)  # equal to no width
    text, peak = gpu.compile_step(shape, MICROBATCHES, documents=True)
    kernels = ("forward", "backward_query", "backward_key_value")
    assert hlo.read(text).kernels == {f"flash_attention_{kernel}": RUNS for kernel in kernels}
    assert "1536,1536" not in text
    cudnn, less = gpu.compile_step(shape, MICROBATCHES, attention="cudnn")
    assert "1536,1536" not in cudnn and peak - less < 0.05 * less


@pytest.mark.slow
@pytest.mark.compiler
def test_compiled_for_h100s_documents_and_windows_in_a_ring():
    pytest.importorskip("tokamax")
    shape = dataclasses.replace(LARGE, sliding_window=700)
    text, _ = gpu.compile_step(shape, MICROBATCHES, documents=True, tensor=2, context=2)
    kernels = ("forward", "backward_query", "backward_key_value")
    assert hlo.read(text).kernels == {f"flash_attention_{kernel}": 2 * RUNS for kernel in kernels}


@pytest.mark.slow
@pytest.mark.compiler
def test_compiled_for_h100s_a_window_is_cudnns():
    text, _ = gpu.compile_step(dataclasses.replace(LARGE, sliding_window=700), MICROBATCHES, attention="cudnn")
    assert hlo.read(text).kernels == {"__cudnn$fmhaSoftmax": RUNS, "__cudnn$fmhaSoftmaxBackward": RUNS}
    assert text.count('"sliding_window_length": 700') == text.count('custom_call_target="__cudnn$fmha')


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize(("size", "width"), [(128, 128), (160, 192)], ids=["a size that cuDNN has", "with zeros"])
def test_compiled_for_h100s_values_of_latent_attention(size, width):
    """cuDNN's kernels have DeepSeek's heads as they are, 192 of queries and keys and 128 of values."""
    latent = dict(kv_latent=64, query_latent=96, head_size=192, rotary_head_size=64, value_head_size=size)
    shape = dataclasses.replace(LARGE, heads=4, positions="rotary", norm="rmsnorm", biases=False, **latent)
    text, _ = gpu.compile_step(shape, MICROBATCHES, attention="cudnn")
    assert hlo.read(text).kernels == {"__cudnn$fmhaSoftmax": RUNS, "__cudnn$fmhaSoftmaxBackward": RUNS}
    first = re.compile(r"= \(bf16\[1,4,2048,(\d+)\].*custom_call_target=.__cudnn\$fmhaSoftmax\"")
    assert {int(found) for found in first.findall(text)} == {width}


def test_caps_are_xlas():
    choice = choose_attention("auto", **FITS | {"mask": "attention_softcap"})
    assert (choice.name, choice.reason) == ("xla", "fused kernels have no attention_softcap, which this model has")
    with pytest.raises(ConfigError, match="attention = tokamax, but fused kernels have no attention_softcap"):
        choose_attention("tokamax", **FITS | {"mask": "attention_softcap"})


def test_windows_that_differ_are_tokamaxs():
    choice = choose_attention("auto", **FITS | {"mask": "windows"})
    assert choice.name == "tokamax" and "different sliding windows" in choice.reason


@pytest.mark.parametrize(
    ("capability", "version", "runs"), [("10.0", 91002, False), ("10.0", 91100, True), ("9.0", 91002, True)]
)
def test_heads_of_two_sizes_need_the_cudnn_that_has_them(capability, version, runs, monkeypatch):
    """An older one gets zeros up to 192, of which B200s have no backward; Hopper has."""
    monkeypatch.setattr(attention_choice, "cudnn_version", lambda: version)
    fits = FITS | {"head_sizes": (192, 128), "device": Device(compute_capability=capability), "installed": None}
    if runs:
        assert choose_attention("cudnn", **fits).name == "cudnn"
        return
    with pytest.raises(
        ConfigError, match="heads of 192 with values of 128 .* from 9.11 on, and cuDNN 9.10.2 is installed"
    ):
        choose_attention("cudnn", **fits)
