"""The stash in host memory: results are bit-identical, and compiled for GPUs no part of it is in device memory."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from megajax.config import ConfigError
from megajax.pipeline.device_checks import check_devices
from megajax.pipeline.options import merged_schedule
from megajax.pipeline.program import StepProgram
from megajax.pipeline.slots import slot_tables
from megajax.runtime import compat
from megajax.schedules.registry import make_schedule
from tests import gpu, small


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved_1f1b", 2), ("1f1b", 1), ("zb_h1", 1)])
def test_results_are_bit_identical(schedule, chunks):
    results = []
    for offload in (False, True):
        run = small.make_run((2, 2, 2), schedule=schedule, chunks=chunks, microbatches=4, offload_activations=offload)
        training = small.training_of(run)
        params = small.place(training, small.busy_params(small.MODEL))
        results.append(training.loss_and_gradients(params, small.make_batch(run)))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), *results)


@pytest.mark.slow
@pytest.mark.compiler
def test_compiled_for_h100s_the_whole_stash_is_in_host_memory():
    """XLA prints the host's memory space as S(5). The arrays whose first axis is the stash's slots are the stash."""
    layout = {"pipe": 2, "tensor": 2, "chunks": 2, "attention": "xla"}
    model = dataclasses.replace(gpu.LARGE, layers=4)
    text, _ = gpu.compile_step(model, 4, offload_activations=True, **layout)
    schedule = make_schedule("interleaved_1f1b", stages=2, microbatches=4, chunks=2)
    runs = merged_schedule(schedule) if compat.jaxlib_version() >= (0, 12) else schedule
    slots = slot_tables(runs).stash_slots
    found = set(re.findall(rf"\bbf16(\[{slots},1,1,[\d,]*\])(\{{.*?\}})", text))
    assert len({shape for shape, _ in found}) == 4  # qkv, context, up; input and residual have the same
    assert all(layout.endswith(":S(5)}") for _, layout in found)


def test_unsupported_devices_and_schedules_are_refused():
    class Device:
        device_kind = "toaster"

        def addressable_memories(self):
            return [type("Memory", (), {"kind": "device"})]

    run = small.make_run(offload_activations=True)
    with pytest.raises(ConfigError, match="offload_activations = True, but toaster has no memory called pinned_host"):
        check_devices(StepProgram.of(run), Device())
    run = small.make_run((1, 2, 1), schedule="pipedream_2bw", offload_activations=True)
    with pytest.raises(ConfigError, match="offload_activations = True is not supported with schedule = pipedream_2bw"):
        check_devices(StepProgram.of(run), jax.devices()[0])


def test_the_jaxlib_that_computes_wrong_gradients_is_refused(monkeypatch):
    """openxla/xla#46231: jaxlib 0.11.0, on GPUs."""

    class Device:
        platform, device_kind = "gpu", "NVIDIA H100"

        def addressable_memories(self):
            return []

    run = small.make_run(offload_activations=True)
    check_devices(StepProgram.of(run), Device())
    monkeypatch.setattr(compat.jaxlib, "__version__", "0.11.0")
    with pytest.raises(ConfigError, match="wrong gradients on GPUs with jaxlib 0.11.0.*omit --offload-activations"):
        check_devices(StepProgram.of(run), Device())
