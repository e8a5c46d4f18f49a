"""Saves in object stores whose requests are delayed, refused, cut and lost: complete and equal, or no checkpoint."""

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
