"""Memory, FLOPs and the planner's layouts of runs with frozen parameters or adapters."""

import dataclasses
import math
import pathlib

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from megajax.config import ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate import model_costs
from megajax.estimate.flops import flops_per_step, forward_flops
from megajax.estimate.gpus import find_gpu
from megajax.estimate.memory import bytes_per_device
from megajax.estimate.step_time import step_time
from megajax.models.context import model_rules, model_shapes
from megajax.pipeline.parameters import initial_params, parameter_specs
from megajax.pipeline.trained import only_trained, split, trained_mask
from megajax.train.precision import cast_frozen
from tests import gpu

LORA = dataclasses.replace(preset("llama2-7b"), lora=16, lora_targets=("all-linear",))


def run_of(model=LORA, freeze=(), **parallel):
    layout = ParallelConfig(schedule="1f1b", attention="cudnn", **parallel)
    return RunConfig(model, layout, TrainConfig(global_batch_size=64, freeze=freeze))


@pytest.mark.parametrize(
    "run",
    [
        run_of(pipe=4, tensor=2),
        run_of(data=8, zero=1),
        run_of(data=4, pipe=2, zero=3),
        run_of(preset("llama2-7b"), ("blocks/attention/*", "shared/*"), data=2, pipe=2, tensor=2, zero=1),
        run_of(preset("mixtral-8x7b"), ("blocks/feedforward/*",), data=2, pipe=4, expert=2),
        run_of(preset("mixtral-8x7b"), ("blocks/feedforward/*",), data=2, pipe=4, tensor=2, expert=4, expert_tensor=1),
        run_of(preset("mixtral-8x7b"), ("shared/*",), data=4, tensor=2, expert=4, expert_tensor=1, zero=1),
    ],
    ids=["lora", "lora zero1", "lora zero3", "freeze", "experts", "experts of ranks", "experts of ranks zero1"],
)
def test_weights_and_optimizer_are_the_bytes_on_a_device(run):
    """Shapes and shardings of the program, by jax.eval_shape."""
    axes, sizes = zip(*run.parallel.mesh_sizes.items(), strict=True)
    mesh, model = AbstractMesh(sizes, axes, axis_types=(AxisType.Auto,) * len(axes)), model_shapes(run)
    mask = trained_mask(model, run.train.freeze)
    shapes = jax.eval_shape(
        lambda key: cast_frozen(initial_params(model, run.parallel, key), mask, model.fp32_mask(), "bf16"),
        jax.random.key(0),
    )
    specs = parameter_specs(model, run.parallel, model_rules(run), mask).stored
    size = lambda leaf, spec: math.prod(NamedSharding(mesh, spec).shard_shape(leaf.shape))  # noqa: E731
    own = sum(jax.tree.leaves(jax.tree.map(size, only_trained(shapes, mask), only_trained(specs, mask))))
    of_frozen = lambda leaf, spec: size(leaf, spec) * leaf.dtype.itemsize  # noqa: E731
    frozen = sum(jax.tree.leaves(jax.tree.map(of_frozen, split(shapes, mask)[1], split(specs, mask)[1])))
    held = bytes_per_device(run)
    assert held["weights"] == pytest.approx(4 * own + frozen, rel=1e-3)
    assert held["optimizer"] == pytest.approx(8 * own, rel=1e-3)


def test_adapters_take_less_than_the_weights():
    """2 bytes for each frozen weight, 18 for each one that is trained."""
    run, whole = run_of(), run_of(preset("llama2-7b"))
    parts = ("weights", "optimizer", "gradients", "16-bit weights")

    def state(run):
        return sum(bytes_per_device(run)[part] for part in parts)

    assert state(whole) == pytest.approx(18 * whole.model.parameters, rel=0.01)
    adapters = run.model.parameters - whole.model.parameters
    assert state(run) == pytest.approx(2 * whole.model.parameters + 18 * adapters, rel=0.01)


def test_frozen_weights_have_no_gradients_to_compute():
    whole, run = run_of(preset("llama2-7b")), run_of(preset("llama2-7b"), ("blocks/*kernel", "shared/*"))
    forward = {name: 64 * count for name, count in forward_flops(model_costs(whole.model)).items()}
    scores = forward["attention_scores"] + forward["attention_values"]
    assert flops_per_step(run) == pytest.approx(2 * sum(forward.values()) + scores, rel=1e-6)
    seconds = [step_time(one, find_gpu("h100-80gb")).total for one in (whole, run)]
    assert 2 / 3 < seconds[1] / seconds[0] < 0.8  # two of three products of each weight, and attention as before


@pytest.mark.slow
@pytest.mark.compiler
def test_a_program_compiled_for_h100s_agrees():
    """XLA's own peak: 1.94 GB."""
    model = dataclasses.replace(LORA, layers=8, hidden=2048, heads=16, feedforward=8192, sequence_length=2048)
    layout = {"pipe": 2, "schedule": "1f1b", "attention": "cudnn"}
    _, peak = gpu.compile_step(model, 4, **layout)
    assert sum(bytes_per_device(gpu.run_of(model, 4, **layout)).values()) == pytest.approx(peak, rel=0.05)


# Of docs/fine_tuning.md: model, what is trained, fields of the model, patterns that are frozen, layout.
TABLE = (
    ("llama3.1-8b", "all", {}, (), {}),
    ("llama3.1-8b", "the head", {}, ("blocks/*", "shared/embedding/*"), {}),
    ("llama3.1-8b", "`--lora 16`", {"lora": 16}, (), {}),
    ("llama3.1-8b", "`--lora 16`, all-linear", {"lora": 16, "lora_targets": ("all-linear",)}, (), {}),
    ("llama3.1-70b, tensor 8", "all", {}, (), {"tensor": 8}),
    ("llama3.1-70b, tensor 8", "`--lora 16`", {"lora": 16}, (), {"tensor": 8}),
    (
        "llama3.1-70b, tensor 8",
        "`--lora 16`, all-linear",
        {"lora": 16, "lora_targets": ("all-linear",)},
        (),
        {"tensor": 8},
    ),
)


def table_row(name, trained, fields, freeze, layout):
    """A line of the table."""
    model = dataclasses.replace(preset(name.partition(",")[0]), sequence_length=4096, **fields)
    held = bytes_per_device(run_of(model, freeze, **layout))
    parts = [held[part] for part in ("weights", "optimizer", "gradients", "16-bit weights")]
    numbers = [*parts, sum(held.values()) - sum(parts), sum(held.values())]
    return f"| {name} | {trained} | " + " | ".join(f"{number / 1e9:.1f}" for number in numbers) + " |"


@pytest.mark.parametrize("row", TABLE)
def test_the_table_in_the_docs(row):
    docs = pathlib.Path(__file__).parents[2] / "docs" / "fine_tuning.md"
    assert table_row(*row) in docs.read_text(encoding="utf-8")
