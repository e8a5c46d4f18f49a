"""Environment variables for GPUs: what jax and the driver read, and what users set themselves."""

import pytest

from megajax.estimate.memory import USABLE_SHARE
from megajax.runtime import gpu_environment

H100, B200 = "NVIDIA H100 80GB HBM3", "NVIDIA B200"
ORDER = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}


@pytest.mark.parametrize(
    ("users", "models", "expected"),
    [
        ({}, [H100, H100], {"XLA_CLIENT_MEM_FRACTION": "0.92", "CUDA_DEVICE_MAX_CONNECTIONS": "1"} | ORDER),
        ({}, [B200], {"XLA_CLIENT_MEM_FRACTION": "0.92"} | ORDER),
        ({}, [H100, B200], {"XLA_CLIENT_MEM_FRACTION": "0.92"} | ORDER),
        ({}, [], {"XLA_CLIENT_MEM_FRACTION": "0.92"} | ORDER),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.8", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}, [H100], ORDER),
        ({"XLA_CLIENT_MEM_FRACTION": "0.8"}, [H100], {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} | ORDER),
        ({"XLA_CLIENT_MEM_FRACTION": "0.8", "NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, [B200], {}),
    ],
)
def test_what_is_set(users, models, expected):
    assert gpu_environment.gpu_environment(users, models) == expected


def test_no_value_of_the_users_is_replaced(monkeypatch):
    users = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5",
        "CUDA_DEVICE_MAX_CONNECTIONS": "",
        "NCCL_LAUNCH_ORDER_IMPLICIT": "0",
    }
    monkeypatch.setattr(gpu_environment, "gpu_models", lambda: [H100])
    monkeypatch.setattr(gpu_environment.os, "environ", dict(users))
    gpu_environment.set_gpu_environment()
    assert gpu_environment.os.environ == users


def test_the_planner_plans_for_the_memory_that_jax_may_use():
    assert float(gpu_environment.gpu_environment({}, [])["XLA_CLIENT_MEM_FRACTION"]) == USABLE_SHARE


def test_models_are_read_from_the_drivers_files(tmp_path, monkeypatch):
    for number, model in enumerate((H100, B200)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 16\n")
    monkeypatch.setattr(gpu_environment.glob, "glob", lambda _: sorted(map(str, tmp_path.glob("*/information"))))
    assert gpu_environment.gpu_models() == [H100, B200]


@pytest.mark.parametrize(
    ("environment", "devices", "listed", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2,GPU-7c"}, 8, 8, ["2", "GPU-7c"]),
        ({"CUDA_VISIBLE_DEVICES": "0, 3,-1,4"}, 8, 8, ["0", "3"]),  # CUDA stops at the first wrong one
        ({"CUDA_VISIBLE_DEVICES": ""}, 8, 8, []),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 8, 8, []),  # of SLURM, without GPUs
        ({}, 8, 2, ["0", "1"]),  # the job has access to two
        ({}, 2, 0, ["0", "1"]),  # nvidia-smi is not installed
        ({}, 0, 8, []),
    ],
)
def test_the_gpus_that_jax_will_see(environment, devices, listed, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_environment.glob, "glob", lambda _: [f"/dev/nvidia{index}" for index in range(devices)])
    lines = [f"GPU {index}: NVIDIA H100 80GB HBM3 (UUID: GPU-{index})" for index in range(listed)]
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + ("exit 9" if not listed else "cat <<END\n" + "\n".join(lines) + "\nEND") + "\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    gpu_environment._listed_gpus.cache_clear()
    assert gpu_environment.visible_gpus(environment) == expected
