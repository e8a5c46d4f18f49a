"""A step that is compiled twice: which programs are compiled, what they compute, and that XLA reads the profile."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate.gpus import find_gpu
from megajax.plan.compiler import compile_for, has_compiler
from megajax.runtime.compat import jaxlib_version
from megajax.train import two_passes
from tests import small


def test_each_set_of_shapes_is_compiled_twice_and_computes_the_same():
    seen = []
    program = two_passes.TwoPasses(jax.jit(lambda x, y: x @ y["w"]), lambda text: seen.append(text) or b"")
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for rows in (2, 1, 2):
        np.testing.assert_allclose(program(x[:rows], {"w": jnp.ones((3, 4))}), x[:rows] @ np.ones((3, 4)))
    assert len(seen) == 2 and all("HloModule" in text for text in seen)
    program.lower(jax.ShapeDtypeStruct((5, 3), np.float32), {"w": jnp.ones((3, 4))}).compile()
    assert len(seen) == 3


def test_cpu_devices_are_compiled_for_once():
    run = small.make_run(latency_estimates="roofline")
    step = jax.jit(lambda x: x)
    assert two_passes.with_latencies(step, run, jax.devices("cpu")[0]) is step


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler() or jaxlib_version() < (0, 12), reason="needs XLA's CUDA compiler, jaxlib 0.12")
def test_xla_schedules_with_the_profile():
    """With it a step has the same matmuls, in another order."""
    parallel = ParallelConfig(tensor=4, pipe=2, schedule="eager_1f1b", attention="xla")
    model = dataclasses.replace(preset("gpt3-13b"), layers=4)
    run = RunConfig(model, parallel, TrainConfig(global_batch_size=16))
    texts = [
        compile_for(dataclasses.replace(run, parallel=dataclasses.replace(parallel, latency_estimates=name)), gpu)[
            "hlo"
        ]
        for gpu in [find_gpu("h100-80gb")]
        for name in ("xla", "roofline")
    ]
    matmuls = [[line.split(" = ")[0] for line in text.splitlines() if "__cublas" in line] for text in texts]
    assert sorted(matmuls[0]) == sorted(matmuls[1]) and matmuls[0] != matmuls[1]
