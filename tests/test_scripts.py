"""scripts/: what is started again after a failure, and what is not. The commands of the cluster are fakes in PATH."""

import os
import pathlib
import subprocess
import time

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[1]

# Starts two tasks, as srun would; the second one is killed when the first has failed. Reports the highest exit code.
SRUN = """#!/usr/bin/env bash
shift
export TASK
TASK=0 "$@"; first=$?
if ((first > 0)); then second=$KILLED; else TASK=1 "$@"; second=$?; fi
exit $((first > second ? first : second))
"""
PYTHON = '#!/usr/bin/env bash\necho "$@" >> "$CALLS"\n[ "$CODE" -gt 128 ] && kill -$((CODE - 128)) $$\nexit "$CODE"\n'


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
    for name, text in {
        "srun": SRUN,
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
        "SLURM_RESTART_COUNT": str(restarts),
        "CODE": str(code),
        "KILLED": str(killed),
        "CALLS": str(tmp_path / "calls"),
        "REQUEUED": str(tmp_path / "requeued"),
    }
    run = subprocess.run(
        ["bash", "scripts/slurm.sh", "--text", "a b.txt"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (tmp_path / "requeued").exists() == requeued, run.stdout + run.stderr
    assert run.returncode == exit_code, run.stdout + run.stderr
    assert not requeued or (tmp_path / "requeued").read_text() == "requeue 7\n"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == f"-m experiments.gpt3 --run-dir {tmp_path}/run --resume auto --text a b.txt"


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
    [("0", "0", 0), ("2", "3", 2), ("1", "3", 1), ("3", "3", 3), ("137", "3", 3), ("3", "0", 3), ("130", "0", 130)],
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
