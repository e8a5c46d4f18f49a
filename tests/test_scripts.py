"""scripts/: what is started again after a failure, and what is not. The commands of the cluster are fakes in PATH."""

import configparser
import os
import pathlib
import re
import subprocess
import time

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import megajax
from megajax.launch.elastic import read_request
from megajax.launch.options import read_options

ROOT = pathlib.Path(__file__).parents[1]
CONSTRAINTS, EXTRAS = ROOT / "scripts" / "constraints.txt", ("cuda12", "cuda13", "hf")

# Starts two tasks, as srun would; the second one is killed when the first has failed. Reports the highest exit code.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do echo "$1" >> "$CALLS.srun"; shift; done
export TASK
TASK=0 "$@"; first=$?
if ((first > 0)); then second=$KILLED; else TASK=1 "$@"; second=$?; fi
exit $((first > second ? first : second))
"""
PYTHON = '#!/usr/bin/env bash\necho "$@" >> "$CALLS"\n[ "$CODE" -gt 128 ] && kill -$((CODE - 128)) $$\nexit "$CODE"\n'


APPTAINER = """#!/usr/bin/env bash
while [[ $1 != bash ]]; do echo "$1" >> "$CALLS.apptainer"; shift; done
"$@"
"""


def submit(tmp_path, **variables) -> subprocess.CompletedProcess:
    """Runs scripts/slurm.sh."""
    for name, text in {
        "srun": SRUN,
        "apptainer": APPTAINER,
        "scontrol": '#!/bin/sh\necho "$@" > "$REQUEUED"\n',
        "python": PYTHON,
    }.items():
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "RUN_DIR": str(tmp_path / "run"),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "7",
        "CALLS": str(tmp_path / "calls"),
        "REQUEUED": str(tmp_path / "requeued"),
    }
    environment |= {name: str(value) for name, value in variables.items()}
    return subprocess.run(
        ["bash", "scripts/slurm.sh", "--text", "a b.txt"], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("code", "killed", "restarts", "requeued", "exit_code"),
    [
        (0, 0, 0, False, 0),
        (1, 0, 0, False, 1),
        (2, 0, 0, False, 2),
        (2, 143, 0, False, 2),  # srun kills the other tasks, whose code is higher
        (1, 137, 0, False, 1),
        (3, 3, 0, True, 0),
        (3, 143, 0, True, 0),
        (137, 0, 0, True, 0),  # killed, as for lack of memory
        (130, 0, 0, False, 130),
        (3, 3, 49, True, 0),
        (3, 3, 50, False, 3),
    ],
)
def test_slurm_requeues_what_may_succeed(tmp_path, code, killed, restarts, requeued, exit_code):
    run = submit(tmp_path, CODE=code, KILLED=killed, SLURM_RESTART_COUNT=restarts)
    assert (tmp_path / "requeued").exists() == requeued, run.stdout + run.stderr
    assert run.returncode == exit_code, run.stdout + run.stderr
    assert not requeued or (tmp_path / "requeued").read_text() == "requeue 7\n"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == f"-m experiments.gpt3 --run-dir {tmp_path}/run --resume auto --text a b.txt"


@pytest.mark.parametrize(
    ("container", "mounts", "program", "words"),
    [
        ("", None, "srun", []),
        (
            "registry.example.com#megajax:0.1.0",
            "/shared:/shared",
            "srun",
            ["--container-image=registry.example.com#megajax:0.1.0", "--container-mounts=/shared:/shared"],
        ),
        ("/images/a b.sqsh", None, "srun", ["--container-image=/images/a b.sqsh", "--container-mounts=RUN:RUN"]),
        ("/images/megajax.sif", "/a:/a,/b:/b", "apptainer", ["exec", "--nv", "--bind", "/a:/a,/b:/b"]),
    ],
)
def test_slurm_runs_a_container(tmp_path, container, mounts, program, words):
    variables = {"CONTAINER": container} | ({"CONTAINER_MOUNTS": mounts} if mounts else {})
    run = submit(tmp_path, CODE=0, KILLED=0, **variables)
    assert run.returncode == 0, run.stderr
    given = pathlib.Path(f"{tmp_path}/calls.{program}").read_text().splitlines()
    expected = [word.replace("RUN", str(tmp_path / "run")) for word in words]
    assert [word for word in given if word != "--kill-on-bad-exit=1"][: len(words)] == expected
    assert bool(container) or given == ["--kill-on-bad-exit=1"]
    assert (tmp_path / "calls").read_text().splitlines()[0].endswith("--resume auto --text a b.txt")


WORKER = """#!/usr/bin/env bash
trap 'echo told to save > "$SEEN/term-$JAX_PROCESS_ID"; exit 0' TERM
echo "$CUDA_VISIBLE_DEVICES $*" > "$SEEN/$JAX_PROCESS_ID"
case $JAX_PROCESS_ID in 5) code=$CODE;; *) code=$OTHERS;; esac
[ "$code" = wait ] && { sleep 60 & wait $!; }
exit "$code"
"""


def start_host(tmp_path, code: str, others: str) -> subprocess.Popen:
    """The second host of two with four GPUs each; `code` is that of its second process."""
    python = tmp_path / "python"
    python.write_text(WORKER)
    python.chmod(0o755)
    pod = {"PROCESSES_PER_HOST": "4", "JOB_COMPLETION_INDEX": "1", "RUN_DIR": "/shared/run"}
    fake = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SEEN": str(tmp_path), "CODE": code, "OTHERS": others}
    return subprocess.Popen(["bash", "scripts/train.sh", "--text", "a b.txt"], cwd=ROOT, env=os.environ | pod | fake)


@pytest.mark.parametrize(
    ("code", "others", "expected"),
    [("0", "0", 0), ("2", "3", 2), ("1", "3", 1), ("3", "3", 3), ("137", "3", 3), ("3", "0", 3), ("130", "3", 130)],
)
def test_a_host_has_a_process_for_each_gpu(tmp_path, code, others, expected):
    assert start_host(tmp_path, code, others).wait(60) == expected
    for index in range(4):
        line = f"{index} -m experiments.gpt3 --run-dir /shared/run --resume auto --text a b.txt"
        assert (tmp_path / str(4 + index)).read_text().strip() == line


def test_all_processes_of_a_host_are_told_to_save(tmp_path):
    host = start_host(tmp_path, "wait", "wait")
    deadline = time.monotonic() + 60
    while not all((tmp_path / str(4 + index)).exists() for index in range(4)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    host.terminate()
    assert host.wait(60) == 0
    assert len(list(tmp_path.glob("term-*"))) == 4


def job() -> dict:
    documents = yaml.safe_load_all((ROOT / "scripts" / "kubernetes.yaml").read_text())
    return next(document for document in documents if document["kind"] == "Job")["spec"]


@pytest.mark.parametrize(
    ("code", "disrupted", "action"),
    [(1, False, "FailJob"), (2, False, "FailJob"), (3, False, "Count"), (137, False, "Count"), (137, True, "Ignore")],
)
def test_kubernetes_replaces_pods_whose_restart_may_succeed(code, disrupted, action):
    """The first rule that matches decides; without one, a failed pod is replaced and counts towards backoffLimit."""
    spec, found = job(), "Count"
    for rule in reversed(spec["podFailurePolicy"]["rules"]):
        codes = rule.get("onExitCodes")
        conditions = [condition["type"] for condition in rule.get("onPodConditions", [])]
        if (codes and code in codes["values"]) or (disrupted and "DisruptionTarget" in conditions):
            found = rule["action"]
        if codes:
            assert codes["operator"] == "In"
            assert codes["containerName"] in [one["name"] for one in spec["template"]["spec"]["containers"]]
    assert found == action
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # the only one that podFailurePolicy allows


def test_kubernetes_has_a_process_for_each_gpu():
    spec = job()
    [container] = spec["template"]["spec"]["containers"]
    variables, gpus = {one["name"]: one["value"] for one in container["env"]}, container["resources"]["limits"]
    assert int(variables["PROCESSES_PER_HOST"]) == gpus["nvidia.com/gpu"]
    assert int(variables["JAX_NUM_PROCESSES"]) == gpus["nvidia.com/gpu"] * spec["completions"]


def dockerfile() -> str:
    return (ROOT / "scripts" / "Dockerfile").read_text()


def test_the_container_is_pinned():
    """Base images by tag, packages of pip by version, of which the extras' are within the bounds of setup.cfg."""
    bases = re.findall(r"^FROM (\S+)", dockerfile(), re.MULTILINE)
    assert bases.pop() == "${CUDA}"
    assert all(re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-base-ubuntu24\.04", base) for base in bases)
    pinned = [Requirement(line) for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    versions = {one.name: str(one.specifier).removeprefix("==") for one in pinned}
    assert len(versions) == len(pinned)
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    needed = [setup["options"]["install_requires"], *(setup["options.extras_require"][name] for name in EXTRAS)]
    for line in filter(None, "\n".join(needed).splitlines()):
        one = Requirement(line.strip())
        assert one.specifier.contains(versions[canonicalize_name(one.name)]), line
    assert versions["jax"] == versions["jaxlib"] == "0.12.0.1"
    assert versions["jax-cuda12-plugin"] == versions["jax-cuda13-plugin"] == versions["jax"]


def test_compose_starts_the_container():
    service = yaml.safe_load((ROOT / "scripts" / "compose.yaml").read_text())["services"]["train"]
    assert (ROOT / "scripts" / service["build"]["context"] / service["build"]["dockerfile"]).exists()
    words = [word.replace("${NODES:-1}", "2") for word in service["command"]]
    assert words[:3] == ["python", "-m", "megajax.launch"]
    options = read_options(words[3:])
    assert (options.least, options.most, options.processes_per_node) == (2, 2, None)
    request = read_request(options.module, options.arguments)
    assert request.output.run_dir == "/shared/runs/1.3b"
    request.run(16, "bf16").validate(16)


def test_the_options_of_the_kubernetes_job_are_those_of_a_run():
    spec = job()
    [container] = spec["template"]["spec"]["containers"]
    count = spec["completions"] * container["resources"]["limits"]["nvidia.com/gpu"]
    read_request("experiments.gpt3", container["args"]).run(count, "bf16").validate(count)


def test_the_image_has_one_name():
    named = [re.findall(r"megajax:(\d+\.\d+\.\d+)", path.read_text()) for path in (ROOT / "scripts").glob("*.yaml")]
    named.append(re.findall(r"megajax:(\d+\.\d+\.\d+)", dockerfile()))
    assert {version for versions in named for version in versions} == {megajax.__version__}
