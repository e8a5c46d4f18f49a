"""Each entry of compat.py and compat_kernels.py in megajax/runtime, against the installed jax.

All passed on jax 0.10.2, 0.11.2 and 0.12.0.1.
"""

import contextlib
import importlib
import logging
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import lib
from jax.ad_checkpoint import checkpoint_name
from jax.extend import backend
from jax.sharding import PartitionSpec as P

from megajax.runtime import compat, compat_kernels


@pytest.mark.parametrize("keep", [("product",), ()], ids=["some residuals", "none"])
def test_a_rebuilt_vjp_is_the_original(keep):
    """Arguments in nested dictionaries, of which the backward reads some and not others (a bias)."""

    def function(weights, x):
        product = checkpoint_name(x @ weights["layer"]["kernel"], "product")
        return jnp.sin(product) + weights["layer"]["bias"]

    policy = jax.checkpoint_policies.save_only_these_names(*keep)
    function = jax.checkpoint(function, policy=policy)
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)  # noqa: E731
    arguments = {"layer": {"kernel": draw(0, 4, 3), "bias": draw(1, 3)}}, draw(2, 5, 4)
    y, vjp = jax.vjp(function, *arguments)
    residuals = compat.vjp_residuals(vjp)
    kept = [leaf.shape for leaf in jax.tree.leaves(residuals)]
    assert ((5, 3) in kept) == bool(keep)  # the product is stored where the policy names it, and only there
    template = jax.eval_shape(lambda *arguments: jax.vjp(function, *arguments)[1], *arguments)
    again = compat.rebuild_vjp(template, residuals, arguments)
    dy = draw(3, *y.shape)
    jax.tree.map(np.testing.assert_array_equal, again(dy), vjp(dy))


