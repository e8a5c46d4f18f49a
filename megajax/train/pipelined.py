"""`pipelined_loss` and `pipelined_forward`: a model's loss and outputs on a mesh, for a training loop of one's own.

    mesh = jax.make_mesh((2, 2, 2), ("data", "pipe", "tensor"))
    loss = pipelined_loss(preset("tiny"), "zb_v", mesh, microbatches=8)
    params, optimizer = loss.init(jax.random.key(0)), optax.adamw(1e-3)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

**Differentiation.** A schedule mixes forwards and backwards, so it computes the loss and its gradients together. The
function is a `jax.custom_vjp`: where it is differentiated, its forward runs the schedule and keeps the gradients, and its
backward multiplies them by the cotangent. So `jax.value_and_grad` costs one run of the schedule, whatever is computed from
the loss (`3 * loss(...) + ...`). Where it is not differentiated, it runs forwards only. There are gradients of first order,
by reverse mode, with respect to the parameters only: a batch that depends on what is differentiated is an error, and
outputs (`has_aux`) have no gradient, as behind `jax.lax.stop_gradient`. Gradients have the terms of the experts' balance
losses and of multi-token prediction, which are not part of the value; balancing biases stay as they are. Gradients of
parameters that the model freezes (`PipelineModel.trainable_mask`) are zero: leave these out of the optimizer with
`optax.masked`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.sharding import Mesh

from megajax.checkpoint.layout import arrange
from megajax.config import ConfigError, RunConfig
from megajax.models.ids import checked_ids
from megajax.models.interface import PipelineModel, model_class
from megajax.pipeline import layout
from megajax.pipeline.trained import merge, split
from megajax.schedules.schedule import Schedule
from megajax.sharding.rules import AxisRules
from megajax.train.check import check_batch, model_to_check
from megajax.train.deadlocks import with_check
from megajax.train.pipelined_setup import flat, module_of, run_of, with_all_axes, with_loss
from megajax.train.step import make_training

__all__ = ["Pipelined", "PipelinedLoss", "pipelined_forward", "pipelined_loss"]

Tree = Any
Batch = Mapping[str, Any]


def pipelined_loss(
    model: Any,
    schedule: str | Schedule,
    mesh: Mesh,
    *,
    microbatches: int,
    loss: Callable | None = None,
    has_aux: bool = False,
    weight: Callable[[Batch], Any] | None = None,
    precision: str = "fp32",
    rules: AxisRules | None = None,
    **options: Any,
) -> "PipelinedLoss":
    """The mean loss of a batch by a pipeline schedule, to be differentiated by `jax.value_and_grad` in any jit.

    Args:
      model: a configuration whose model is registered (`preset("tiny")`), or a `PipelineModel`, of which class and
        configuration count.
      schedule: a name (`megajax.schedules`), a file, or a table.
      mesh: axes named data, pipe and tensor, any of them left out, and expert if experts are split.
      microbatches: of a step and replica; each has samples / (microbatches * data) samples.
      loss: `loss(model, shared, y, microbatch)` of the last block's output y [b, s, h] of a microbatch of b samples: an
        fp32 scalar, summed over these samples. `model` is the `PipelineModel` on the mesh (`model.logits(shared, y)`), and
        `shared` its parameters outside of blocks. None: the model's own `head_loss`.
      has_aux: `loss` returns (scalar, pytree of [b, ...]).
      weight: the divisor of the summed loss, of a batch [samples, ...]. None: the model's `loss_weight` for its own loss
        (tokens that count), and the number of samples for `loss`.
      precision: "fp32" or "bf16": that of matmuls and activations. Parameters, gradients and the loss are fp32.
      rules: logical axis -> mesh axes; None: the model's.
      options: fields of `ParallelConfig`: chunks, zero, recompute, vocab_parallel, sequence_parallel, ... With `loss`,
        vocab_parallel is "tensor" unless it is given: with "pipe" each rank has some rows of the token tables only, which a
        loss has to know that reads them itself (`ModelContext.vocabulary`).

    Returns:
      `f(params, batch) -> fp32 scalar`, with `has_aux` (scalar, pytree of [samples, ...]). Batches are dictionaries of
      [samples, ...], as the model's `batch_shapes` describes a sample. The parameters' layout is `f.init`'s.

    Raises:
      ConfigError, ScheduleError: mesh, schedule, model and microbatches do not fit; one line that says how to fit them.
    """
    if loss is None and (has_aux or weight is not None):
        raise ConfigError("has_aux and weight are of a loss of yours: pass loss=... too.")
    if loss is not None:
        options = {"vocab_parallel": "tensor"} | options
    run = run_of(model, schedule, mesh, microbatches, precision, options)
    kind = type(model) if isinstance(model, PipelineModel) else model_class(run.model)
    if loss is not None:
        kind = with_loss(kind, loss, has_aux, weight, run.parallel.vocabulary_over_pipe)
    return PipelinedLoss(run, with_all_axes(mesh), kind, rules)


def pipelined_forward(
    model: Any,
    schedule: str | Schedule,
    mesh: Mesh,
    *,
    microbatches: int,
    collect: Callable,
    precision: str = "fp32",
    rules: AxisRules | None = None,
    **options: Any,
) -> Callable[[Tree, Batch], Tree]:
    """What a function makes of the last block's output, for all samples of a batch: log-probabilities, states, scores.

    Forwards only, microbatch after microbatch so that all pipeline ranks work, without dropout; it has no gradient.
    `PipelinedLoss.forward` does the same with the layout of a loss.

    Args:
      model, mesh, microbatches, precision, rules, options: as for `pipelined_loss`.
      schedule: the one of the `pipelined_loss` whose parameters it takes; only its placement of layers counts.
      collect: `collect(model, shared, y, microbatch) -> pytree of [b, ...]`, for instance
        `model.token_scores(shared, y, microbatch)[0]`, each label's loss [b, s].

    Returns:
      `f(params, batch) -> pytree of [samples, ...]`.
    """
    options = {"vocab_parallel": "tensor"} | options
    run = run_of(model, schedule, mesh, microbatches, precision, options)
    kind = type(model) if isinstance(model, PipelineModel) else None
    pipelined = Pipelined(run, with_all_axes(mesh), kind, rules)
    return functools.partial(pipelined.forward, collect)


class Pipelined:
    """A model on a mesh.

    Attributes:
      training: the programs that it uses; `megajax.interop.hugging_face.read_model.initial_params(DIRECTORY, training)`
        reads the weights of a released model into the layout of `init`.
      model: the `PipelineModel`, with the operations of the mesh.
      shardings: NamedShardings of the parameters.
    """

    def __init__(self, run: RunConfig, mesh: Mesh, kind: type[PipelineModel] | None, rules: AxisRules | None):
        """See `pipelined_loss`."""
        self.run, self.mesh = run, mesh
        self.training = make_training(run, mesh, kind, rules)
        if not self.training.program.drains:
            raise ConfigError(
                f"schedule = {run.parallel.schedule} never drains its pipeline, so a batch's gradients are not complete at "
                "the end of a step: use another schedule."
            )
        self.model, self.shardings = self.training.model, self.training.params_sharding
        self.shapes = self.training.state_shapes.params
        self._checked_types: set[tuple] = set()  # of batches
        self._placed = jax.jit(self._arranged, out_shardings=self.shardings)
        self._canonical = jax.jit(self._in_layers)

    def init(self, key: jax.Array) -> Tree:
        """Initial fp32 parameters on the mesh: {"blocks": [chunks, pipe, slots of a stage, ...], "shared": ...}.

        They do not depend on the layout: equal to those of `PipelineModel.init` for the same key.
        """
        with jax.set_mesh(self.mesh):
            return jax.jit(lambda key: self._arranged(self.model.init(key)), out_shardings=self.shardings)(key)

    def place(self, params: Tree) -> Tree:
        """Parameters as `PipelineModel.init` returns them, blocks [layers, ...], in the layout of `init`.

        Raises:
          ConfigError: they are not the model's.
        """
        with jax.set_mesh(self.mesh):
            _check_params(params, jax.eval_shape(self.model.init, jax.random.key(0)), "give parameters of this model")
            return self._placed(params)

    def canonical(self, params: Tree) -> Tree:
        """The inverse of `place`: blocks [layers, ...] in the order of the layers. Gradients too."""
        with jax.set_mesh(self.mesh):
            return self._canonical(params)

    def forward(self, collect: Callable, params: Tree, batch: Batch) -> Tree:
        """See `pipelined_forward`; in any jit or outside of one."""
        split = self._checked(params, batch)
        shapes = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in split.items()}
        key = collect, *((name, a.shape, str(a.dtype)) for name, a in shapes.items())
        if key not in self._checked_types:
            written = type("the collect", (), {"__module__": module_of(collect)})
            self._refuse_hangs(written, functools.partial(self._forward, collect), shapes)
            self._checked_types.add(key)
        return self._forward(collect, params, split)

    def _refuse_hangs(self, written: type, function: Callable, batch: Batch) -> None:
        """Compiles what a user has written, and raises ConfigError if it would hang (`train.deadlocks`)."""
        jitted = jax.jit(function)
        checked = with_check(jitted, written, self.run.parallel, self.mesh)
        if checked is not jitted:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                checked.lower(_typed(self.shapes, self.shardings), batch).compile()

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def _forward(self, collect: Callable, params: Tree, batch: Batch) -> Tree:
        if self.run.parallel.context > 1:
            raise ConfigError("context ranks have parts of samples: outputs of samples are not supported with context.")
        with self._on_mesh():
            model, functions = self.training.evaluation()
            rows = lambda shared, y, microbatch: collect(model, shared, y, microbatch)  # noqa: E731
            return flat(self.training.forward(functions, rows, params, batch))

    def _arranged(self, params: Tree) -> Tree:
        where, shardings = self.training.where, self.shardings["blocks"]
        of_kind = lambda where, blocks, own: jax.tree.map(lambda a, to: arrange(a, where, to), blocks, own)  # noqa: E731
        return {**params, "blocks": layout.map_kinds(of_kind, where, params["blocks"], shardings)}

    def _in_layers(self, params: Tree) -> Tree:
        return {**params, "blocks": layout.from_pipeline_layout(params["blocks"], self.training.where)}

    def _on_mesh(self):
        """The mesh of what is traced within; jax.set_mesh is not legal in a jit."""
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)

    def _checked(self, params: Tree, batch: Batch) -> Batch:
        """The batch as [microbatches, samples of one, ...]."""
        _check_params(params, self.shapes, "pass what init or place returned, of the same mesh and options")
        if not isinstance(batch, Mapping) or not batch or not all(getattr(a, "ndim", 0) for a in batch.values()):
            raise ConfigError("a batch is a dictionary of arrays [samples, ...].")
        parallel, sizes = self.run.parallel, {name: array.shape[0] for name, array in batch.items()}
        if len(set(sizes.values())) > 1:
            found = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise ConfigError(f"the batch's arrays have different numbers of samples ({found}).")
        samples, each = next(iter(sizes.values())), self.run.microbatches * parallel.data
        if samples % each or not samples:
            raise ConfigError(
                f"the batch has {samples} samples, which microbatches * data = {self.run.microbatches} * {parallel.data} "
                f"does not divide: pass a multiple of {each} samples."
            )
        split = {name: a.reshape(self.run.microbatches, -1, *a.shape[1:]) for name, a in batch.items()}
        return checked_ids(split, self.model.id_bounds())


class PipelinedLoss(Pipelined):
    """The function that `pipelined_loss` returns; see there. It is hashable, so it may be a static argument of a jit."""

    def __init__(self, run: RunConfig, mesh: Mesh, kind: type[PipelineModel], rules: AxisRules | None):
        """See `pipelined_loss`."""
        super().__init__(run, mesh, kind, rules)
        self.has_aux = self.model.has_outputs
        if self.has_aux and run.parallel.context > 1:
            raise ConfigError("context ranks have parts of samples: has_aux is not supported with context.")
        differentiable = jax.custom_vjp(self._forward_only)
        differentiable.defvjp(self._with_gradients, self._scaled, symbolic_zeros=True)
        self._call = jax.jit(differentiable)

    def __call__(self, params: Tree, batch: Batch) -> Any:
        """The loss of a batch; with `has_aux` (loss, outputs)."""
        split = self._checked(params, batch)
        self._check_functions(params, split)
        result = self._call(params, split)
        return (result[0], jax.lax.stop_gradient(flat(result[1]))) if self.has_aux else result

    def _check_functions(self, params: Tree, batch: Batch) -> None:
        """Checks a loss and a model of the user's once for each type of batch: their arrays, and that they do not hang."""
        types = tuple((name, a.shape, str(a.dtype)) for name, a in batch.items())
        if types in self._checked_types:
            return
        shapes = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in batch.items()}
        check_batch(model_to_check(self.run, type(self.model)), shapes, "the batch", self.run.parallel.data)
        self._refuse_hangs(type(self.model), self._value, shapes)
        self._checked_types.add(types)

    # The functions below are traced.

    def _value(self, params: Tree, batch: Batch) -> Any:
        with self._on_mesh():
            return self._run(params, batch)[0]

    def _run(self, params: Tree, batch: Batch) -> tuple[Any, Tree]:
        loss, gradients, _, _, outputs = self.training.execute(params, batch, 1.0)
        gradients, _ = self.model.take_measurements(gradients)
        return (loss, outputs) if self.has_aux else loss, gradients

    def _forward_only(self, params: Tree, batch: Batch) -> Any:
        with self._on_mesh():
            model, functions = self.training.evaluation()

            def collect(shared: Tree, y: jax.Array, microbatch: Batch) -> Tree:
                result = model.head_loss(shared, y, microbatch)
                return (result[0][None], result[1]) if self.has_aux else result[None]

            total = jnp.asarray(model.loss_weight(batch), jnp.float32)
            found = self.training.forward(functions, collect, params, batch, total)
            losses, outputs = found if self.has_aux else (found, None)
            return (losses.sum() / total, outputs) if self.has_aux else losses.sum() / total

    def _with_gradients(self, params: Tree, batch: Batch) -> tuple[Any, Tree]:
        """The forward of a differentiation; arguments are jax.custom_derivatives.CustomVJPPrimal."""
        moved = [name for name, array in batch.items() if array.perturbed]
        if moved:
            raise ConfigError(
                f"the batch's {moved[0]!r} depends on what is differentiated, and a pipelined loss has gradients with "
                "respect to its parameters only: wrap it in jax.lax.stop_gradient."
            )
        params, batch = (jax.tree.map(lambda primal: primal.value, tree) for tree in (params, batch))
        with self._on_mesh():
            result, gradients = self._run(params, batch)
        own, frozen = split(params, self.training.trained)
        gradients = jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, own)
        return result, merge(gradients, jax.tree.map(jnp.zeros_like, frozen))

    def _scaled(self, gradients: Tree, cotangent: Any) -> tuple[Tree, None]:
        """The backward: the gradients times the loss's cotangent."""
        factor = cotangent[0] if self.has_aux else cotangent
        if isinstance(factor, SymbolicZero):
            factor = jnp.zeros(factor.shape, factor.dtype)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients), None


def _typed(shapes: Tree, shardings: Tree) -> Tree:
    return jax.tree.map(lambda a, to: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to), shapes, shardings)


def _check_params(params: Tree, expected: Tree, remedy: str) -> None:
    """Raises ConfigError if the parameters are not like the expected ones."""
    found, wanted = (
        {
            jax.tree_util.keystr(path, simple=True, separator="/"): np.shape(leaf)
            for path, leaf in jax.tree.leaves_with_path(t)
        }
        for t in (params, expected)
    )
    for name in [*wanted, *found]:
        if found.get(name) != wanted.get(name):
            of = lambda shapes: str(list(shapes[name])) if name in shapes else "nothing"  # noqa: B023, E731
            raise ConfigError(f"the parameters have {of(found)} as {name}, expected {of(wanted)}: {remedy}.")
