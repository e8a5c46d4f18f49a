import dataclasses
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from megajax.config import ConfigError, ParallelConfig
from megajax.config.parallel import MESH_AXES as AXES
from megajax.runtime.mesh import choose_devices, make_mesh, start_devices
from megajax.runtime.xla_flags import CPU_FLAGS, cpu_flags

VARIABLES = ("XLA_FLAGS", "JAX_PLATFORMS", "PJRT_NPROC")


def in_a_new_process(program: str, **environment: str) -> list[str]:
    """The words that `program` prints last, in a process where jax has not started and no variable is set for it."""
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", program], env=inherited | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


START = """
import os, jax
from megajax.runtime.mesh import start_devices, choose_devices
from megajax.config import ConfigError
def show(devices):
    print(os.environ.get("PJRT_NPROC"), len(devices), devices[0].platform, jax.device_count(), os.environ["XLA_FLAGS"])
"""


def test_cpu_devices_are_made_with_their_flags():
    words = in_a_new_process(START + "show(start_devices('cpu:8'))")
    assert words == [str(8 + os.cpu_count()), "8", "cpu", "8", *cpu_flags(8)]


def test_a_matmul_has_one_thread_where_devices_take_all_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    one_thread = "--xla_cpu_multi_thread_eigen=false"
    assert [one_thread in cpu_flags(count) for count in (1, 3, 4, 8)] == [False, False, True, True]


def test_the_users_number_of_threads_is_kept():
    """Otherwise there is one for each device and each core, as above."""
    program = START + "start_devices('cpu:8'); print(os.environ['PJRT_NPROC'])"
    assert in_a_new_process(program, PJRT_NPROC="30") == ["30"]


def test_the_users_xla_flags_are_kept():
    flag = CPU_FLAGS[0].replace("600", "77")
    device_flag = "--xla_force_host_platform_device_count=8"
    words = in_a_new_process(START + "show(start_devices('cpu'))", XLA_FLAGS=f"{device_flag} {flag}")
    assert words[1:] == ["1", "cpu", "1", device_flag, flag, *cpu_flags(1)[1:]]


def test_without_a_gpu_the_default_is_the_requested_number_of_cpu_devices():
    words = in_a_new_process(START + "show(choose_devices(None, 3))", CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cpu")
    assert words[1:4] == ["3", "cpu", "3"]


def test_more_devices_after_jax_has_started_are_refused():
    late = "jax.devices()\ntry: start_devices('cpu:8')\nexcept ConfigError as error: print(error)"
    message = " ".join(in_a_new_process(START + late, JAX_PLATFORMS="cpu"))
    assert "already started with 1 CPU device(s)" in message and "start_devices('cpu:8')" in message
    assert "--xla_force_host_platform_device_count=8" in message


def test_existing_devices_are_used():
    assert start_devices("cpu:8") == jax.devices()
    assert start_devices("cpu:2") == jax.devices()[:2]
    assert choose_devices("cpu:8", 4) == jax.devices()[:4]
    assert choose_devices(None, 8) == jax.devices()


@pytest.mark.parametrize("spec", ["", "cpu:", "cpu:0", "cpu:-1", "cpu:two", "gpu:2", "tpu", "8"])
def test_an_unknown_device_spec_names_the_legal_ones(spec):
    with pytest.raises(ConfigError, match="--devices gpu, --devices cpu or --devices cpu:8") as error:
        start_devices(spec)
    assert repr(spec) in str(error.value)


def test_a_missing_gpu_suggests_cpu_devices():
    with pytest.raises(ConfigError, match="no GPU: pass --devices cpu:8 .*unset JAX_PLATFORMS"):
        start_devices("gpu")


def test_too_few_devices_are_refused():
    for refused in (lambda: choose_devices("cpu:8", 16), lambda: make_mesh(ParallelConfig(pipe=4, tensor=4))):
        with pytest.raises(ConfigError, match="= 16 devices, but there are 8: lower --data.*--devices cpu:16"):
            refused()


def test_tensor_neighbours_are_consecutive_devices():
    mesh = make_mesh(ParallelConfig(data=2, pipe=2, tensor=2))
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    np.testing.assert_array_equal(ids, np.arange(8).reshape(2, 2, 2))
    assert mesh.axis_types == (AxisType.Auto,) * 3


@given(
    sizes=st.sampled_from([(1, 1, 1), (2, 2, 2), (1, 2, 4), (4, 1, 2), (1, 8, 1), (3, 2, 1)]),
    order=st.permutations(AXES),
)
def test_axis_order_says_which_axis_varies_slowest(sizes, order):
    shape = dict(zip(AXES, sizes, strict=True))
    mesh = make_mesh(ParallelConfig(**shape, axis_order=tuple(order)))
    assert mesh.axis_names == AXES and dict(mesh.shape) == shape
    for index, device in np.ndenumerate(mesh.devices):
        place = dict(zip(AXES, index, strict=True))
        expected = 0
        for axis in order:
            expected = expected * shape[axis] + place[axis]
        assert device == jax.devices()[expected]


@pytest.mark.parametrize("sizes", [{"data": 4}, {"data": 2, "context": 2, "axis_order": ("pipe", "tensor", "data")}])
def test_replicas_that_split_the_experts_are_neighbours_on_the_data_axis(sizes):
    """The same devices in the same order as without `expert`."""
    parallel = ParallelConfig(pipe=2, expert=2, **sizes)
    mesh, whole = make_mesh(parallel), make_mesh(dataclasses.replace(parallel, expert=1))
    assert mesh.axis_names == ("data", "expert", "pipe", "tensor") and mesh.devices.shape == (2, 2, 2, 1)
    assert mesh.devices.reshape(4, 2, 1).tolist() == whole.devices.tolist()
