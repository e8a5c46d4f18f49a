"""Commands with runs or data in an object store: a store that goes away, two runs, several processes, mistakes."""

import json
import signal

import numpy as np
import pytest

from experiments import gpt3
from tests.stores.servers import FAULTS, Store, environment_of, missing, no_fault, random_faults
from tests.train.front_door import Command, Run, rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        bool(missing()), reason=f"not installed: {missing()}: pip install 'megajax[stores,store_servers]'"
    ),
]
LONG = "--devices cpu:1 --steps 200000 --save-every 400 --log-every 400 --resume auto --run-dir {place}"


@pytest.fixture(scope="module", params=("s3", "gs"))
def store(request):
    found = Store(request.param)
    yield found
    found.close()


def place(store, name: str) -> str:
    return f"{store.scheme}://bucket/commands/{name}"


def saves(run) -> int:
    return run.out.count("checkpoint saved")


def test_a_store_that_goes_away_costs_one_line_and_saves_are_made_when_it_is_back(tmp_path, store):
    run = Run(tmp_path, LONG.format(place=place(store, "away")), **store.environment)
    run.until(lambda: saves(run) >= 2, 500)  # it compiles
    store.proxy.fault = lambda method, path: "down"
    run.until(lambda: "NOT saved" in run.out and "cannot be written" in run.out, 300)
    before = saves(run), run.out.count("step ")
    run.until(lambda: run.out.count("\nstep ") > before[1] and run.out.count("NOT saved") >= 1)
    store.proxy.fault = no_fault
    run.until(lambda: saves(run) >= before[0] + 2 and "can be written again" in run.out, 300)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0, run.err
    assert run.out.count("cannot be written") == 1 and "Traceback" not in run.err
    lines = [line for line in run.out.splitlines() if "NOT saved" in line or "written" in line]
    print(store.scheme, *lines, sep="\n  ")


def test_two_runs_in_one_place_are_refused_and_a_killed_one_is_taken_over(tmp_path, store):
    words = LONG.format(place=place(store, "two"))
    first = Run(tmp_path, words, "first", **store.environment)
    first.until(lambda: saves(first) >= 1)
    second = Run(tmp_path, words, "second", **store.environment)
    assert second.wait() == 2
    assert second.err.count("\n") == 0 and f"is in use by process {first.process.pid} on " in second.err
    assert first.process.poll() is None
    first.process.kill()
    first.process.wait()
    third = Run(tmp_path, words, "third", **store.environment)
    third.until(lambda: saves(third) >= 1)
    assert "the newest in " in third.out
    third.process.send_signal(signal.SIGTERM)
    assert third.wait() == 0, third.err


def test_launch_runs_several_processes_with_a_place_for_the_agents(tmp_path, store):
    words = "--devices cpu:1 --data 2 --pipe 1 --tensor 1 --steps 12 --save-every 5 --log-every 1 --replicate-state 4 "
    words += "--layers 2 --hidden 16 --heads 2 --sequence-length 16 --global-batch-size 4 --microbatch-size 2 "
    words += f"--new-tokens 0 --validation-batches 0 --run-dir {place(store, 'launched')}"
    own = ["megajax.launch", "--processes-per-node", "2", "--address", "127.0.0.1"]
    refused = Command(tmp_path, [*own, "--", "experiments.gpt3", *words.split()], "refused", **store.environment)
    assert refused.wait() == 2 and refused.err.count("\n") == 0 and "pass --rendezvous DIR" in refused.err
    own += ["--rendezvous", str(tmp_path / "agents")]
    run = Command(tmp_path, [*own, "--", "experiments.gpt3", *words.split()], "run", **store.environment)
    assert run.wait(400) == 0, run.out + run.err
    with environment_of(store.direct):
        from megajax.checkpoint import checksums
        from megajax.checkpoint.directory import NAME, complete_steps
        from megajax.checkpoint.object_store import files_below
        from megajax.checkpoint.object_store import place as place_of

        found = place_of(place(store, "launched"))
        assert complete_steps(found / "checkpoints") == [5, 10, 12]
        assert all(not checksums.problems(found / "checkpoints" / NAME.format(step)) for step in (5, 10, 12))
        names = set(files_below(found))
        assert {"logs/process_0.log", "logs/process_1.log", "log.jsonl", "config.toml", "run_id"} <= names


def test_a_pair_in_a_store_trains_as_on_a_disk_and_its_run_is_replayed_from_there(tmp_path, store):
    import fsspec

    from megajax.data.indexed import IndexedWriter

    chance = np.random.default_rng(0)
    with IndexedWriter(tmp_path / "pair", np.uint16) as writer:
        for length in chance.integers(1, 300, 200):
            writer.add_document(chance.integers(0, 256, length))
    with environment_of(store.direct):
        for end in ("bin", "idx"):
            fsspec.filesystem(store.scheme).put_file(str(tmp_path / f"pair.{end}"), f"bucket/data/pair.{end}")
    words = "--devices cpu:1 --steps 5 --log-every 1 --layers 2 --hidden 16 --heads 2 --sequence-length 16 "
    words += (
        "--global-batch-size 4 --microbatch-size 2 --new-tokens 0 --validation-batches 0 --vocabulary 257 --run-dir"
    )
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache"), **store.environment}
    start = lambda name, *more: Command(tmp_path, ["experiments.gpt3", *words.split(), *more], name, **own)  # noqa: E731
    near = start("near", str(tmp_path / "near"), "--data-path", str(tmp_path / "pair"))
    far = start("far", place(store, "pair"), "--data-path", f"{store.scheme}://bucket/data/pair")
    assert near.wait(500) == far.wait(500) == 0, near.err + far.err
    config = f"{place(store, 'pair')}/config.toml"
    again = Command(
        tmp_path, ["experiments.gpt3", "--config", config, "--run-dir", str(tmp_path / "again")], "again", **own
    )
    assert again.wait(500) == 0, again.err
    losses = [row["loss"] for row in rows(tmp_path / "near")]
    assert losses == [row["loss"] for row in rows(tmp_path / "again")] and len(losses) == 5
    lines = [
        [line.split()[3] for line in run.out.splitlines() if line.startswith("step ")] for run in (near, far, again)
    ]
    assert lines[0] == lines[1] == lines[2]


