"""The stash in the host's memory: the same numbers, and a device's memory without it."""

import jax
import numpy as np
import pytest

from megajax.config import ConfigError
from megajax.cost.memory import bytes_per_device
from megajax.train.operations import check_offload
from tests import gpu, small


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("interleaved_1f1b", 2), ("1f1b", 1), pytest.param("zb_h1", 1, marks=pytest.mark.slow)]
)
def test_not_a_bit_changes(schedule, chunks):
    results = []
    for offload in ("none", "stash"):
        run = small.make_run((2, 2, 2), schedule=schedule, chunks=chunks, microbatches=4, offload=offload)
        training = small.training_of(run)
        params = small.place(training, small.busy_params(small.MODEL))
        results.append(training.loss_and_gradients(params, small.make_batch(run)))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), *results)


@gpu.needs_compiler
def test_compiled_for_h100s_the_stash_takes_no_memory_of_the_device():
    layout = {"pipe": 4, "tensor": 2, "attention": "xla"}
    run = gpu.run_of(gpu.LARGE_DEEP, 8, **layout)
    stash = bytes_per_device(run)["stash"]
    _, here = gpu.compile_step(gpu.LARGE_DEEP, 8, **layout)
    text, there = gpu.compile_step(gpu.LARGE_DEEP, 8, offload="stash", **layout)
    assert here - there > 0.95 * stash
    assert "S(5)" in text  # XLA's number for the host's memory


def test_where_it_cannot_be_is_one_line():
    class Device:
        device_kind = "toaster"

        def addressable_memories(self):
            return [type("Memory", (), {"kind": "device"})]

    run = small.make_run(offload="stash")
    with pytest.raises(ConfigError, match="offload = stash, but toaster has no memory called pinned_host"):
        check_offload(run, Device())
    run = small.make_run((1, 2, 1), schedule="pipedream_2bw", offload="stash")
    with pytest.raises(ConfigError, match="offload = stash cannot be had with schedule = pipedream_2bw"):
        check_offload(run, jax.devices()[0])
