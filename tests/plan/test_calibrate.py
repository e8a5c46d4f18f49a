"""`--calibrate` on four CPU devices with tiny sizes: its file loads, and what is in it reaches the planner."""

import socket
import subprocess
import sys

import jax
import pytest

from megajax.config import ConfigError
from megajax.estimate.measured import Link, Links, Measured
from megajax.ops.attention_kernels import XLA
from megajax.plan import calibrate as room
from megajax.plan import measure
from megajax.plan.__main__ import main
from megajax.plan.calibrate import Sizes
from megajax.plan.cluster import load_cluster, measured_text
from megajax.plan.dryrun import main as dry_run

TINY = Sizes((16,), 32, 1e5, 1 << 12, (1, 16, 2, 8), (1 << 8, 1 << 10), 1e-4)


def written(tmp_path, text):
    path = tmp_path / "ours.toml"
    path.write_text(text)
    return str(path)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(room, "SMALL", TINY)
    monkeypatch.setattr(measure, "CALLS", 1)


def test_the_file_keeps_its_fields_and_loads(tmp_path, tiny, monkeypatch, capsys):
    monkeypatch.setattr(room, "start_devices", lambda spec: jax.devices()[:2])
    path = written(tmp_path, 'gpu = "a100-80gb"  # ours\nprice = 2.5\n\n[measured]\ncopy_gbytes = 1.0\n')
    assert main(["--calibrate", "--cluster", path]) == 0
    assert "written: " in capsys.readouterr().out
    cluster = load_cluster(path)
    found = cluster.gpu.measured
    assert cluster.price == 2.5 and "# ours" in (tmp_path / "ours.toml").read_text()
    assert found.precision == "bf16" and found.memory not in (None, 1e9) and found.network == Links()
    rates = [rate for _, rate in found.matmuls]
    assert len(rates) == 3 and min(*rates, found.memory, *found.attention) > 0
    assert all(link.latency >= 0 and link.bandwidth > 0 for link in found.host)
    assert main(["--calibrate", "--cluster", path, "--gpu", "b200"]) == 2
    assert "has gpu = a100-80gb, but the devices are b200" in capsys.readouterr().err


