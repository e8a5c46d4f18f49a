"""State replicated in host memory: restored bit for bit on any mesh, and only if it is complete, sound and the run's own."""

import errno
import itertools
import pathlib
import shutil
import time

import jax
import numpy as np
import pytest

from megajax.checkpoint import checksums, process_state
from megajax.checkpoint.memory_hosts import MemoryHosts, memory_directory
from megajax.checkpoint.metadata import Progress, run_meta
from megajax.checkpoint.peer import PartServer, PeerClient
from megajax.checkpoint.process_state import Part, PartName, Piece, assemble
from megajax.checkpoint.replicated import ReplicatedState
from megajax.config import ConfigError, OutputConfig
from megajax.config.output import MEMORY_VARIABLE
from tests import small
from tests.train import runs


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch) -> pathlib.Path:
    """The directory in which the tests' runs replicate their state."""
    monkeypatch.setenv(MEMORY_VARIABLE, str(tmp_path / "memory"))
    return tmp_path / "memory"


def replicas_of(run, directory) -> ReplicatedState:
    return ReplicatedState(directory, 5, run_meta(run, runs.Letters()))


@pytest.fixture(scope="module")
def saved():
    """A training on two replicas, two stages and two tensor ranks, with ZeRO-1; and a state whose values all differ."""
    training = small.training_of(runs.make_run((2, 2, 2), chunks=2, zero=1))
    return training, small.random_state(training)


def save(training, state, directory, step: int) -> ReplicatedState:
    replicas = replicas_of(training.run, directory)
    assert replicas.save(training.state_layout, state, Progress(step, 16 * step)) == []
    (text,) = replicas.wait()
    assert f"step {step}: state replicated" in text
    return replicas


@pytest.mark.parametrize(
    "other",
    [
        {"mesh": (2, 2, 2), "chunks": 2, "zero": 1},
        pytest.param({"mesh": (4, 1, 2), "zero": 0, "microbatches": 4, "schedule": "1f1b"}, marks=pytest.mark.slow),
        {"mesh": (1, 4, 1), "schedule": "zb_v", "chunks": 2, "microbatches": 8},
        {"mesh": (1, 3, 1), "schedule": "1f1b", "vocab_parallel": "tensor"},  # 3, 3 and 2 layers
    ],
    ids=str,
)
def test_any_mesh_restores_the_same_bits(saved, tmp_path, other):
    training, state = saved
    save(training, state, tmp_path / "run", 7)
    there = small.training_of(runs.make_run(**other))
    got, progress, messages = replicas_of(there.run, tmp_path / "run").restore(there.run, there.state_layout, 0)
    assert progress == Progress(7, 112) and "resume    from step 7, replicated in host memory" in messages
    arrays = [small.canonical_state(s, of) for s, of in ((got, there), (state, training))]
    jax.tree.map(np.testing.assert_array_equal, *arrays)


def test_the_newest_step_replaces_the_one_before(saved, tmp_path, memory):
    training, state = saved
    replicas = save(training, state, tmp_path / "run", 5)
    for step in (10, 15):
        replicas.save(training.state_layout, state, Progress(step))
    assert replicas.wait() == []  # the first of them is reported, then failures only
    (part,) = (replicas.hosts.root / "own").iterdir()
    assert PartName.parse(part.name).step == 15
    assert replicas.close(clear=True) == [] and list(memory.iterdir()) == []


def restored(saved, directory, at_least=0):
    training, _ = saved
    return replicas_of(training.run, directory).restore(training.run, training.state_layout, at_least)


def test_a_damaged_part_is_not_restored(saved, tmp_path):
    root = save(*saved, tmp_path / "run", 5).hosts.root
    (part,) = (root / "own").iterdir()
    data = bytearray((part / "data").read_bytes())
    data[1000] ^= 1
    (part / "data").write_bytes(data)
    assert restored(saved, tmp_path / "run") is None
    assert list((root / "own").iterdir()) == []


def test_an_incomplete_or_unfinished_part_is_not_restored(saved, tmp_path):
    root = save(*saved, tmp_path / "run", 5).hosts.root
    (part,) = (root / "own").iterdir()
    for name in (str(part.name).replace("0-of-1", "0-of-2"), part.name + process_state.TEMPORARY, "else"):
        shutil.copytree(part, root / "own" / name)
    part.joinpath("data").unlink()
    assert restored(saved, tmp_path / "run") is None
    assert list((root / "own").iterdir()) == []


