"""One of two processes: sums over both with a program that process 1 compiles for 40 s. Arguments: port, process."""

import sys
import time

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)

import jax.numpy as jnp  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from megajax.config import LaunchConfig  # noqa: E402
from megajax.runtime import distributed  # noqa: E402

port, process = map(int, sys.argv[1:])
distributed.start(LaunchConfig(coordinator=f"127.0.0.1:{port}", processes=2, process_id=process))
if process == 1:
    from jax._src import compiler

    original = compiler.backend_compile_and_load

    def late(*arguments, **settings):
        time.sleep(20)  # of two programs, one after the other
        return original(*arguments, **settings)

    compiler.backend_compile_and_load = late

mesh = jax.make_mesh((2,), ("data",))
one = jax.make_array_from_callback(
    (2,), NamedSharding(mesh, P("data")), lambda index: jnp.ones(1) * (1 + index[0].start)
)
total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))(one)
again = multihost_utils.process_allgather(one, tiled=True)
print("sums", float(total), float(again.sum()), flush=True)