@pytest.mark.slow
def test_four_devices_in_two_hosts(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(room, "start_devices", lambda spec: jax.devices()[:4])
    path = str(tmp_path / "new.toml")
    assert main(["--calibrate", "--cluster", path, "--host-size", "2"]) == 0
    cluster = load_cluster(path)
    links = [*cluster.gpu.measured.host, *cluster.gpu.measured.network]
    assert cluster.gpu.host_size == 2 and all(link.latency >= 0 and link.bandwidth > 0 for link in links)


@pytest.mark.slow
def test_two_processes(tmp_path):
    """Two processes of two devices each, as on two hosts; process 0 writes the file."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port = one.getsockname()[1]
    path = tmp_path / "new.toml"
    words = f"--calibrate --cluster {path} --devices cpu:2 --host-size 2 --coordinator localhost:{port} --processes 2"
    command = [sys.executable, "-m", "megajax.plan", *words.split(), "--process-id"]
    both = [subprocess.Popen([*command, str(place)], stdout=subprocess.PIPE, text=True) for place in (0, 1)]
    outputs = [one.communicate(timeout=500)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0]
    assert ["written: " in output for output in outputs] == [True, False]
    assert None not in load_cluster(str(path)).gpu.measured.network


@pytest.mark.slow
def test_one_device_has_no_links(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(room, "start_devices", lambda spec: jax.devices()[:1])
    path = str(tmp_path / "new.toml")
    assert main(["--calibrate", "--cluster", path]) == 0
    cluster = load_cluster(path)
    assert cluster.gpu.host_size == 1 and cluster.gpu.measured.host == cluster.gpu.measured.network == Links()


def test_flops_and_bytes_are_counted(monkeypatch):
    """With a call that takes a second, rates are what a call computes or moves."""
    monkeypatch.setattr(measure, "mean_seconds", lambda call, seconds: 1.0)
    device, shape = jax.devices()[0], (2, 4, 8, 16)
    # as many layers as 5e3 FLOPs need: of 3 products of 2 * 4 * 8 * 8 FLOPs each, four
    assert measure.matmul_rate(device, "float32", (4, 8, 8), 5e3) == 4 * 3 * 2 * 4 * 8 * 8
    assert measure.copy_rate(device, 1 << 12, 3) == 3 * 2 * (1 << 12)
    # half of the scores, 16 of each head; two products of 2 FLOPs for each, five in the backward
    forward, backward = measure.attention_rates(device, "float32", XLA, 2.5, shape)
    assert forward == 2 * 8 * (16 / 2) * 2 * 2 * 16 and backward == 2.5 * forward


@pytest.mark.parametrize(
    ("axis", "sent"),
    [("host", (768, 768, 1536, 1024)), ("network", (512, 512, 1024, 1024))],
)
def test_bytes_that_a_device_sends(axis, sent, monkeypatch):
    """1,024 bytes over four devices of a host, or two hosts: (g - 1) / g of them, twice in an all-reduce."""
    monkeypatch.setattr(measure, "_repeated", lambda *_: (None, None))
    monkeypatch.setattr(measure, "_median_seconds", lambda call: 3.2)
    times = measure.collective_times(jax.devices(), 4, axis, (1024,), 16)
    assert tuple(times[kind] for kind in Links._fields) == tuple([(count, 0.2)] for count in sent)


def test_a_table_is_read_as_it_is_written(tmp_path):
    links = Links(Link(1e-5, 2e9), None, Link(0.0, 3e9), None)
    given = Measured(
        "fp16", ((2.0 * 8 * 16 * 32, 5e14),), 2.5e12, (4e14, 3e14), links, Links(ppermute=Link(2e-5, 1e10))
    )
    more = {(8, 16, 32): 5e14}, {"driver": 'a "b"\\'}
    text = measured_text(given, *more)
    found = load_cluster(written(tmp_path, f'gpu = "h100-80gb"\n{text}')).gpu.measured
    assert measured_text(found, *more) == text and found.matmuls == ((8192.0, pytest.approx(5e14)),)
    assert found.host.all_gather == pytest.approx(links.all_gather) and found.host.all_reduce == Link(0.0, 3e9)
    assert found.memory == 2.5e12 and found.attention == (4e14, 3e14) and found.network.all_gather is None


def test_the_planner_and_the_dry_run_take_them(tmp_path, capsys):
    """An H100 of a tenth of its rates is predicted to be several times slower."""
    slow = "[measured]\nmatmuls = [[2048, 2048, 2048, 70.0]]\ncopy_gbytes = 300\nattention_teraflops = [45, 45]\n"
    paths = [written(tmp_path, 'gpu = "h100-80gb"\ngpus = 8\n'), str(tmp_path / "slow.toml")]
    (tmp_path / "slow.toml").write_text(f'gpu = "h100-80gb"\ngpus = 8\n{slow}')
    words = ["--model", "gpt3-1.3b", "--global-batch-size", "64", "--schedule", "1f1b", "--tokens", "1e9"]
    assert main([*words, "--compare", *paths]) == 0
    fast, slow = (float(line.split()[7]) for line in capsys.readouterr().out.splitlines()[2:4])
    assert slow > 4 * fast
    run = "--model gpt3-125m --data 2 --global-batch-size 8 --model-only --cluster"
    assert dry_run([*run.split(), paths[1]]) == 0
    assert "2 h100-80gb" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("measured = 3", "measured = 3 must be a table: write [measured] and its fields."),
        ("[measured]\ncopy_gbyte = 3", "measured.copy_gbyte is not a field: did you mean copy_gbytes"),
        ("[measured]\ncopy_gbytes = 0", "measured.copy_gbytes = 0 must be a number above 0."),
        ("[measured]\nprecision = 'int8'", "measured.precision = 'int8' must be one of bf16, fp16, fp32."),
        ("[measured]\nmatmuls = 3", "measured.matmuls = 3 must be a list of lists."),
        (
            "[measured]\nmatmuls = [[1, 2, 3]]",
            "= [1, 2, 3] must be rows, inner, columns, TFLOP/s, each a number above 0.",
        ),
        ("[measured]\nattention_teraflops = 400", "= 400 must be TFLOP/s of the forward, TFLOP/s of the backward"),
        ("[measured.host]\nall_gater = [1, 2]", "measured.host.all_gater is not a field: did you mean all_gather"),
        ("[measured.host]\nall_gather = [1]", "all_gather = [1] must be microseconds, GB/s, each a number at least 0."),
        ("[measured.network]\nppermute = [1, 0]", "measured.network.ppermute = [1, 0] must have more than 0 GB/s."),
        ("[measured.network]\nppermute = [1, nan]", "must be microseconds, GB/s"),
    ],
)
def test_a_wrong_table_is_one_line(text, says, tmp_path):
    with pytest.raises(ConfigError) as error:
        load_cluster(written(tmp_path, f'gpu = "b200"\n{text}'))
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--precision int8", "precision"),
        ("--gpu h1000", "gpu"),
        ("--host-size 3 --devices cpu:8", "host_size = 3 does not divide the 8 devices"),
        ("--devices gpu", "jax finds no GPU"),
        ("--cluster /proc/none/ours.toml --devices cpu:1", "cannot write /proc/none/ours.toml"),
        ("--cluster . ", "cannot be read: Is a directory"),
        ("--model gpt3-175b", "--model"),
    ],
)
def test_a_mistaken_request_is_one_line(words, says, tmp_path, monkeypatch, capsys, tiny):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(room, "measure", lambda *_: "[measured]\n")
    assert main(["--calibrate", *words.split()]) == 2
    err = capsys.readouterr().err
    assert says in err and len(err.strip().splitlines()) == 1
