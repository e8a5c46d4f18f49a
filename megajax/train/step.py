"""One training step, one evaluation step, and the state they work on, as jitted programs over a mesh.

A step: cast the fp32 parameters, run the pipeline schedule forwards and backwards over the global batch, sum gradients
over `data`, clip, AdamW. The loss is the mean over the batch's *tokens* (sum of weighted losses over sum of weights), so
it does not depend on how the batch is cut into microbatches or over replicas.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.config import RunConfig
from megajax.models import gpt
from megajax.models.block import RESIDUAL
from megajax.parallel.rules import AxisRules
from megajax.parallel.vocabulary import lookup
from megajax.pipeline import layout
from megajax.pipeline.executor import forward_function, gradient_function
from megajax.pipeline.schedule import Schedule
from megajax.pipeline.schedules import make_schedule
from megajax.train.optimizer import learning_rate_schedule, make_optimizer, updates_made
from megajax.train.precision import LossScale, cast, compute_dtype, make_loss_scale

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that training carries from step to step."""

    params: Tree  # fp32; blocks dealt over chunks and ranks (pipeline/layout.py)
    optimizer_state: Tree
    loss_scale: LossScale


def parameter_specs(run: RunConfig) -> Tree:
    """The PartitionSpec of every parameter, blocks in dealt form."""
    rules = axis_rules(run)
    specs = jax.tree.map(rules.spec, gpt.logical_axes(run.model), is_leaf=lambda node: isinstance(node, tuple))
    is_spec = lambda node: isinstance(node, P)  # noqa: E731
    return {**specs, "blocks": jax.tree.map(layout.dealt_spec, specs["blocks"], is_leaf=is_spec)}


def initial_params(run: RunConfig, key: jax.Array) -> Tree:
    """Fresh fp32 parameters, blocks dealt. Values depend on the key, the model and nothing of the mesh."""
    params = gpt.init(run.model, key, run.parallel.tensor)
    parallel, placement = run.parallel, run_schedule(run).placement
    blocks = layout.deal(params["blocks"], stages=parallel.pipe, chunks=parallel.chunks, placement=placement)
    return {**params, "blocks": blocks}


def run_schedule(run: RunConfig) -> Schedule:
    """The schedule of the run's training step."""
    parallel = run.parallel
    return make_schedule(parallel.schedule, stages=parallel.pipe, microbatches=run.microbatches, chunks=parallel.chunks)


def axis_rules(run: RunConfig) -> AxisRules:
    """How the run's arrays lie on its mesh."""
    return AxisRules(sequence_parallel=run.parallel.sequence_parallel)


def constrain_activation(run: RunConfig) -> Callable[[jax.Array], jax.Array]:
    """`x -> x` that lays out what travels between blocks, [samples, sequence, hidden]."""
    return lambda x: axis_rules(run).constrain(x, *RESIDUAL)


def model_functions(run: RunConfig, *, training: bool) -> gpt.ModelFunctions:
    """The model's pure functions on this run's mesh axes; without dropout unless `training`."""
    model = run.model if training else dataclasses.replace(run.model, dropout=0.0)
    rules = axis_rules(run)
    return gpt.functions(
        model,
        constrain=rules.constrain,
        lookup=lambda table, tokens: lookup(table, tokens, rules.sequence_parallel),
        dtype=compute_dtype(run.train.precision),
        recompute=run.parallel.recompute,
        dropout_seed=run.train.seed,
    )


