"""Runs of several processes: start-up, same losses as one process, stops, failed saves, dead and hung processes."""

import pathlib
import resource
import signal
import socket
import subprocess
import sys
import time
import types

import numpy as np
import pytest

from megajax.checkpoint import reader
from megajax.checkpoint.directory import complete_steps
from megajax.config import ConfigError, LaunchConfig
from megajax.runtime.distributed import EXIT_PEER, CompilationBarrier, Place, bind_address, find_place
from tests.train.front_door import Run, rows

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "node[001-002]",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}
OMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "2", "JAX_NUM_PROCESSES": "4", "JAX_COORDINATOR_ADDRESS": "train-0.train:12355"}
EIGHT = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}

PLACES = [
    ({}, {}, None),
    ({"launcher": "single"}, SLURM, None),
    ({}, SLURM | {"SLURM_NTASKS": "1"}, None),
    ({}, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, None),  # a shell inside salloc: srun has not started it
    ({}, {"JOB_COMPLETION_INDEX": "0"}, None),
    ({}, SLURM | EIGHT, Place(None, 16, 9, [1], "slurm")),  # a process for each GPU
    (
        {},
        SLURM | EIGHT | {"SLURM_STEP_TASKS_PER_NODE": "1(x16)", "SLURM_LOCALID": "0"},
        Place(None, 16, 9, [*range(8)], "slurm"),
    ),
    ({}, SLURM | {"CUDA_VISIBLE_DEVICES": "5"}, Place(None, 16, 9, [0], "slurm")),  # bound to its GPU by SLURM
    ({}, OMPI | EIGHT | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:3"}, Place(None, 4, 3, [1], "ompi")),
    ({"coordinator": "a:1", "launcher": "mpi"}, OMPI | EIGHT, Place("a:1", 4, 3, [1])),
    ({}, OMPI | EIGHT | {"JAX_COORDINATOR_ADDRESS": "a:1"}, Place("a:1", 4, 3, [1])),
    ({}, {"PMI_SIZE": "2", "PMI_RANK": "1", "JAX_COORDINATOR_ADDRESS": "a:1"}, Place("a:1", 2, 1)),
    ({}, KUBERNETES, Place("train-0.train:12355", 4, 2)),
    ({"launcher": "kubernetes", "process_id": 0}, KUBERNETES, Place("train-0.train:12355", 4, 0)),
    ({"coordinator": "b:2", "processes": 2, "process_id": 1}, SLURM, Place("b:2", 2, 1)),
    ({}, {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, Place("a:1", 2, 0)),
]


@pytest.mark.parametrize(("given", "environment", "place"), PLACES, ids=range(len(PLACES)))
def test_process_number_and_count_are_found(given, environment, place):
    assert find_place(LaunchConfig(**given), environment) == place


@pytest.mark.parametrize(
    ("given", "environment", "message"),
    [
        ({"launcher": "slurm"}, {}, "launcher = slurm needs SLURM_NTASKS and SLURM_PROCID: start with srun"),
        ({"launcher": "mpi"}, OMPI, "pass --coordinator"),
        ({}, OMPI, "pass --coordinator"),
        ({"launcher": "kubernetes"}, {"JOB_COMPLETION_INDEX": "0"}, "scripts/kubernetes.yaml"),
        ({"launcher": "flags"}, {}, "--coordinator, --processes and --process-id"),
        ({}, KUBERNETES | {"JOB_COMPLETION_INDEX": "4"}, "process 4 of 4: processes count from 0"),
    ],
)
def test_missing_variables_are_named(given, environment, message):
    with pytest.raises(ConfigError, match=message):
        find_place(LaunchConfig(**given), environment)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# With this the learning rate of a step does not depend on --steps.
RATE = "--learning-rate-decay constant --warmup-steps 1"
MESH = "--data 2 --pipe 2 --tensor 2 --global-batch-size 8 --microbatch-size 2 --layers 4 --chunks 2"


def start(path, count: int, words: str, **environment) -> list[Run]:
    """`count` processes with eight devices in all, on loopback."""
    port = free_port()
    flags = f"--devices cpu:{8 // count} --coordinator 127.0.0.1:{port} --processes {count} --process-id"
    return [
        Run(
            path, f"{MESH} {words} {flags} {i}", name=f"process_{i}", **{k: v.format(i) for k, v in environment.items()}
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process with eight devices."""
    path = tmp_path_factory.mktemp("alone")
    run = Run(path, f"{MESH} {RATE} --devices cpu:8 --steps 8 --save-every 4 --keep-every 4 --run-dir {path}/run")
    assert run.wait() == 0, run.err
    return path


def losses(path):
    return np.array([row["loss"] for row in rows(path / "run")])


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_give_the_losses_of_one(alone, tmp_path, count):
    """2x4 and 4x2 devices compared with 1x8: one log of the run, one per process, and the same checkpoint."""
    found = start(
        tmp_path, count, f"--steps 8 --save-every 4 --run-dir {tmp_path}/run --config {alone}/run/config.toml"
    )
    assert [run.wait() for run in found] == [0] * count, [run.err for run in found]
    np.testing.assert_allclose(losses(tmp_path), losses(alone), rtol=1e-6)
    assert "data 2 x pipe 2 x tensor 2 on 8 cpu devices" in found[0].out
    assert [run.out for run in found[1:]] == [""] * (count - 1) and [run.err for run in found] == [""] * count
    for process in range(count):
        assert "step 8/8  loss" in (tmp_path / "run" / "logs" / f"process_{process}.log").read_text()
    one = reader.read_meta(alone / "run" / "checkpoints" / "step_00000008")
    many = reader.read_meta(tmp_path / "run" / "checkpoints" / "step_00000008")
    assert one["progress"] == many["progress"] and one["tokenizer"] == many["tokenizer"]


@pytest.mark.slow
def test_two_processes_resume_from_one_and_a_signal_to_either_stops_both(alone, tmp_path):
    """Two processes, started by SLURM's variables, resume from one process's checkpoint; SIGTERM to the second stops both.

    The learning rate is constant after the warm-up, so that the losses of the long run are those of the short one.
    """
    words = (
        f"{RATE} --devices cpu:4 --steps 2000 --resume {alone}/run/checkpoints/step_00000004 --run-dir {tmp_path}/run"
    )
    slurm = {
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }
    found = [
        Run(tmp_path, f"{MESH} {words}", name=f"process_{i}", **slurm, SLURM_PROCID=str(i), SLURM_LOCALID=str(i))
        for i in range(2)
    ]
    found[0].until(lambda: len(rows(tmp_path / "run")) > 5)
    found[1].process.send_signal(signal.SIGTERM)
    assert [run.wait() for run in found] == [0, 0], [run.err for run in found]
    got = rows(tmp_path / "run")
    assert got[0]["step"] == 5  # the other run's log is not copied
    np.testing.assert_allclose([row["loss"] for row in got[:4]], losses(alone)[4:], rtol=1e-6)
    logs = [(tmp_path / "run" / "logs" / f"process_{i}.log").read_text() for i in range(2)]
    last = f"step {got[-1]['step']}: SIGTERM received: saving a checkpoint and stopping"
    assert all(last in log for log in logs)
    assert "SIGTERM received: saving a checkpoint and stopping" in found[0].out
    assert complete_steps(tmp_path / "run" / "checkpoints") == [got[-1]["step"]]


@pytest.mark.slow
def test_a_save_that_fails_on_one_process_fails_on_all_and_training_continues(tmp_path):
    """The second process cannot write large files for a while, as with a full disk."""
    found = start(tmp_path, 2, f"--steps 100000 --save-every 20 --max-to-keep 2 --run-dir {tmp_path}/run")
    checkpoints = tmp_path / "run" / "checkpoints"
    found[0].until(lambda: complete_steps(checkpoints))
    limit = resource.prlimit(found[1].process.pid, resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    found[0].until(lambda: "checkpoint NOT saved" in found[0].out)
    before = complete_steps(checkpoints)
    resource.prlimit(found[1].process.pid, resource.RLIMIT_FSIZE, limit)
    found[0].until(lambda: complete_steps(checkpoints)[-1] > before[-1])
    found[0].process.send_signal(signal.SIGTERM)
    assert [run.wait() for run in found] == [0, 0], [run.err for run in found]
    assert "process 1: " in found[0].out and "File too large" in found[0].out


PEER = "--steps 100000 --peer-timeout 8 --run-dir {}/run"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_hung_process_ends_the_job(tmp_path, victim, number):
    found = start(tmp_path, 2, PEER.format(tmp_path))
    found[0].until(lambda: len(rows(tmp_path / "run")) > 5)
    found[victim].process.send_signal(number)
    start_of_wait = time.monotonic()
    other = found[1 - victim]
    try:
        code = other.wait(60)
        taken = time.monotonic() - start_of_wait
    finally:
        found[victim].process.kill()
    assert taken < 8 + 15
    assert code == EXIT_PEER
    # The process is named by its host, or, if it is process 0 and hangs, by its address.
    named = f"process {victim} on {socket.gethostname()}", "process 0 (127.0.0.1:"
    assert len(other.err.splitlines()) == 1 and other.err.startswith("error: "), other.err
    assert any(name in other.err for name in named[: 2 - victim])


ONE_DEVICE = "--data {0} --pipe 1 --tensor 1 --layers 1 --global-batch-size 12 --microbatch-size 1 --devices cpu:1"


def start_small(path, count: int, words: str) -> list[Run]:
    """`count` processes with one device each, of a model that compiles fast."""
    port, words = free_port(), f"{ONE_DEVICE.format(count)} {words} --run-dir {path}/run --steps 100000"
    flags = f"--coordinator 127.0.0.1:{port} --processes {count} --process-id"
    return [Run(path, f"{words} {flags} {i}", name=f"process_{i}") for i in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("moment", ["start", "step", "save"])
def test_the_others_say_in_one_line_which_process_died(tmp_path, victim, moment):
    """Four processes, one of which is killed: at the start, in which it restores a checkpoint, in a step, in a save."""
    words = "--save-every 5 --peer-timeout 15 --resume auto"
    if moment == "start":
        found = start_small(tmp_path, 4, words + " --exit-after-minutes 0.01")
        assert [run.wait() for run in found] == [0] * 4, [run.err for run in found]
    found = start_small(tmp_path, 4, words)
    if moment == "start":
        found[0].until(lambda: "resume    " in found[0].out or len(found[0].out) > 2000)
    else:
        found[0].until(lambda: len(rows(tmp_path / "run")) >= (9 if moment == "save" else 7))
    found[victim].process.kill()
    others = [run for run in found if run is not found[victim]]
    assert [run.wait(90) for run in others] == [EXIT_PEER] * 3, [run.err for run in others]
    for run in others:
        assert len(run.err.splitlines()) == 1 and run.err.startswith("error: "), run.err


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_ctrl_c_to_one_process_saves_and_stops_all(tmp_path, process):
    found = start_small(tmp_path, 2, "")
    found[0].until(lambda: len(rows(tmp_path / "run")) > 5)
    found[process].process.send_signal(signal.SIGINT)
    assert [run.wait() for run in found] == [0, 0], [run.err for run in found]
    last = rows(tmp_path / "run")[-1]["step"]
    assert f"step {last}: SIGINT received: saving a checkpoint and stopping" in found[0].out
    assert complete_steps(tmp_path / "run" / "checkpoints") == [last]
    assert "Ctrl-C: the run stops after this step and saves" in found[process].err
    assert found[1 - process].err == ""


def test_an_error_of_one_process_ends_all_with_its_exit_code(tmp_path):
    """The second process's tokenizer does not exist."""
    port = free_port()
    flags = f"{MESH} --devices cpu:4 --coordinator 127.0.0.1:{port} --processes 2"
    found = [
        Run(tmp_path, f"{flags} --process-id {i} --tokenizer {name}", name=f"process_{i}")
        for i, name in enumerate(["byte", "bite"])
    ]
    assert [run.wait() for run in found] == [2, 2]  # a launcher must not start the command again
    problem = "tokenizer = 'bite' is not known"
    assert found[0].err.startswith(f"error: process 1 on {socket.gethostname()} failed: {problem}")
    assert found[1].err.startswith(f"error: {problem}")
    assert [run.err.count("error: ") for run in found] == [1, 1]


@pytest.mark.parametrize("process", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_reports_others_that_do_not_connect(tmp_path, process):
    words = f"--coordinator 127.0.0.1:{free_port()} --processes 2 --process-id {process} --start-timeout 3"
    run = Run(tmp_path, f"{MESH} {words}")
    assert run.wait(90) == EXIT_PEER  # a host that is late may be there at the next start
    assert f"error: process {process} of 2 did not connect to the others at 127.0.0.1:" in run.err
    assert "Traceback" not in run.err and "not all of them started within 3 s" in run.err


@pytest.mark.parametrize(
    ("coordinator", "bound"),
    [
        ("127.0.0.1:12355", "127.0.0.1:12355"),
        ("localhost:12355", "127.0.0.1:12355"),
        ("0.0.0.0:12355", "0.0.0.0:12355"),
        ("192.0.2.7:12355", None),  # not of this host: a forwarded port
        ("no-such-host.invalid:12355", None),
        ("loop:12355", None),  # a host's own name for loopback: the others resolve it to another address
        (None, None),  # jax finds the address
    ],
)
def test_the_service_is_bound_to_the_coordinators_address(monkeypatch, coordinator, bound):
    resolve = socket.getaddrinfo

    def addresses(host, port, **settings):
        if host == "no-such-host.invalid":
            raise socket.gaierror
        return resolve("127.0.0.1" if host in ("loop", "localhost") else host, port, **settings)

    monkeypatch.setattr(socket, "getaddrinfo", addresses)
    assert bind_address(coordinator) == bound


def listening(port: int) -> set[str]:
    """Local addresses, in hexadecimal, that accept connections to `port`."""
    tables = [pathlib.Path(f"/proc/net/tcp{end}").read_text().splitlines()[1:] for end in ("", "6")]
    found = [line.split()[1:4] for table in tables for line in table]
    return {local.split(":")[0] for local, _, state in found if state == "0A" and local.endswith(f":{port:04X}")}


def test_process_0_listens_on_the_coordinators_address_only(tmp_path):
    port = free_port()
    words = f"--coordinator 127.0.0.1:{port} --processes 2 --process-id 0 --start-timeout 20"
    run = Run(tmp_path, f"{MESH} {words}")
    run.until(lambda: listening(port))
    # 127.0.0.1, perhaps as ::ffff:127.0.0.1; all interfaces would be zeros.
    assert listening(port) <= {"0100007F", "0000000000000000FFFF00000100007F"}
    run.process.kill()


def test_processes_wait_for_one_another_after_a_compilation():
    """The barrier's name is the same in all processes of a program, and used once."""
    waited = []
    client = types.SimpleNamespace(
        wait_at_barrier=lambda name, timeout, process_ids: waited.append((name, process_ids))
    )
    barrier = CompilationBarrier(client)
    for processes in ([0, 1], [0, 1], [0, 1, 2]):
        barrier("jit_step", processes)
    assert [name.removeprefix("megajax/compiled/") for name, _ in waited] == [
        "0-1/1/jit_step",
        "0-1/2/jit_step",
        "0-1-2/1/jit_step",
    ]
    assert [ids for _, ids in waited] == [[0, 1], [0, 1], [0, 1, 2]]


@pytest.mark.slow
def test_compile_times_may_differ_by_more_than_gloos_deadline(tmp_path):
    """One process compiles for 40 s; gloo waits 30 s for a process that it has to connect to."""
    port = free_port()
    script = pathlib.Path(__file__).with_name("late_compilation.py")
    found = [
        subprocess.Popen(
            [sys.executable, script, str(port), str(process)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(2)
    ]
    outs = [process.communicate(timeout=200)[0] for process in found]
    assert [process.returncode for process in found] == [0, 0], outs
    assert all("sums 3.0 3.0" in out for out in outs), outs
