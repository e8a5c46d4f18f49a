"""What `pipelined_loss` is made from: the run's configuration, the mesh with all axes, the model with the user's loss."""

import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig, near
from megajax.config.schedule_rules import default_chunks
from megajax.models.interface import PipelineModel
from megajax.schedules.io import save
from megajax.schedules.schedule import Schedule

__all__ = ["flat", "module_of", "run_of", "with_all_axes", "with_loss"]

Tree = Any
Batch = Mapping[str, Any]
AXES = ("data", "pipe", "tensor")
OF_THE_MESH = {*AXES, "expert", "schedule", "microbatch_size", "context", "axis_order"}


def run_of(model, schedule, mesh: Mesh, microbatches: int, precision: str, options: Mapping[str, Any]) -> RunConfig:
    """The configuration, validated."""
    legal = [field.name for field in dataclasses.fields(ParallelConfig) if field.name not in OF_THE_MESH] + ["context"]
    for name in options:
        if name not in legal:
            raise ConfigError(f"{name} is no option of a layout ({near(name, legal)}).")
    if precision not in ("fp32", "bf16"):
        raise ConfigError(f"precision = {precision} is not supported here: pass fp32 or bf16.")
    if unknown := [axis for axis in mesh.axis_names if axis not in (*AXES, "expert")]:
        raise ConfigError(f"the mesh has an axis {unknown[0]!r}: name its axes data, pipe and tensor.")
    sizes = {axis: mesh.shape.get(axis, 1) for axis in (*AXES, "expert")}
    context = options.get("context", 1)
    if context < 1 or sizes["data"] * sizes["expert"] % context:
        raise ConfigError(f"context = {context} does not divide the mesh's data axis of {sizes['data']}.")
    sizes["data"] = sizes["data"] * sizes["expert"] // context
    if options.get("expert_tensor") == 1:  # the degree counts the devices of both axes
        sizes["expert"] *= sizes["tensor"]
    if isinstance(schedule, Schedule):
        if schedule.microbatches != microbatches:
            raise ConfigError(
                f"the schedule {schedule.name} has {schedule.microbatches} microbatches, not {microbatches}: pass "
                f"microbatches={schedule.microbatches}."
            )
        options = {"chunks": schedule.chunks} | dict(options)
        schedule = _saved(schedule)
    config = model.config if isinstance(model, PipelineModel) else model
    options = {"chunks": default_chunks(schedule, sizes["pipe"], config.layers)} | dict(options)
    parallel = ParallelConfig(**sizes, schedule=schedule, **options)
    train = TrainConfig(precision=precision, global_batch_size=microbatches * parallel.data)
    run = RunConfig(config, parallel, train)
    run.validate(mesh.devices.size)
    return run


def _saved(schedule: Schedule) -> str:
    """A file of the table, in a directory of this process that is removed at its end."""
    path = os.path.join(_directory().name, f"{len(os.listdir(_directory().name))}.json")
    save(schedule, path)
    return path


@functools.cache
def _directory() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="megajax-schedules-")


def with_all_axes(mesh: Mesh) -> Mesh:
    """The same devices with all axes, which XLA's partitioner handles (AxisType.Auto)."""
    missing = [axis for axis in AXES if axis not in mesh.axis_names]
    names = (*mesh.axis_names, *missing)
    devices = mesh.devices.reshape(*mesh.devices.shape, *[1] * len(missing))
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def with_loss(
    kind: type[PipelineModel], loss: Callable, has_aux: bool, weight: Callable | None, over_pipe: bool
) -> type:
    """A model with another loss."""

    def loss_weight(self: PipelineModel, batch: Batch) -> jax.Array:
        rows = flat(batch)
        return jnp.float32(len(jax.tree.leaves(rows)[0])) if weight is None else weight(rows)

    methods = {
        "head_loss": lambda self, shared, y, microbatch: loss(self, shared, y, microbatch),
        "loss_weight": loss_weight,
        "has_outputs": has_aux,
        "__module__": module_of(loss),
        "__doc__": kind.__doc__,
    }
    # A class that replaces head_loss has no rows over pipe, unless it says that it knows of them.
    known = {"vocabulary_over_pipe": kind.vocabulary_over_pipe} if over_pipe else {}
    return type(f"{kind.__name__}WithLoss", (kind,), methods | known)


def module_of(function: Callable) -> str:
    """Of a function of the user's; `train.deadlocks` checks what is not of megajax."""
    return getattr(function, "__module__", None) or "__main__"


def flat(tree: Tree) -> Tree:
    """[microbatches, samples, ...] as [samples, ...]."""
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), tree)