class Training:
    """The compiled programs of a run on a mesh.

    Batches are dicts of [microbatches, samples, ...] (tokens, labels, weights, sample); see `data/loader.py`.
    """

    def __init__(self, run: RunConfig, mesh: Mesh):
        """Builds the programs; nothing is compiled before its first call."""
        self.run, self.mesh, self.schedule = run, mesh, run_schedule(run)
        self.optimizer = make_optimizer(run.train, gpt.decay_mask(run.model))
        self.params_sharding = self._named(parameter_specs(run))
        self.state_sharding = self._state_sharding()
        self.batch_sharding = batch = NamedSharding(mesh, P(None, "data"))
        state = self.state_sharding
        self._init = jax.jit(self._fresh_state, out_shardings=state)
        self._train = jax.jit(
            self._train_step, in_shardings=(state, batch), out_shardings=(state, None), donate_argnums=0
        )
        self._evaluate = jax.jit(self._mean_loss, in_shardings=(state.params, batch))
        self._logits = jax.jit(self._last_logits, in_shardings=(state.params, batch))

    def init_state(self) -> TrainState:
        """Fresh parameters and optimizer state, made where they lie."""
        with jax.set_mesh(self.mesh):
            return self._init()

    def train_step(self, state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update; `state` is used up. Metrics, all scalars: loss, grad_norm, learning_rate, loss_scale, skipped, tokens.

        Where the gradient is not finite nothing is updated but the loss scale, and skipped is 1.
        """
        with jax.set_mesh(self.mesh):
            return self._train(state, batch)

    def compile_train_step(self, state: TrainState, batch: Tree) -> jax.stages.Compiled:
        """The compiled step, to read its memory and communication; arguments may be jax.ShapeDtypeStruct."""
        with jax.set_mesh(self.mesh):
            return self._train.lower(state, batch).compile()

    def loss_and_gradients(self, params: Tree, batch: Tree, *, poison_bubbles: bool = False) -> tuple[jax.Array, Tree]:
        """Mean loss and fp32 gradients in the layout of `params`, without an update."""
        with jax.set_mesh(self.mesh):
            return jax.jit(self._loss_and_gradients, static_argnums=3)(params, batch, jnp.float32(1), poison_bubbles)

    def evaluate(self, params: Tree, batch: Tree) -> jax.Array:
        """Mean loss per token, without dropout; forwards only."""
        with jax.set_mesh(self.mesh):
            return self._evaluate(params, batch)

    def next_token_logits(self, params: Tree, tokens: np.ndarray, position: int) -> jax.Array:
        """Logits for the token after `position`.

        Args:
          tokens: int [samples, sequence_length]; what stands after `position` has no influence.

        Returns:
          fp32 [samples, vocabulary].
        """
        samples = tokens.shape[0]
        # Every replica needs a sample: the last one is repeated to fill up.
        tokens = np.pad(tokens, ((0, -samples % self.run.parallel.data), (0, 0)), mode="edge")
        batch = {
            "tokens": tokens[None].astype(np.int32),
            "position": np.full((1, tokens.shape[0]), position, np.int32),
            "sample": np.zeros((1, tokens.shape[0]), np.uint32),
        }
        with jax.set_mesh(self.mesh):
            return self._logits(params, batch)[:samples]

    # The functions below are traced.

    def _fresh_state(self) -> TrainState:
        params = initial_params(self.run, jax.random.key(self.run.train.seed))
        return TrainState(params, self.optimizer.init(params), make_loss_scale(self.run.train))

    def _train_step(self, state: TrainState, batch: Tree):
        scale = state.loss_scale.scale
        loss, gradients = self._loss_and_gradients(state.params, batch, scale)
        gradients = jax.tree.map(lambda gradient: gradient / scale, gradients)
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(norm)
        updates, optimizer_state = self.optimizer.update(gradients, state.optimizer_state, state.params)
        keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)  # noqa: E731
        new = TrainState(
            keep(optax.apply_updates(state.params, updates), state.params),
            keep(optimizer_state, state.optimizer_state),
            state.loss_scale.update(finite),
        )
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": learning_rate_schedule(self.run.train)(updates_made(state.optimizer_state)),
            "loss_scale": scale,
            "skipped": 1 - finite.astype(jnp.int32),
            "tokens": batch["weights"].sum(),
        }
        return new, metrics

    def _loss_and_gradients(self, params: Tree, batch: Tree, scale: jax.Array, poison_bubbles: bool = False):
        run = gradient_function(
            model_functions(self.run, training=True),
            self.schedule,
            self.mesh,
            constrain=constrain_activation(self.run),
            poison_bubbles=poison_bubbles,
        )
        total = batch["weights"].sum()
        loss, gradients = run(cast(params, compute_dtype(self.run.train.precision)), batch, scale / total)
        return loss / total, jax.lax.with_sharding_constraint(gradients, self.params_sharding)

    def _mean_loss(self, params: Tree, batch: Tree) -> jax.Array:
        functions = model_functions(self.run, training=False)
        collect = lambda shared, y, microbatch: functions.head_loss(shared, y, microbatch)[None]  # noqa: E731
        return self._forward(functions, collect, params, batch).sum() / batch["weights"].sum()

    def _last_logits(self, params: Tree, batch: Tree) -> jax.Array:
        functions = model_functions(self.run, training=False)

        def collect(shared, y, microbatch):
            here = microbatch["position"][:, None] == jnp.arange(y.shape[1])
            return functions.logits(shared, jnp.where(here[..., None], y, 0).sum(1, keepdims=True))[:, 0]

        return self._forward(functions, collect, params, batch)[0, :, : self.run.model.vocabulary]

    def _forward(self, functions, collect: Callable, params: Tree, batch: Tree) -> Tree:
        parallel, microbatches = self.run.parallel, batch["tokens"].shape[0]
        schedule = make_schedule(
            "forward_only",
            stages=parallel.pipe,
            microbatches=microbatches,
            chunks=parallel.chunks,
            placement=self.schedule.placement,
        )
        run = forward_function(functions, collect, schedule, self.mesh, constrain=constrain_activation(self.run))
        return run(cast(params, compute_dtype(self.run.train.precision)), batch)

    def _named(self, specs: Tree) -> Tree:
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=lambda node: isinstance(node, P)
        )

    def _state_sharding(self) -> TrainState:
        replicated = NamedSharding(self.mesh, P())
        shapes = jax.eval_shape(self._fresh_state)
        optimizer = optax.tree_utils.tree_map_params(
            self.optimizer,
            lambda _, sharding: sharding,
            shapes.optimizer_state,
            self.params_sharding,
            transform_non_params=lambda _: replicated,
        )
        return TrainState(self.params_sharding, optimizer, jax.tree.map(lambda _: replicated, shapes.loss_scale))


def make_training(run: RunConfig, mesh: Mesh) -> Training:
    """The programs of a validated run on its mesh."""
    return Training(run, mesh)
