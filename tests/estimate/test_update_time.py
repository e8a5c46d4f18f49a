"""The update's bytes, FLOPs and collectives, by hand and against programs compiled for H100s."""

import dataclasses

import jax
import optax
import pytest

from megajax.config import ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate.gpus import find_gpu
from megajax.estimate.hlo import read
from megajax.estimate.memory import bytes_per_device
from megajax.estimate.muon_matrices import COPIES, matrices_of
from megajax.estimate.parameters import Sharding, rank_parameters, sharded_parameters
from megajax.estimate.program_account import account_of
from megajax.estimate.program_time import NORM, Program
from megajax.estimate.step_time import step_time
from megajax.estimate.update_time import update_work
from megajax.plan.compiler import has_compiler, target_config
from megajax.runtime.compat import compiled_text, topologies
from megajax.runtime.mesh import make_mesh
from megajax.runtime.xla_flags import step_options
from megajax.train.step import make_training

H100 = find_gpu("h100-80gb")
HIDDEN = 12288


def run_of(optimizer: str, mesh=(1, 8, 8), chunks=3, model="gpt3-175b", **options) -> RunConfig:
    data, pipe, tensor = mesh
    parallel = ParallelConfig(data=data, pipe=pipe, tensor=tensor, chunks=chunks, attention="xla", zero=int(data > 1))
    batch = 1536 if data == 1 else 16 * data * pipe
    return RunConfig(preset(model), parallel, TrainConfig(global_batch_size=batch, optimizer=optimizer, **options))


def test_muons_flops_of_gpt3_175b_by_hand():
    """Five steps of 4 n n m + 2 n^3 for each of 96 layers, over 64 GPUs: none is computed twice."""
    layer = sum(4 * HIDDEN**2 * columns * HIDDEN + 2 * HIDDEN**3 for columns in (3, 1, 4, 4))
    found = list(matrices_of(run_of("muon")))
    assert sum(one.flops for one in found) == 5 * layer * 96 / 64
    assert {(one.whole, one.split) for one in found} == {(1, 4)}  # of the twelve layers of a stage


def test_muons_matrices_of_experts_are_where_the_experts_are():
    """Eight experts of 14336 x 4096 in each of 32 layers, over two replicas with two tensor ranks: two on each, whole."""
    layout = {"data": 4, "tensor": 2}
    found = []
    for how in ({"expert": 4, "expert_tensor": 1}, {"expert": 2}):
        run = RunConfig(preset("mixtral-8x7b"), ParallelConfig(**layout, **how), TrainConfig(optimizer="muon"))
        found.append([one for one in matrices_of(run) if one.columns >= 14336])
    for one, sharded in zip(*found, strict=True):
        assert (one.whole, one.split, one.tensor, one.stored) == (32 * 2, 0, 1, 32 * 2 * one.rows * one.columns)
        assert (sharded.whole, sharded.tensor, sharded.stored, sharded.share) == (16 * 4, 2, one.stored, one.share)


def test_the_update_of_muon_is_at_most_one_and_a_half_percent_of_a_step():
    adamw, muon = (step_time(run_of(name), H100) for name in ("adamw", "muon"))
    assert 0.01 < (muon.total - adamw.total) / muon.total < 0.015


@pytest.mark.parametrize(("optimizer", "bytes_each"), [("adamw", 28), ("lion", 20), ("adafactor", 32)])
def test_the_bytes_of_an_update_and_of_the_average(optimizer, bytes_each):
    for more, options in ((0, {}), (8, {"ema_decay": 0.999})):
        program = Program(run_of(optimizer, **options), H100)
        assert update_work(program, 1000).traffic == pytest.approx((bytes_each + more) * 1000 / program.rates.memory)


COMPILED = [
    *((name, (1, 2, 2), 1, "gpt3-1.3b") for name in ("adamw", "lion", "adafactor", "muon")),
    ("muon", (4, 1, 2), 1, "llama2-7b"),
]


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="needs the CUDA plugin, megajax[plan]")
@pytest.mark.parametrize(("optimizer", "mesh", "chunks", "model"), COMPILED, ids=str)
def test_the_update_of_a_compiled_program(optimizer, mesh, chunks, model):
    run = run_of(optimizer, mesh, chunks, model)
    hosts = -(-run.parallel.devices // 8)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(H100), topology=f"1x{hosts}x{run.parallel.devices // hosts}"
    )
    training = make_training(run, make_mesh(run.parallel, topology.devices))
    shapes, sharding = training.state_shapes, training.state_sharding

    def update(params, state, gradients):
        updates, state = training.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    trees = (sharding.params, sharding.optimizer_state)
    options = step_options(run.parallel, topology.devices[0])
    step = jax.jit(
        update,
        in_shardings=(*trees, sharding.params),
        out_shardings=trees,
        donate_argnums=(0, 1),
        compiler_options=options,
    )
    with jax.set_mesh(training.mesh):
        compiled = step.lower(shapes.params, shapes.optimizer_state, shapes.params).compile()
    hlo, program = compiled_text(compiled), Program(run, H100)
    state = sharded_parameters(run, rank_parameters(run, Sharding.from_config(run)), run.parallel.zero > 0)
    found, work = account_of(run, H100, hlo).account, update_work(program, state)
    norm = NORM * state / program.rates.memory
    assert read(hlo, {}).flops() == pytest.approx(sum(one.flops for one in matrices_of(run)) * (optimizer == "muon"))
    assert work.total + norm == pytest.approx(found.total, rel=0.2)
    if optimizer == "muon":
        elements = sum(one.share * one.rows * one.columns for one in matrices_of(run))
        copies = compiled.memory_analysis().temp_size_in_bytes / (2 * elements)
        assert copies == pytest.approx(COPIES, rel=0.4)


def test_the_memory_of_muons_update_counts_where_the_step_needs_less():
    """A step of one microbatch has few activations."""
    run = run_of("muon", (1, 1, 1), 1, "gpt3-1.3b")
    short = dataclasses.replace(run, model=dataclasses.replace(run.model, sequence_length=16, vocabulary=1024))
    parts = bytes_per_device(short)
    elements = sum(one.share * one.rows * one.columns for one in matrices_of(short))
    during = sum(parts[name] for name in ("16-bit weights", "stash", "copies", "inboxes", "workspace"))
    assert during == pytest.approx(COPIES * 2 * elements)
