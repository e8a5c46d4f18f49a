"""One flipped bit in one replica is found at the next check, and its device named."""

import socket

import jax
import numpy as np
import pytest

from megajax.checkpoint import layout
from megajax.checkpoint.directory import complete_steps
from megajax.runtime.distributed import EXIT_PEER
from megajax.train.replica_check import Checks, ReplicaCheck, ReplicasDiffer, checksum
from tests import small
from tests.runtime.test_distributed import free_port
from tests.train import runs
from tests.train.front_door import Run

KERNEL = "params/blocks/attention/qkv/kernel"


def flip(state, name: str, device: jax.Device, element: int = 3, bit: int = 7):
    """The state with one bit of one element changed in one device's copy of an array."""

    def change(path, leaf):
        if layout.name_of(path) != name:
            return leaf
        buffers = []
        for shard in leaf.addressable_shards:
            data = np.array(shard.data)
            if shard.device == device:
                bits = data.reshape(-1).view(np.uint32)
                bits[element % bits.size] ^= np.uint32(1 << bit)
            buffers.append(jax.device_put(data, shard.device))
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, buffers)

    return jax.tree_util.tree_map_with_path(change, state)


@pytest.fixture(scope="module")
def training():
    """Four replicas of two tensor ranks."""
    return small.training_of(runs.make_run((4, 1, 2)))


@pytest.fixture(scope="module")
def checked(training):
    return ReplicaCheck(training.state_layout), small.random_state(training)


def test_equal_copies_pass(checked):
    check, state = checked
    assert check.differences(state) == []
    assert check.coverage.compared == check.coverage.total  # ZeRO-0: everything has four copies


@pytest.mark.parametrize("bit", [0, 31])
@pytest.mark.parametrize("name", [KERNEL, "optimizer_state/nu/shared/head/norm/scale", "optimizer_state/samples"])
def test_the_device_with_another_bit_is_named(checked, training, name, bit):
    check, state = checked
    device = training.mesh.devices[2, 0, 1]
    (found,) = check.differences(flip(state, name, device, bit=bit))
    assert (found.name, found.suspects, found.majority) == (name, (device,), True)
    with pytest.raises(ReplicasDiffer, match=f"{name}: device {device.id} .*of process 0 on .* differs from the other"):
        check.check(flip(state, name, device, bit=bit), step=5)


@pytest.mark.slow
def test_of_two_replicas_both_are_named():
    training = small.training_of(runs.make_run((2, 2, 1)))
    state, devices = training.init_state(), training.mesh.devices
    (found,) = ReplicaCheck(training.state_layout).differences(flip(state, KERNEL, devices[1, 0, 0]))
    assert (found.suspects, found.majority) == ((devices[0, 0, 0], devices[1, 0, 0]), False)


@pytest.mark.slow
def test_with_zero_1_the_arrays_that_are_replicated_are_compared():
    """Shared parameters are replicated over pipe; blocks are sharded over data and have no copies."""
    training = small.training_of(runs.make_run((2, 4, 1), zero=1))
    state, check = training.init_state(), ReplicaCheck(training.state_layout)
    name = next(name for name in check.names if name.startswith("params/shared/"))
    device = training.mesh.devices[0, 3, 0]
    (found,) = check.differences(flip(state, name, device))
    assert found.name == name and found.suspects == (device,)
    assert 0 < check.coverage.compared < check.coverage.total
    assert KERNEL not in check.names and check.differences(flip(state, KERNEL, device)) == []


def test_the_checksum_depends_on_bits_and_positions():
    values = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    expected = int(jax.jit(checksum)(values))
    bits = values.reshape(-1).view(np.uint32).astype(object)
    position = np.arange(bits.size, dtype=np.uint32)
    weight = (position ^ (position >> 16)) * np.uint32(0x85EBCA6B)
    weight = (weight ^ (weight >> 13)) * np.uint32(0xC2B2AE35)
    weight = ((weight ^ (weight >> 16)) | np.uint32(1)).astype(object)
    assert expected == sum(bits * weight) % 2**32
    swapped = values.copy()
    swapped[0, 0], swapped[3, 2] = values[3, 2], values[0, 0]
    assert int(checksum(swapped)) != expected
    for index in range(values.size):
        for bit in (0, 13, 31):
            other = values.copy()
            other.reshape(-1).view(np.uint32)[index] ^= np.uint32(1 << bit)
            assert int(jax.jit(checksum)(other)) != expected


class FlipsABit:
    """A training in which one device's copy of a weight changes after a step."""

    def __init__(self, training, step: int, device):
        self._training, self._step, self._device, self._taken = training, step, device, 0

    def __getattr__(self, name):
        return getattr(self._training, name)

    def train_step(self, state, batch, *hold):
        state, metrics = self._training.train_step(state, batch, *hold)
        self._taken += 1
        return flip(state, KERNEL, self._device) if self._taken == self._step else state, metrics


@pytest.mark.slow
@pytest.mark.parametrize(("save_every", "found", "saved"), [(1000, 8, []), (2, 6, [2, 4])])
def test_a_run_ends_at_the_next_check_and_saves_no_corrupt_state(training, tmp_path, save_every, found, saved):
    """The bit changes after step 6; checks are every four steps, and before each save."""
    device = training.mesh.devices[3, 0, 0]
    with pytest.raises(ReplicasDiffer, match=f"step {found}: silent data corruption: {KERNEL}.*: device {device.id} "):
        runs.go(
            training.run,
            tmp_path,
            training=FlipsABit(training, 6, device),
            save_every=save_every,
            checks=Checks(4, training.state_layout),
        )
    assert complete_steps(tmp_path / "checkpoints") == saved


FLIP = """
import sys

import jax
import numpy as np
from megajax.train.step import Training

usual, taken = Training.train_step, []

def train_step(self, state, batch, *hold):
    state, metrics = usual(self, state, batch, *hold)
    taken.append(1)
    if len(taken) == 6:
        norm = state.params["shared"]["head"]["norm"]
        scale = np.array(norm["scale"].addressable_data(0))
        scale.view(np.uint32)[2] ^= 1
        buffer = jax.device_put(scale, jax.local_devices()[0])
        norm["scale"] = jax.make_array_from_single_device_arrays(scale.shape, norm["scale"].sharding, [buffer])
    return state, metrics

if sys.argv[sys.argv.index("--process-id") + 1] == "1":  # all processes have the same options
    Training.train_step = train_step
"""


@pytest.mark.slow
def test_the_process_and_its_host_are_named_and_no_state_after_the_last_check_is_left(tmp_path):
    """Three processes; a bit changes in the second one's weights after step 6, and the checks are every four steps."""
    (tmp_path / "flip.py").write_text(FLIP)
    words = f"--data 3 --global-batch-size 6 --devices cpu:1 --processes 3 --coordinator 127.0.0.1:{free_port()}"
    words += f" --steps 1000 --check-every 4 --save-every 3 --run-dir {tmp_path}/run --import {tmp_path}/flip.py"
    found = [Run(tmp_path, f"{words} --process-id {number}", name=f"process_{number}") for number in range(3)]
    assert [run.wait(600) for run in found] == [EXIT_PEER] * 3, [run.err for run in found]
    error = "\n".join(run.err for run in found)
    assert "step 6: silent data corruption: params/shared/head/norm/scale: device " in error
    assert f" of process 1 on {socket.gethostname()} differs from the other copies" in error
    assert "of process 0 on" not in error and "Traceback" not in error
    assert "check     every 4 steps: copies on different devices are compared: 100.0% of the state" in found[0].out
    assert complete_steps(tmp_path / "run" / "checkpoints") == [3]
