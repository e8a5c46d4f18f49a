"""Every test runs on eight CPU devices that share the machine's cores. Set before jax is imported."""

import gc
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"  # no test downloads
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + " --xla_backend_optimization_level=0"  # LLVM's part alone: the same program, compiled in half the time
    + " --xla_cpu_collective_call_terminate_timeout_seconds=600"  # a device can be late when cores are few
    + " --xla_cpu_collective_call_warn_stuck_timeout_seconds=300"
    + " --xla_cpu_enable_concurrency_optimized_scheduler=false"  # see megajax/runtime/xla_flags.py
)
gc.set_threshold(
    20_000, 50, 100
)  # jax keeps what it traced: each collection of all objects takes a second of a long run
os.environ["PJRT_NPROC"] = str(8 + os.cpu_count())  # threads, as megajax/runtime/mesh.py requests

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

from tests.disk import small_disk  # noqa: E402, F401 (a fixture of all tests)

# Compilation makes the first example slow; the same examples every time, so that a failure is everyone's.
settings.register_profile("megajax", deadline=None, derandomize=True)
settings.load_profile("megajax")


def pytest_runtest_setup(item):
    if item.get_closest_marker("compiler") is None:
        return
    from megajax.plan.compiler import has_compiler  # imported here: most tests need none of it

    if not has_compiler():
        pytest.skip("XLA's CUDA compiler is not installed: pip install -e '.[dryrun]'")


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Programs that several tests compile, in this process or in processes that they start, are compiled once.

    Each pytest worker has a cache of its own: jax does not write entries atomically.
    """
    directory = str(tmp_path_factory.mktemp("compilation_cache"))
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", directory)
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
        patch.setenv("XDG_STATE_HOME", directory)  # the account's key, see megajax/config/trust.py
        yield


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    """Starts jax before the first test, which might start it with fewer devices (`--devices cpu:1`)."""
    assert jax.device_count() == 8
