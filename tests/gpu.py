"""Compiles a run's step for H100s on a machine without any, in a child process: XLA aborts on some programs."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

from megajax.config import DataConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig

NO_CUDNN = "the cuDNN library is not installed: pip install nvidia-cudnn-cu12 (700 MB)"

LARGE = ModelConfig(layers=2, hidden=1024, heads=8, vocabulary=512, sequence_length=2048)  # for every test the same

# What XLA's compiler asks of a card; the numbers are the H100's, from NVIDIA's data sheet.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 } core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  device_memory_size: 84942979072 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def run_of(
    model: ModelConfig,
    microbatches: int,
    matmul_dtype: str | None = None,
    documents: bool = False,
    expert_matmul_dtype: str | None = None,
    **parallel,
) -> RunConfig:
    """The run that `compile_step` compiles."""
    layout, dtypes = (
        ParallelConfig(**parallel),
        {"matmul_dtype": matmul_dtype, "expert_matmul_dtype": expert_matmul_dtype},
    )
    train = TrainConfig(global_batch_size=microbatches * layout.data, **dtypes)
    data = DataConfig(reset_position_ids=documents, reset_attention_mask=documents)
    run = RunConfig(model, layout, train, data)
    run.validate()
    return run


def compile_step(
    model: ModelConfig,
    microbatches: int,
    matmul_dtype: str | None = None,
    documents: bool = False,
    expert_matmul_dtype: str | None = None,
    **parallel,
) -> tuple[str, int]:
    """(HLO text, peak bytes on one GPU) of the training step, as bf16, one sample a microbatch and replica.

    Args:
      documents: positions and attention restart in every document of a sample.
      parallel: fields of ParallelConfig.
    """
    train = (("matmul_dtype", matmul_dtype), ("documents", documents), ("expert_matmul_dtype", expert_matmul_dtype))
    return _compile(tuple(dataclasses.asdict(model).items()), microbatches, train, tuple(parallel.items()))


@functools.cache
def _compile(model, microbatches, train, parallel) -> tuple[str, int]:
    fields = json.dumps(
        {"model": dict(model), "microbatches": microbatches, "train": dict(train), "parallel": dict(parallel)}
    )
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2", "XLA_FLAGS": ""}
        command = [sys.executable, "-m", "tests.gpu", fields, folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        if "cuDNN library is not installed" in done.stderr:
            pytest.skip(NO_CUDNN)
        assert done.returncode == 0, done.stderr[-2000:]
        return pathlib.Path(folder, "hlo").read_text(), int(pathlib.Path(folder, "peak").read_text())


def _child(fields: dict, folder: pathlib.Path) -> None:
    from jax.experimental import topologies

    from megajax.runtime.compat import compiled_text
    from megajax.runtime.mesh import make_mesh
    from megajax.train.step import make_training

    model = {name: tuple(one) if isinstance(one, list) else one for name, one in fields["model"].items()}
    run = run_of(ModelConfig(**model), fields["microbatches"], **fields["train"], **fields["parallel"])
    devices = run.parallel.devices
    topology = topologies.get_topology_desc(platform="cuda", target_config=H100, topology=f"1x1x{devices}")
    training = make_training(run, make_mesh(run.parallel, topology.devices))
    compiled = training.compile_train_step(*training.step_shapes())
    size = compiled.memory_analysis()  # its own peak has the host's memory too
    peak = size.argument_size_in_bytes + size.output_size_in_bytes - size.alias_size_in_bytes + size.temp_size_in_bytes
    (folder / "peak").write_text(str(peak))
    (folder / "hlo").write_text(compiled_text(compiled))


if __name__ == "__main__":
    _child(json.loads(sys.argv[1]), pathlib.Path(sys.argv[2]))