def test_only_a_state_of_the_same_run_and_as_new_as_the_checkpoint_is_restored(saved, tmp_path):
    directory = tmp_path / "run"
    save(*saved, directory, 5)
    assert restored(saved, directory, at_least=5) is not None
    assert restored(saved, directory, at_least=6) is None
    assert restored(saved, directory) is None  # it was deleted
    save(*saved, directory, 5)
    shutil.rmtree(directory)  # the user deletes the run, and starts another in the same place
    assert restored(saved, directory) is None
    save(*saved, directory, 5)
    assert restored(saved, directory, at_least=None) is None  # --resume no, or of a step


def test_a_state_of_another_model_is_refused(saved, tmp_path):
    save(*saved, tmp_path / "run", 5)
    other = small.training_of(runs.make_run(model=small.LLAMA))
    with pytest.raises(ConfigError, match="is of another model"):
        replicas_of(other.run, tmp_path / "run").restore(other.run, other.state_layout, 0)


def test_full_memory_is_reported_once_and_the_state_before_is_kept(saved, tmp_path, monkeypatch):
    training, state = saved
    replicas = save(training, state, tmp_path / "run", 5)

    def fail(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(process_state, "_write_all", fail)
        replicas.save(training.state_layout, state, Progress(10))
        expected = "warning: step 10: state NOT replicated: No space left on device; the newest is of step 5"
        assert replicas.save(training.state_layout, state, Progress(15)) == [expected]
        assert replicas.wait() == []
    assert [PartName.parse(path.name).step for path in (replicas.hosts.root / "own").iterdir()] == [5]
    replicas.save(training.state_layout, state, Progress(20))
    assert "step 20: state replicated" in replicas.wait()[0]


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(MEMORY_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=f"replicate_state cannot write to .*set {MEMORY_VARIABLE} to a directory"):
        memory_directory(tmp_path / "run")
    with pytest.raises(ConfigError, match="replicate_state = 5 has nowhere to write: pass --run-dir"):
        OutputConfig(replicate_state=5).validate()


def test_blocks_are_assembled_from_any_pieces():
    """Random partitions of random arrays into parts, and random blocks of them, compared with numpy's indexing."""
    random = np.random.default_rng(3)
    for _ in range(60):
        shape = tuple(random.integers(1, 7, random.integers(0, 4)))
        whole = random.normal(size=shape).astype(np.float32)
        cuts = [sorted({0, size, *random.integers(0, size + 1, 2).tolist()}) for size in shape]
        boxes = list(itertools.product(*[list(itertools.pairwise(cut)) for cut in cuts]))
        content, pieces = [b"", b""], [[], []]
        for box in boxes:
            owner = int(random.integers(2))
            block = np.ascontiguousarray(whole[tuple(slice(*pair) for pair in box)])
            start, size = tuple(a for a, _ in box), tuple(b - a for a, b in box)
            pieces[owner].append(Piece(start, size, len(content[owner])))
            content[owner] += block.tobytes()
        both = [
            Part({}, {"x": (whole.dtype, shape)}, {"x": found}, lambda a, b, data=data: data[a:b])
            for found, data in zip(pieces, content, strict=True)
        ]
        low = [int(random.integers(0, size)) for size in shape]
        wanted = tuple(slice(a, int(random.integers(a + 1, size + 1))) for a, size in zip(low, shape, strict=True))
        np.testing.assert_array_equal(assemble(both, "x", wanted, shape, whole.dtype), whole[wanted])
        padded = tuple(size + 2 for size in shape)  # a mesh on which the vocabulary has more padding
        everything = assemble(both, "x", (slice(None),) * len(shape), padded, whole.dtype)
        np.testing.assert_array_equal(everything, np.pad(whole, [(0, 2)] * len(shape)) if shape else whole)
        if all(pieces):
            with pytest.raises(ValueError, match="do not have all of x"):
                assemble(both[:1], "x", (slice(None),) * len(shape), shape, whole.dtype)


def test_the_server_gives_parts_to_those_who_have_the_token(saved, tmp_path):
    root = save(*saved, tmp_path / "run", 5).hosts.root
    (part,) = (root / "own").iterdir()
    data, name = (part / "data").read_bytes(), PartName.parse(part.name)
    (root / "secret").write_text("secret")
    server = PartServer(root, "right", "127.0.0.1")
    client, stranger = PeerClient(server.address, "right"), PeerClient(server.address, "wrong")
    try:
        assert client.read(f"own/{name}/data", 10, 5000) == data[10:5000]
        assert client.read(f"own/{name}/index.json") == (part / "index.json").read_bytes()
        for path in ("secret", "own/../secret", f"own/{name}/../../secret", f"copies/{name}/data", "own/else/data"):
            with pytest.raises(OSError, match="does not have"):
                client.read(path)
        with pytest.raises(OSError, match="416"):
            client.read(f"own/{name}/data", 0, len(data) + 1)
        with pytest.raises(OSError, match="403"):
            stranger.read(f"own/{name}/data")
        client.download_part("own", name, root / "copies")
        assert checksums.problems(root / "copies" / str(name)) == []
        assert (root / "copies" / str(name) / "data").read_bytes() == data
        shutil.rmtree(part)
        with pytest.raises(OSError, match="does not have"):
            client.download_part("own", name, root / "elsewhere")
        assert list((root / "elsewhere").iterdir()) == []
    finally:
        client.close()
        server.close()
    with pytest.raises(OSError, match="does not answer"):
        PeerClient(server.address, "right").read(f"copies/{name}/data")


@pytest.mark.parametrize(
    ("lost", "complete"), [((), [10, 15]), ((1,), [10]), ((0, 2), [10]), ((1, 2), []), ((0, 3), []), ((0, 1, 2), [])]
)
def test_a_state_is_complete_unless_two_neighbours_are_lost(lost, complete):
    """Four hosts of two processes, each with a copy of the next; step 15 was written by three hosts, not copied."""

    def names(host: int, step: int) -> list[str]:
        return [str(PartName(step, "a1", process, 8)) for process in (2 * host, 2 * host + 1)]

    published = {}
    for host in range(4):
        held = [["own", name] for name in names(host, 10) + names(host, 15)]
        held += [["copies", name] for name in names((host + 1) % 4, 10)]
        published[2 * host] = {"address": f"host{host}", "parts": held}
    hosts = object.__new__(MemoryHosts)
    left = [host for host in range(4) if host not in lost]
    hosts._hosts, hosts._published = [[2 * host, 2 * host + 1] for host in left], published
    hosts._leader = 2 * left[0]
    states = hosts.complete_states()
    assert sorted(step for step, _ in states) == complete
    for parts_of in states.values():
        assert len(parts_of) == 8
        here = {name.process for name, holder in parts_of.items() if holder.address is None}
        assert here >= {2 * left[0], 2 * left[0] + 1}


class Killed(Exception):
    """In place of SIGKILL."""


class KilledAfter:
    """A `Preemption` that ends the run without a save."""

    def __init__(self, step: int):
        self.step = step

    def after(self, step: int) -> None:
        if step == self.step:
            raise Killed


@pytest.mark.slow
@pytest.mark.parametrize(("save_every", "resumed"), [(1000, 9), (13, 13)])
def test_a_killed_run_resumes_from_the_newer_of_memory_and_checkpoint(
    tmp_path, memory, monkeypatch, whole, save_every, resumed
):
    """The state is replicated after step 9; the second run has a checkpoint of step 13."""
    training, undisturbed = whole
    options = {"training": training, "save_every": save_every, "replicate_state": 9}
    with pytest.raises(Killed):
        runs.go(training.run, tmp_path / "run", stop=KilledAfter(15), **options)
    newest = "**/own/step_00000009.*-of-1" if resumed == 9 else "**/step_00000013"
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(newest)):  # its thread still writes
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if resumed == 9:
        # With fewer steps than were taken there is nothing to do, and no checkpoint: the state stays in memory.
        fewer = small.training_of(runs.make_run((2, 1, 1), zero=1, schedule="1f1b", steps=5))
        done = runs.go(fewer.run, tmp_path / "run", training=fewer, resume="auto", replicate_state=9)
        assert "resume    from step 9, replicated" in done.text and list(tmp_path.glob(newest))
        monkeypatch.setattr("megajax.checkpoint.reader.load", None)  # no checkpoint is read
    result = runs.go(training.run, tmp_path / "run", resume="auto", **options)
    source = "replicated in host memory" if resumed == 9 else "the newest in"
    assert f"resume    from step {resumed}, {source}" in result.text
    assert result.text.count("resume    from step") == 1
    assert [row["step"] for row in result.rows] == list(range(1, 17))
    np.testing.assert_array_equal(result.losses, undisturbed.losses)
    assert not any(memory.iterdir())  # the last checkpoint has the state


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A training, and its uninterrupted run of 16 steps."""
    training = small.training_of(runs.make_run((2, 1, 1), zero=1, schedule="1f1b", steps=16))
    return training, runs.go(training.run, tmp_path_factory.mktemp("whole"), training=training)
