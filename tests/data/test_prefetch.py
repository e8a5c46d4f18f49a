"""Batches on devices: the same tokens on every mesh and after every resume; each process reads its own samples."""

import json
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.config import ConfigError, DataConfig
from megajax.data.blending import Blend
from megajax.data.indexed import IndexedWriter
from megajax.data.loader import Boundaries, Loader
from megajax.data.prefetch import Prefetch, place_batch
from megajax.data.source import make_samples
from megajax.data.tokenizers import load_tokenizer

STEPS, BATCH, LENGTH = 50, 8, 5


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """A blend of two datasets, several epochs in 50 steps."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.RandomState(0)
    for name in "ab":
        with IndexedWriter(folder / name, np.uint16) as writer:
            for length in random.randint(0, 20, 40):
                writer.add_document(random.randint(0, 1000, length))
    return Blend.parse(["0.7", str(folder / "a"), "0.3", str(folder / "b")]).samples((0, 1), STEPS * BATCH, LENGTH, 7)


def on(devices: int, copies: int = 1) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()[: devices * copies]).reshape(devices, copies), ("data", "pipe"))
    return NamedSharding(mesh, P(None, "data"))


def rows(batch) -> dict[str, list]:
    """A batch as rows in the order of the run, for any number of microbatches."""
    batch = {name: np.asarray(array) for name, array in batch.items()}
    return {name: array.reshape(-1, *array.shape[2:]).tolist() for name, array in batch.items()}


def test_resuming_at_every_step_on_another_mesh_sees_the_same_tokens(samples):
    """The uninterrupted run is on one device; after each of its 50 steps, a run on another mesh resumes there."""
    with Prefetch(Loader(samples, BATCH, 1), on(1)) as run:
        whole = [rows(run.batch(step * BATCH)) for step in range(STEPS)]
    assert len({tuple(row) for batch in whole for row in batch["tokens"]}) > 100
    meshes = [(data, copies, microbatches) for data in (1, 2, 4) for copies in (1, 2) for microbatches in (1, 2)]
    for step in range(STEPS):
        data, copies, microbatches = meshes[step % len(meshes)]
        with Prefetch(Loader(samples, BATCH, microbatches), on(data, copies)) as resumed:
            for later in range(step, min(step + 3, STEPS)):
                assert rows(resumed.batch(later * BATCH)) == whole[later]


def test_a_batch_on_devices_equals_the_loaders(samples):
    loader = Loader(samples, BATCH, 2, Boundaries(0, True, True, True))
    expected, placed = loader.batch(16), place_batch(loader, 16, on(4, 2))
    assert placed.keys() == expected.keys() == {"tokens", "labels", "weights", "sample", "positions", "document"}
    for name, array in expected.items():
        np.testing.assert_array_equal(placed[name], array)
        assert placed[name].dtype == array.dtype and placed[name].sharding.spec == P(None, "data")


def test_any_batch_can_be_requested_next(samples):
    loader = Loader(samples, BATCH, 1)
    with Prefetch(loader, on(2)) as ahead:
        for consumed in (0, 8, 40, 48, 8, 9, 17):
            assert rows(ahead.batch(consumed)) == rows(loader.batch(consumed))


def test_prefetching_beyond_the_end_is_not_an_error(samples):
    """Only requesting a missing batch raises an error."""
    last = (samples.count // BATCH - 1) * BATCH
    with Prefetch(Loader(samples, BATCH, 1), on(1)) as ahead:
        ahead.batch(last)
        with pytest.raises(ConfigError, match=f"of {samples.count}: pass fewer --steps"):
            ahead.batch(last + BATCH)


def test_a_token_outside_the_models_vocabulary_is_refused(samples):
    with pytest.raises(ConfigError, match="the model has ids 0 to 499.*--vocabulary"):
        Loader(samples, BATCH, 1, vocabulary=500).batch(0)


class Growing(Loader):
    """Batches of 2 up to sample 4, then of 4."""

    def at(self, consumed_samples):
        return self.resized(2 if consumed_samples < 4 else 4, 1)


def test_growing_batches_have_consecutive_samples(samples):
    with Prefetch(Growing(samples, 4, 1), on(2)) as ahead:
        seen = [rows(ahead.batch(consumed))["sample"] for consumed in (0, 2, 4, 8)]
    assert seen == [[0, 1], [2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


WORKER = """
import json, sys
import jax, numpy as np
process, port, prefix = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"localhost:{port}", 2, process)
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from megajax.data.blending import Blend
from megajax.data.loader import Loader
from megajax.data.prefetch import place_batch
samples = Blend.parse([prefix]).samples((0, 1), 8, 5, 7)
read, window = [], samples.window
samples.window = lambda index: (read.append(index), window(index))[1]
mesh = Mesh(np.array(jax.devices()).reshape(4, 1), ("data", "pipe"))
batch = place_batch(Loader(samples, 8, 2), 0, NamedSharding(mesh, P(None, "data")))
parts = [(shard.index[1].start, np.asarray(shard.data).tolist()) for shard in batch["tokens"].addressable_shards]
print("RESULT" + json.dumps({"read": read, "parts": parts}), flush=True)
"""


def test_each_process_reads_only_its_own_samples(tmp_path):
    """Two processes with two devices each: each reads half of the samples once, and together they hold the whole batch."""
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document(np.arange(60))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", WORKER]
    runs = [
        subprocess.Popen(
            [*command, str(i), str(port), str(tmp_path / "a")], env=os.environ | flags, stdout=subprocess.PIPE
        )
        for i in range(2)
    ]
    lines = [run.communicate(timeout=120)[0].decode().splitlines() for run in runs]
    found = [json.loads(line.removeprefix("RESULT")) for part in lines for line in part if line.startswith("RESULT")]
    assert [result["read"] for result in found] == [[0, 4, 1, 5], [2, 6, 3, 7]]
    expected = Loader(Blend.parse([str(tmp_path / "a")]).samples((0, 1), 8, LENGTH, 7), 8, 2).batch(0)["tokens"]
    for result in found:
        assert len(result["parts"]) == 2  # devices of a process
        for start, part in result["parts"]:
            assert part == expected[:, start : start + 1].tolist()


def test_boundaries_by_hand():
    """Id 0 ends a document and belongs to it; its label, the next document's first token, has weight 0."""
    tokens = np.array([[5, 0, 6, 7, 0, 0, 8], [1, 2, 3, 4, 5, 6, 7]])
    batch = Boundaries(0, reset_positions=True, reset_attention=True, mask_loss=True).arrays(tokens)
    assert batch["positions"].tolist() == [[0, 1, 0, 1, 2, 0, 0], list(range(7))]
    assert batch["document"].tolist() == [[0, 0, 1, 1, 1, 2, 3], [0] * 7]
    assert batch["weights"].tolist() == [[1, 0, 1, 1, 0, 0, 1], [1] * 7]
    assert list(Boundaries(0).arrays(tokens)) == ["weights"] and Boundaries(0).arrays(tokens)["weights"].all()


def test_data_that_leaves_nothing_is_refused(tmp_path):
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        for i in range(9):
            writer.add_document([i] * 9)
    path, tokenizer = (str(tmp_path / "a"),), load_tokenizer("byte")
    for data, message in [
        (DataConfig(train_data_path=path), "has no validation data"),
        (DataConfig(data_path=path, split="1"), "has no share for validation.*--validation-batches 0"),
        (DataConfig(data_path=path, split="0,1"), "has no share for training"),
    ]:
        data.validate()
        with pytest.raises(ConfigError, match=message):
            make_samples(data, tokenizer, 4, 0, 10, 2)
    data = DataConfig(train_data_path=path, valid_data_path=("1", *path))
    training, validation = make_samples(data, tokenizer, 4, 0, 10, 2)
    assert training.count >= 10 and validation["validation"].count >= 2
    training, validation = make_samples(DataConfig(data_path=path, split="1"), tokenizer, 4, 0, 10, 0)
    assert validation == {}
