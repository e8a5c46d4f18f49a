"""scripts/: what is started again after a failure, and what is not. The commands of the cluster are fakes in PATH."""

import os
import pathlib
import subprocess

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