@pytest.mark.parametrize("fault", [None, "all"])
def test_preprocess_writes_a_pair_to_a_store_and_divides_a_file_there(tmp_path, store, monkeypatch, capfd, fault):
    """The pair of one process on a disk; shards of one file of lines at a URL, more than there are sources."""
    import fsspec

    from megajax.data.preprocess import main

    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"line {number} " * (number % 50)}) for number in range(20_000)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    url, out = f"{store.scheme}://bucket/texts/{fault}.jsonl", place(store, f"pair-{fault}")
    common = ["--tokenizer", "byte", "--workers", "1"]
    ends = ("bin", "sums.json", "idx")
    assert main(["--input", "text.jsonl", "--out", "near", *common]) == 0
    with environment_of(store.direct):
        fsspec.filesystem(store.scheme).put_file("text.jsonl", url)
    with environment_of(store.environment):
        store.proxy.fault = random_faults(FAULTS, 0.1, seed=5) if fault else no_fault
        assert main(["--input", url, "--out", out, *common]) == 0
        for index in range(3):
            assert main(["--input", url, "--out", "part", *common, "--shard", f"{index}/3"]) == 0
        store.proxy.fault = no_fault
        assert main(["merge", "--shards", "part"]) == 0
        capfd.readouterr()
        assert main(["--input", url, "--out", out, *common]) == 2
        assert "already exists: pass --overwrite to replace it" in capfd.readouterr().err
        assert main(["--input", url, "--out", f"{store.scheme}://nobucket/a", *common]) == 2
        assert f"cannot write {store.scheme}://nobucket/a.unfinished: there is no such bucket" in capfd.readouterr().err
    with environment_of(store.direct):
        system = fsspec.filesystem(store.scheme)
        far = [system.cat_file(f"{out}.{end}") for end in ends]
    near, part = ([(tmp_path / f"{name}.{end}").read_bytes() for end in ends] for name in ("near", "part"))
    assert near == far == part


def wrong_inputs(store, tmp_path):
    """Words of a training, and what the line says; variables that differ."""
    scheme, keys = store.scheme, {name: "" for name in store.environment if "KEY" in name}
    profile = {"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path)}
    return [
        (f"--run-dir {scheme}://nobucket/run", "cannot lock the run directory", {}),
        (f"--run-dir {scheme}://nobucket/run --resume auto", "bucket", {}),
        (f"--run-dir {scheme}://bucket/foreign", "holds no run of megajax (corpus.txt)", {}),
        (f"--run-dir a --resume {scheme}://bucket/nothing", "is neither auto, nor a step, nor a directory", {}),
        (f"--run-dir a --resume {scheme}://nobucket/nothing", "is neither auto, nor a step, nor a directory", {}),
        (f"--data-path {scheme}://bucket/nothing", "there is no such file", {}),
        (f"--data-path {scheme}://nobucket/nothing", "there is no such file", {}),
        (f"--data-path {scheme}://bucket/foreign/corpus.txt", "there is no such file", {}),
        (f"--config {scheme}://bucket/foreign/config.toml", "give --config the config.toml of a run directory", {}),
        (f"--config {scheme}://bucket/foreign/corpus.txt", "give --config the config.toml of a run directory", {}),
        (f"--run-dir {scheme}://bucket/x --track wandb --track-artifacts last", "pass --track-artifacts none", {}),
        *([(f"--run-dir {scheme}://bucket/x", "credentials", keys | profile)] if scheme == "s3" else []),
    ]


def test_wrong_inputs_are_one_line_each(tmp_path, store, capfd, monkeypatch):
    import fsspec

    monkeypatch.chdir(tmp_path)
    with environment_of(store.direct):
        for name in ("commands/file", "foreign/corpus.txt"):
            fsspec.filesystem(store.scheme).pipe_file(f"bucket/{name}", b"text")
    found = []
    for words, message, variables in wrong_inputs(store, tmp_path):
        found.append(_refused(words, store.environment | variables, capfd))
        assert message in found[-1], (words, found[-1])
    for fault, folder, message in (
        (
            lambda method, path: "403" if method in ("PUT", "POST") else None,
            "readonly",
            "cannot lock the run directory",
        ),
        (lambda method, path: "403", "secret", "cannot read"),
        (lambda method, path: "down", "away", "cannot read"),
    ):
        store.proxy.fault = fault
        found.append(_refused(f"--run-dir {store.scheme}://bucket/{folder}", store.environment, capfd))
        assert message in found[-1] and ("denied" in found[-1].lower() or folder == "away"), (folder, found[-1])
    store.proxy.fault = no_fault
    print(*found, sep="\n")


def _refused(words: str, variables: dict[str, str], capfd) -> str:
    """The only line of a command that ends with 2."""
    capfd.readouterr()
    with environment_of(variables):
        code = gpt3.main([*"--model tiny --devices cpu:1 --steps 1 --global-batch-size 8".split(), *words.split()])
    noise = ("google_auth_provider", "absl::", "common-io", "AuthCredentials")
    lines = [line for line in capfd.readouterr().err.splitlines() if not any(word in line for word in noise)]
    assert code == 2 and len(lines) == 1, (words, code, lines)
    return lines[0]