def test_manual_and_varying_axes_are_found():
    mesh = jax.make_mesh((2, 2), ("data", "pipe"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    seen = []

    def local(x):
        seen.append((set(compat.manual_axes()), set(compat.varying_axes(x))))
        return x

    jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data", "pipe"}))(
        jnp.zeros(4)
    )
    assert seen[0] == ({"data", "pipe"}, {"data"})
    assert set(compat.manual_axes()) == set()


def test_the_text_of_a_program_has_all_elements_of_its_constants():
    table = np.random.default_rng(0).permutation(40).astype(np.int32)
    compiled = jax.jit(lambda i: jnp.asarray(table)[i]).lower(np.int32(3)).compile()
    listed = ", ".join(map(str, table))
    assert f"constant({{{listed}}})" in compat.compiled_text(compiled).replace("{ ", "{").replace(" }", "}")
    assert listed not in compiled.as_text()


def test_coordination_service_of_a_single_process():
    service = compat.coordination_service()
    assert (service.client, service.process_id, service.num_processes) == (None, 0, 1)
    assert service.coordinator_address is None


@pytest.mark.parametrize("mask", [(True,), (False,), (True, 7)], ids=["causal", "none", "window"])
def test_cudnn_attention_takes_these_arguments(mask):
    """Traced only: lowering needs the cuDNN library, see tests/ops/test_attention.py."""
    b, s, a, g, d = 2, 16, 4, 2, 64
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    query, key = of(b, s, a, d), of(b, s, g, d)
    output, logsumexp = jax.eval_shape(
        lambda *arrays: compat_kernels.cudnn_attention_forward(*arrays, *mask), query, key, key
    )
    assert (output.shape, logsumexp.shape, logsumexp.dtype) == ((b, s, a, d), (b, a, s), jnp.float32)
    arrays = (query, key, key, output, logsumexp, output)
    gradients = jax.eval_shape(lambda *arrays: compat_kernels.cudnn_attention_backward(*arrays, *mask), *arrays)
    assert [x.shape for x in gradients] == [query.shape, key.shape, key.shape]


def test_a_pallas_kernel_runs_in_the_interpreter_inside_a_shard_map():
    """Its arrays vary over the manual axis of an outer shard_map, as in the executor; None is an absent input.

    Passed on jax 0.10.2 and 0.12.0.1. Compiled: tests/ops/test_attention.py.
    """
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    pallas = compat_kernels.pallas()
    spec = pallas.BlockSpec((16, 16), lambda i: (i, 0))

    def kernel(x_ref, absent, y_ref):
        assert absent is None
        in_reach = (jnp.arange(16) < 5)[None]
        x = pallas.load(x_ref.at[pallas.ds(0, 16), slice(None)], mask=in_reach, other=1.0)
        pallas.store(y_ref.at[:, :], x * (1 + pallas.program_id(0)), mask=in_reach)

    def local(x):
        settings = {"name": "double", "warps": 4, "stages": 2, "interpret": True}
        return compat_kernels.pallas_call(
            kernel, [x, None], [spec, None], [(x.shape, x.dtype)], [spec], grid=(2,), settings=settings
        )[0]

    inner = lambda x: jax.shard_map(  # noqa: E731
        local, in_specs=P(None, "tensor"), out_specs=P(None, "tensor"), axis_names={"tensor"}, check_vma=False
    )(x)
    vary = lambda x: jax.lax.pcast(inner(x), "data", to="varying")  # noqa: E731
    run = jax.shard_map(vary, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    x = np.arange(640, dtype=np.float32).reshape(64, 10)
    factors = np.tile(np.repeat([1, 2], 16), 2)[:, None]
    np.testing.assert_array_equal(jax.jit(run)(x), x * factors)


def test_a_pallas_kernel_multiplies_tiles_in_8_bits():
    """Interpreted; tests/ops/test_grouped_fp8.py compiles it for H100s."""
    pallas = compat_kernels.pallas()

    def kernel(x_ref, y_ref, out_ref):
        out_ref[...] = pallas.dot_in_8_bits(x_ref[...], y_ref[...].T, jnp.ones((16, 32), jnp.float32))

    draw = np.random.default_rng(0)
    x, y = (jnp.asarray(draw.integers(-8, 9, (rows, 128)), jnp.float8_e4m3fn) for rows in (16, 32))
    how = {"warps": 4, "stages": 1, "name": "test", "interpret": True}
    specs = [compat_kernels.whole_block(shape) for shape in (x.shape, y.shape, (16, 32))]
    (got,) = compat_kernels.pallas_call(
        kernel, [x, y], specs[:2], [((16, 32), jnp.float32)], specs[2:], grid=(1,), settings=how
    )
    np.testing.assert_array_equal(got, 1 + np.float32(x) @ np.float32(y).T)


def test_tokamax_is_traced_for_a_device_that_is_not_here():
    """Passed with tokamax 0.0.17 on jax 0.12.0.1. Its kernels, compiled: tests/ops/test_tokamax_kernels.py."""
    with compat_kernels.tokamax_compiles_for(jax.devices()[0]):
        assert backend.get_default_device() == jax.devices()[0]  # as without it
    if not compat_kernels.tokamax_installed():
        pytest.skip("tokamax is not installed: pip install 'megajax[dryrun]' on Python 3.12 or later")
    device = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")
    level = logging.getLogger("absl").level
    with compat_kernels.tokamax_compiles_for(device):
        assert backend.get_default_device() is device
        assert compat_kernels.tokamax().attention["mosaic_gpu"].supported_on(device)
    assert backend.get_default_device() == jax.devices()[0] and logging.getLogger("absl").level == level
    tokamax = compat_kernels.tokamax()
    assert {"mosaic_gpu", "triton", "xla"} <= {*tokamax.attention} and tokamax.Mask(is_causal=True)
    assert {"mosaic_gpu", "xla"} <= {*tokamax.ragged_dot}
    assert tokamax.kernels != tokamax.transposed_kernels and tokamax.AttentionBackward()


def library_missing():
    raise RuntimeError("cuDNN not found.")


@pytest.mark.parametrize(
    ("versions", "found"),
    [
        (types.SimpleNamespace(cudnn_get_version=lambda: 91002), 91002),  # cuDNN 9.10.2
        (types.SimpleNamespace(cudnn_get_version=library_missing), None),
        (None, None),  # jax's CUDA plugin is not installed
    ],
    ids=["cuDNN", "plugin alone", "neither"],
)
def test_cudnn_version_is_that_of_the_library_or_none(versions, found, monkeypatch):
    if lib.cuda_versions is not None:  # the installed plugin has the function that is replaced here
        assert callable(lib.cuda_versions.cudnn_get_version)
    monkeypatch.setattr(lib, "cuda_versions", versions)
    assert compat_kernels.cudnn_version() == found


def test_xla_metadata_is_in_the_compiled_program():
    def function(x):
        with compat.set_xla_metadata(_xla_gpu_collective_stream="p2p"):
            return jnp.cos(x)

    assert '_xla_gpu_collective_stream="p2p"' in jax.jit(function).lower(1.0).as_text("hlo")


@pytest.mark.parametrize("function", [lambda x: jnp.sin(x), lambda x: jnp.roll(x, 1)], ids=["", "jitted by jax"])
def test_an_equation_that_is_evaluated_again_keeps_its_line(function):
    x, line = jnp.ones(4), function.__code__.co_firstlineno
    (eqn,) = jax.make_jaxpr(function)(x).eqns

    def again(x, keep):
        with compat.traced_where(eqn) if keep else contextlib.nullcontext():
            if "jaxpr" not in eqn.params:
                return eqn.primitive.bind(x, **eqn.params)
            inner = eqn.params["jaxpr"].jaxpr
            values = {inner.invars[0]: x}
            for one in inner.eqns:
                with compat.traced_where(one):
                    values[one.outvars[0]] = one.primitive.bind(*(values[var] for var in one.invars), **one.params)
            return values[inner.outvars[0]]

    for keep in (True, False):
        text = jax.jit(again, static_argnums=1).lower(x, keep).as_text(debug_info=True)
        assert (f'test_compat.py":{line}:' in text) == keep


def test_a_literal_in_a_jaxpr_is_recognised():
    jaxpr = jax.make_jaxpr(lambda x: x * 2.0)(1.0).jaxpr
    assert [isinstance(v, compat.Literal) for v in jaxpr.eqns[0].invars] == [False, True]
    assert jaxpr.eqns[0].invars[1].val == 2.0


@pytest.mark.parametrize(("flags", "code"), [("", 0), ("--xla_no_such_flag=1", 1)])
def test_a_new_cpu_client_reads_xla_flags(flags, code):
    environment = os.environ | {"XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-c", compat.MAKE_CPU_CLIENT], env=environment, capture_output=True, text=True
    )
    assert bool(done.returncode) == bool(code), done.stderr
    assert ("xla_no_such_flag" in done.stderr) == bool(code)  # it fails for the flag, and for nothing else


def test_experimental_modules_have_the_functions_used():
    assert callable(compat.topologies.get_topology_desc)
    assert np.ravel(compat.multihost_utils.process_allgather(np.int32(3))).tolist() == [3]
    assert compat.PLUGIN_LOGGER in logging.root.manager.loggerDict


@pytest.mark.parametrize(("version", "broken"), [("0.10.2", False), ("0.11.0", True), ("0.11.2", False)])
def test_the_jaxlib_with_wrong_host_offload_is_detected(version, broken, monkeypatch):
    monkeypatch.setattr(compat.jaxlib, "__version__", version)
    assert compat.broken_host_offload() == broken


def test_devices_start_with_the_first_array():
    code = """
from megajax.runtime.compat import devices_started
import jax
before = devices_started()
jax.numpy.zeros(1)
print(before, devices_started())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_a_compilation_for_several_processes_is_reported(monkeypatch):
    """Before its first execution, with the processes of its devices; a program of one process is not reported."""
    calls = []
    monkeypatch.setattr(compat.compiler, "compile_or_get_cached", compat.compiler.compile_or_get_cached)
    compat.call_after_compilation(lambda name, processes: calls.append((name, processes)))
    compile_or_get_cached, seen = compat.compiler.compile_or_get_cached, []

    def in_two_processes(backend, computation, devices, *others, **settings):
        seen.append(computation)
        return compile_or_get_cached(backend, computation, devices, *others, **settings)

    monkeypatch.setattr(compat.compiler, "compile_or_get_cached", in_two_processes)
    jax.jit(lambda x: x + 41)(np.ones(3))
    assert len(seen) == 1 and calls == []
    monkeypatch.setattr(compat.compiler, "compile_or_get_cached", lambda *arguments: "executable")
    compat.call_after_compilation(lambda name, processes: calls.append((name, processes)))
    devices = np.array([[types.SimpleNamespace(process_index=index) for index in (2, 0)]])
    assert compat.compiler.compile_or_get_cached(None, seen[0], devices) == "executable"
    assert [processes for _, processes in calls] == [[0, 2]] and calls[0][0].startswith("jit")


def test_the_coordination_service_can_be_started_by_others(monkeypatch):
    """`jax.distributed.initialize` of process 0 calls the given function in place of jaxlib's."""
    module, function = compat.COORDINATION_SERVICE
    assert callable(getattr(importlib.import_module(module), function))
    started = []

    def start_service(address, processes, **settings):
        started.append((address, processes, settings["heartbeat_timeout"]))
        raise RuntimeError("started")

    monkeypatch.setattr(compat.xla_bridge, "backends_are_initialized", lambda: False)
    with pytest.raises(RuntimeError, match="started"):
        settings = {"heartbeat_timeout_seconds": 7, "cluster_detection_method": "deactivate"}
        compat.initialize_distributed(start_service, None, "127.0.0.1:1", 2, 0, **settings)
    assert started == [("[::]:1", 2, 7)]


def test_the_address_of_the_coordination_service_can_be_found_by_others(monkeypatch):
    """`jax.distributed.initialize` connects to the address that the given function returns."""
    asked, made = [], []

    def find_service(address, process):
        asked.append((address, process))
        return "127.0.0.1:9"

    def make_client(address, process, **settings):
        made.append((address, process))
        raise RuntimeError("no client")

    monkeypatch.setattr(compat.xla_bridge, "backends_are_initialized", lambda: False)
    assert callable(getattr(compat.distributed._jax, compat.COORDINATION_CLIENT))
    monkeypatch.setattr(compat.distributed._jax, compat.COORDINATION_CLIENT, make_client)
    with monkeypatch.context() as state:
        for name in ("process_id", "num_processes", "coordinator_address"):
            state.setattr(compat.distributed.global_state, name, getattr(compat.distributed.global_state, name))
        with pytest.raises(RuntimeError, match="no client"):
            settings = {"cluster_detection_method": "deactivate"}
            compat.initialize_distributed(None, find_service, "127.0.0.1:1", 2, 1, **settings)
    assert asked == [("127.0.0.1:1", 1)] and made == [("127.0.0.1:9", 1)]
