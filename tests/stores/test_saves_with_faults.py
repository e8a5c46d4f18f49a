"""Saves in object stores whose requests are delayed, refused, cut and lost: complete and equal, or no checkpoint."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint import checksums
from megajax.checkpoint.directory import NAME, complete_steps
from megajax.checkpoint.object_store import place
from megajax.checkpoint.store_drivers import _s3_settings, orbax_path
from megajax.checkpoint.store_lock import StoreLock
from megajax.checkpoint.writer import write
from tests.stores.servers import FAULTS, Store, environment_of, missing, no_fault, random_faults

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(missing()), reason=f"not installed: {missing()}: pip install 'megajax[stores,store_servers]'"
    ),
]
SAVES = 4


@pytest.fixture(scope="module", params=("s3", "gs"))
def store(request):
    found = Store(request.param)
    with environment_of(found.environment):
        _s3_settings.cache_clear()  # the endpoint of another store
        yield found
    found.close()


def state(step: int) -> dict:
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    where = {"kernel": P("a", "b"), "bias": P("b"), "count": P()}
    values = {
        "kernel": jnp.arange(4096.0).reshape(64, 64) + step,
        "bias": jnp.ones(64) * step,
        "count": jnp.int32(step),
    }
    return {"params": {name: jax.device_put(value, NamedSharding(mesh, where[name])) for name, value in values.items()}}


KINDS = {kind: (kind,) for kind in FAULTS} | {"all": FAULTS}


@pytest.mark.parametrize("name", KINDS)
def test_a_save_is_whole_and_equal_or_no_checkpoint(store, name):
    kinds = KINDS[name]
    directory = place(f"{store.scheme}://bucket/saves/{name.replace(' ', '_')}") / "checkpoints"
    store.proxy.counts.clear()
    store.proxy.fault = random_faults(kinds, 0.12, seed=len(kinds[0]))
    failed = []
    lock = StoreLock(directory.parent)
    for step in range(1, SAVES + 1):
        try:
            write(
                directory / NAME.format(step),
                state(step),
                {"step": step},
                f"save/{directory}/{step}",
                guard=lock.require,
            )
        except Exception as error:
            failed.append((step, type(error).__name__))
    lock.release()
    store.proxy.fault = no_fault
    steps = complete_steps(directory)
    print(store.scheme, name, "complete", steps, "failed", failed, dict(store.proxy.counts))
    assert steps == [step for step in range(1, SAVES + 1) if step not in dict(failed)] and len(steps) >= SAVES - 2
    for step in steps:
        path = directory / NAME.format(step)
        assert checksums.problems(path) == []
        back = ocp.PyTreeCheckpointHandler().restore(orbax_path(path / "state"))
        jax.tree.map(np.testing.assert_array_equal, back, jax.tree.map(np.asarray, state(step)))


CUT_UPLOADS = """
import gc
from etils import epath
from megajax.checkpoint.object_store import place
from megajax.checkpoint.store_drivers import orbax_path
failed = 0
folder = epath.Path(orbax_path(place("{folder}")))
for number in range(20):
    try:
        (folder / f"{{number}}").write_text("x" * 20000)
    except OSError:
        failed += 1
    gc.collect()
assert failed < 10, failed
"""


def test_no_process_dies_in_an_upload_that_is_cut(store):
    """With gcsfs's own files Python 3.12.1 dies by signal 11 in a collection: python/cpython#111049."""
    store.proxy.fault = random_faults(("drop", "half", "lost answer"), 0.4, seed=3)
    script = CUT_UPLOADS.format(folder=f"{store.scheme}://bucket/cut")
    environment = os.environ | store.environment | {"AWS_MAX_ATTEMPTS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=500)
    store.proxy.fault = no_fault
    assert done.returncode == 0, done.stderr
