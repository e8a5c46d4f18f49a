import os
import subprocess
import sys

import pytest

from megajax.config import ConfigError, ParallelConfig
from megajax.runtime import xla_flags


def test_the_installed_jaxlib_knows_every_flag():
    assert xla_flags.unknown_flags([*xla_flags.CPU_FLAGS, *xla_flags.GPU_FLAGS]) == ()


def test_jax_computes_with_every_flag():
    flags = " ".join([*xla_flags.CPU_FLAGS, *xla_flags.GPU_FLAGS])
    words = [sys.executable, "-c", "import jax.numpy as jnp; print(int(jnp.arange(5).sum()))"]
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "10\n", done.stderr


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("xla_gpu_executable_terminate_timeout", True),
        ("xla_gpu_executable_terminate_timeout_seconds", False),  # that is its name in XLA's sources
        ("xla_gpu_executable_warn_stuck_timeout", True),
        ("xla_gpu_first_collective_call_terminate_timeout_seconds", True),
        ("xla_gpu_first_collective_call_warn_stuck_timeout_seconds", True),
        ("xla_gpu_first_collective_call_terminate_timeout", False),
    ],
)
def test_the_names_of_the_limits_in_this_jaxlib(name, known):
    """They are those of jaxlib 0.10.2 and of 0.12.0.1."""
    assert (xla_flags.unknown_flags([f"--{name}=600"]) == ()) == known
    assert known == any(flag.startswith(f"--{name}=") for flag in xla_flags.GPU_FLAGS)


def test_a_gpu_is_waited_for_as_long_as_a_cpu_device():
    seconds = {flag.partition("=")[0]: int(flag.partition("=")[2]) for flag in xla_flags.GPU_TIMEOUTS}
    for name, value in seconds.items():
        assert value == (600 if "terminate" in name else 300)
    for value in (600, 300):
        assert any(flag.endswith(f"seconds={value}") for flag in xla_flags.CPU_FLAGS)


@pytest.mark.parametrize("name", ["collective_permute_connected_components", "collective_multi_streaming", "ragged"])
def test_what_others_saw_hang_is_left_off(name):
    assert not [flag for flag in xla_flags.GPU_FLAGS if name in flag]


@pytest.mark.parametrize(
    ("tensor", "zero", "users", "expected"),
    [
        (1, 1, "", 4), (2, 1, "", 1), (2, 3, "", 4), (8, 1, "", 4),
        (8, 1, "--xla_gpu_experimental_parallel_collective_overlap_limit=2", None),
    ],
)  # fmt: skip
def test_collectives_in_flight(monkeypatch, tensor, zero, users, expected):
    monkeypatch.setattr(xla_flags, "updates_in_place", lambda device: True)
    monkeypatch.setenv("XLA_FLAGS", users)
    found = xla_flags.step_options(ParallelConfig(tensor=tensor, zero=zero), None)
    assert found.get("xla_gpu_experimental_parallel_collective_overlap_limit") == expected


def test_one_exchange_with_experts_is_in_flight_where_xla_knows_its_time():
    parallel = ParallelConfig(data=8, expert=8)
    assert (xla_flags.collectives_in_flight(parallel), xla_flags.collectives_in_flight(parallel, True)) == (4, 1)


def test_a_flag_unknown_to_jaxlib_is_detected_in_a_child_process(monkeypatch):
    flags = ["--xla_gpu_of_old=1", xla_flags.GPU_FLAGS[0], "--xla_gpu_of_tomorrow=2"]
    assert xla_flags.unknown_flags(flags) == ("--xla_gpu_of_old=1", "--xla_gpu_of_tomorrow=2")
    monkeypatch.setattr(xla_flags, "GPU_FLAGS", tuple(flags))
    monkeypatch.setenv("XLA_FLAGS", "")
    assert xla_flags.add_gpu_flags() == ("--xla_gpu_of_old=1", "--xla_gpu_of_tomorrow=2")
    assert xla_flags.os.environ["XLA_FLAGS"] == flags[1]


def test_the_users_flags_are_kept(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler=false")
    assert xla_flags.add_gpu_flags() == ()
    words = xla_flags.os.environ["XLA_FLAGS"].split()
    assert words == ["--xla_gpu_enable_latency_hiding_scheduler=false", *xla_flags.GPU_FLAGS[1:]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--xla_gpu_misspelt=1", "XLA_FLAGS has --xla_gpu_misspelt=1, which the installed jaxlib does not know"),
        ("--xla_gpu_enable_latency_hiding_scheduler=maybe", "XLA cannot read XLA_FLAGS = .*maybe"),
    ],
)
def test_a_wrong_flag_of_the_users_is_one_clear_line(monkeypatch, flags, message):
    monkeypatch.setenv("XLA_FLAGS", flags)
    with pytest.raises(ConfigError, match=message) as error:
        xla_flags.add_gpu_flags()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("value", "refused"), [("=true", True), ("", True), ("=1", True), ("=false", False)])
def test_a_flag_that_breaks_rings_is_refused(monkeypatch, value, refused):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_enable_pipelined_p2p{value}")
    if refused:
        with pytest.raises(ConfigError, match="loses data sent around several rings .*openxla/xla#45222"):
            xla_flags.check_ring_flags("context")
    else:
        xla_flags.check_ring_flags("context")
