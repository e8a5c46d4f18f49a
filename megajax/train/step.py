"""One training step, one evaluation step, and the state they work on, as jitted programs over a mesh.

A step: cast the fp32 parameters, run the pipeline schedule forwards and backwards over the global batch, sum gradients
over `data`, clip, AdamW. The loss is the mean over the batch's *tokens* (sum of weighted losses over sum of weights), so
it does not depend on how the batch is cut into microbatches or over replicas.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint.layout import StateLayout
from megajax.config import RunConfig
from megajax.config.run_schedule import run_schedule
from megajax.models import gpt
from megajax.models.remat import grouped
from megajax.models.transformer import RESIDUAL
from megajax.ops.attention import Choice
from megajax.ops.ring_attention import of_owner, split_batch
from megajax.ops.vocabulary import lookup, over_pipe
from megajax.pipeline import pipedream_2bw
from megajax.pipeline.executor import forward_function, gradient_function
from megajax.schedules.named import make_schedule
from megajax.schedules.schedule import Schedule
from megajax.train.lr_schedule import learning_rate
from megajax.train.operations import attention_choice, block_operations, check_offload
from megajax.train.optimizer import make_optimizer, samples_trained
from megajax.train.precision import LossScale, cast, compute_dtype, make_loss_scale
from megajax.train.sharding import axis_rules, group_blocks, initial_params, parameter_specs, share_ends

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that training carries from step to step."""

    params: Tree  # fp32; blocks dealt over chunks and ranks (pipeline/layout.py)
    optimizer_state: Tree
    loss_scale: LossScale
    in_flight: Tree = ()  # what a pipeline that is not drained holds between steps (pipeline/continuous.py)


def model_functions(run: RunConfig, schedule: Schedule, attention: Choice, *, training: bool) -> gpt.ModelFunctions:
    """The model's pure functions on this run's mesh axes, for this schedule; without dropout unless `training`."""
    model = run.model if training else dataclasses.replace(run.model, dropout=0.0)
    rules = axis_rules(run)
    find, ranks = partial(lookup, sequence_parallel=rules.sequence_parallel), gpt.ALL_ROWS
    if share_ends(run):
        find, ranks = over_pipe(rules.sequence_parallel)
    group = run.parallel.recompute_blocks
    functions = gpt.functions(
        model,
        constrain=rules.constrain,
        lookup=find,
        ranks=ranks,
        operations=block_operations(run, rules, schedule, attention.name),
        dtype=compute_dtype(run.train.precision),
        recompute=run.parallel.recompute if group == 1 else "none",
        dropout_seed=run.train.seed,
    )
    return functions if group == 1 else dataclasses.replace(functions, block=grouped(functions.block, group))


class Training:
    """The compiled programs of a run on a mesh.

    Batches are dicts of [microbatches, samples, ...] (tokens, labels, weights, sample); see `data/loader.py`. A step is
    compiled once for each batch size that it meets. With several processes each gives the whole batch, and only its own
    devices' part of it is used.
    """

    def __init__(self, run: RunConfig, mesh: Mesh):
        """Builds the programs; nothing is compiled before its first call."""
        self.run, self.mesh, self.schedule = run, mesh, run_schedule(run)
        self.attention = attention_choice(run, mesh.devices.flat[0])
        check_offload(run, mesh.devices.flat[0])
        self.functions = model_functions(run, self.schedule, self.attention, training=True)
        self.optimizer = make_optimizer(run.train, gpt.decay_mask(run.model))
        self.specs = parameter_specs(run)
        self.params_sharding = self._named(self.specs.stored)
        rules = axis_rules(run)
        self.layout = {  # how the executor lays things out
            "constrain": lambda x: rules.constrain(x, *RESIDUAL),
            "specs": self.specs.executor(run.parallel.recompute_blocks),
            "share_ends": share_ends(run),
        }
        self.state_shapes = jax.eval_shape(self._fresh_state)
        self.state_sharding = self._state_sharding()
        # A sample that context ranks share is no rank's alone: the program, not the caller, shares it out.
        batch = self.batch_sharding = NamedSharding(mesh, P(None, "data") if run.parallel.context == 1 else P())
        state, replicated = self.state_sharding, NamedSharding(mesh, P())
        self._init = jax.jit(self._fresh_state, out_shardings=state)
        self._train = jax.jit(
            self._train_step, in_shardings=(state, batch), out_shardings=(state, replicated), donate_argnums=0
        )
        self._evaluate = jax.jit(self._mean_loss, in_shardings=(state.params, batch), out_shardings=replicated)
        self._logits = jax.jit(self._last_logits, in_shardings=(state.params, batch), out_shardings=replicated)
        self._gradients = jax.jit(self._loss_and_gradients, static_argnums=3)

    @property
    def state_layout(self) -> StateLayout:
        """What saving and loading checkpoints need to know of the state."""
        return StateLayout(self.state_shapes, self.state_sharding, self.schedule.placement)

    def step_shapes(self) -> tuple[TrainState, Tree]:
        """The arguments of `train_step` as jax.ShapeDtypeStruct: enough to compile it, without data and without devices."""
        rows = (self.run.microbatches, self.run.parallel.microbatch_size * self.run.parallel.data)
        of = lambda dtype: jax.ShapeDtypeStruct((*rows, self.run.model.sequence_length), dtype)  # noqa: E731
        batch = {"tokens": of(np.int32), "labels": of(np.int32), "weights": of(np.float32)}
        return self.state_shapes, batch | {"sample": jax.ShapeDtypeStruct(rows, np.uint32)}

    def init_state(self) -> TrainState:
        """Fresh parameters and optimizer state, made where they lie."""
        with jax.set_mesh(self.mesh):
            return self._init()

    def train_step(self, state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update; `state` is used up. Metrics, all scalars: loss, grad_norm, learning_rate, loss_scale, skipped, tokens.

        Where the loss or the gradient is not finite nothing is updated but the loss scale, and skipped is 1.
        """
        with jax.set_mesh(self.mesh):
            return self._train(state, self.place(batch))

    def compile_train_step(self, state: TrainState, batch: Tree) -> jax.stages.Compiled:
        """The compiled step, to read its memory and communication; arguments may be jax.ShapeDtypeStruct."""
        with jax.set_mesh(self.mesh):
            return self._train.lower(state, batch).compile()

    def loss_and_gradients(
        self, params: Tree, batch: Tree, *, scale: float = 1.0, poison_bubbles: bool = False
    ) -> tuple[jax.Array, Tree]:
        """Mean loss, and fp32 gradients of `scale` times it in the layout of `params`, without an update."""
        with jax.set_mesh(self.mesh):
            return self._gradients(params, self.place(batch), np.float32(scale), poison_bubbles)

    def evaluate(self, params: Tree, batch: Tree) -> jax.Array:
        """Mean loss per token, without dropout; forwards only."""
        with jax.set_mesh(self.mesh):
            return self._evaluate(params, self.place(batch))

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
            return self._logits(params, self.place(batch))[:samples]

    def place(self, batch: Tree) -> Tree:
        """The batch as global arrays, where other processes have devices too; jit does it by itself where not."""
        if jax.process_count() == 1:
            return batch
        placed = lambda a: jax.make_array_from_callback(a.shape, self.batch_sharding, a.__getitem__)  # noqa: E731
        return jax.tree.map(lambda a: a if isinstance(a, jax.Array) else placed(a), batch)

    # The functions below are traced.

    def _cast(self, params: Tree) -> Tree:
        """The parameters to compute with: in their type, then together from where they are stored."""
        params = cast(params, compute_dtype(self.run.train.precision))
        params = jax.lax.with_sharding_constraint(params, self._named(self.specs.computed))
        return {**params, "blocks": group_blocks(params["blocks"], self.run.parallel.recompute_blocks)}

    def _gradients_of(self, params: Tree, gradients: Tree) -> Tree:
        """The executor's gradients as parameters are stored."""
        gradients = jax.tree.map(lambda gradient, like: gradient.reshape(like.shape), gradients, params)
        return jax.lax.with_sharding_constraint(gradients, self.params_sharding)

    def _split(self, batch: Tree) -> Tree:
        return split_batch(batch, self.run.parallel.data, self.run.parallel.context)

    def _fresh_state(self) -> TrainState:
        params = initial_params(self.run, jax.random.key(self.run.train.seed), self.schedule.placement)
        return TrainState(params, self.optimizer.init(params), make_loss_scale(self.run.train))

    def _train_step(self, state: TrainState, batch: Tree):
        scale = state.loss_scale.scale
        loss, gradients = self._loss_and_gradients(state.params, batch, scale)
        gradients = jax.tree.map(lambda gradient: gradient / scale, gradients)
        return self._update(state, gradients, loss, batch)

    def _update(self, state: TrainState, gradients: Tree, loss: jax.Array, batch: Tree, ready: jax.Array | bool = True):
        """The state after an update, which is left out where `gradients` are not finite or not `ready`; and metrics."""
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        batch_size = batch["sample"].size
        updates, optimizer_state = self.optimizer.update(
            gradients, state.optimizer_state, state.params, batch_size=batch_size
        )
        keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite & ready, n, o), new, old)  # noqa: E731
        new = dataclasses.replace(
            state,
            params=keep(optax.apply_updates(state.params, updates), state.params),
            optimizer_state=keep(optimizer_state, state.optimizer_state),
            loss_scale=state.loss_scale.update(finite),
        )
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": learning_rate(self.run.train, samples_trained(state.optimizer_state) + batch_size),
            "loss_scale": state.loss_scale.scale,
            "skipped": 1 - finite.astype(jnp.int32),
            "tokens": batch["weights"].sum(),
        }
        return new, metrics

    def _loss_and_gradients(self, params: Tree, batch: Tree, scale: jax.Array, poison_bubbles: bool = False):
        run = gradient_function(
            self.functions,
            run_schedule(self.run, len(batch["tokens"])),
            self.mesh,
            **self.layout,
            offload=self.run.parallel.offload_activations,
            unroll=self.run.parallel.unroll_blocks,
            compute_bubbles=bool(self.run.parallel.rings),
            poison_bubbles=poison_bubbles,
        )
        total = batch["weights"].sum()
        losses, gradients = run(self._cast(params), self._split(batch), scale / total)
        return losses.sum() / total, self._gradients_of(params, gradients)

    def _mean_loss(self, params: Tree, batch: Tree) -> jax.Array:
        functions = self._functions_without_dropout()
        collect = lambda shared, y, microbatch: functions.head_loss(shared, y, microbatch)[None]  # noqa: E731
        return self.forward(functions, collect, params, batch).sum() / batch["weights"].sum()

    def _last_logits(self, params: Tree, batch: Tree) -> jax.Array:
        functions = self._functions_without_dropout()

        def collect(shared, y, microbatch):
            here = microbatch["position"][:, None] == microbatch.get("positions", jnp.arange(y.shape[1]))
            return functions.logits(shared, jnp.where(here[..., None], y, 0).sum(1, keepdims=True))[:, 0]

        logits = self.forward(functions, collect, params, batch)[0, :, : self.run.model.vocabulary]
        parallel, length = self.run.parallel, batch["tokens"].shape[2]
        return of_owner(logits, batch["position"][0], length, parallel.data, parallel.context)

    def _functions_without_dropout(self) -> gpt.ModelFunctions:
        return model_functions(self.run, self.schedule, self.attention, training=False)

    def forward(self, functions, collect: Callable, params: Tree, batch: Tree) -> Tree:
        """What `collect` makes of the last block's output (see `forward_function`); to be traced."""
        parallel, microbatches = self.run.parallel, batch["tokens"].shape[0]
        schedule = make_schedule(
            "forward_only",
            stages=parallel.pipe,
            microbatches=microbatches,
            chunks=parallel.chunks,
            placement=self.schedule.placement,
        )
        run = forward_function(functions, collect, schedule, self.mesh, **self.layout)
        batch = split_batch(batch, parallel.data, parallel.context)
        return run(self._cast(params), batch)

    def _named(self, specs: Tree) -> Tree:
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=lambda node: isinstance(node, P)
        )

    def _state_sharding(self) -> TrainState:
        replicated, shapes = NamedSharding(self.mesh, P()), self.state_shapes
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
    if run.parallel.schedule == pipedream_2bw.NAME:
        return ContinuousTraining(run, mesh)
    return Training(run, mesh)


class ContinuousTraining(Training):
    """PipeDream-2BW: each step's batch goes into a pipeline that still holds the last batch, and its update is that one's.

    The first step makes no update. The loss of a step is the mean over the tokens that passed the head in it, most of
    them of its own batch, at the weights that each of them met.
    """

    def __init__(self, run: RunConfig, mesh: Mesh):
        """Builds the programs."""
        super().__init__(run, mesh)
        sizes = run.parallel.pipe, run.microbatches
        self.pipeline = pipedream_2bw.Continuous(self.functions, *sizes, mesh, **self.layout)
        self._train = jax.jit(self._train_step, donate_argnums=0)
        self._empty = jax.jit(lambda params, batch: self.pipeline.start(self._cast(params), self._split(batch)))

    def train_step(self, state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, jax.Array]]:
        """As `Training.train_step`; a state with nothing in flight, fresh or restored, begins with an empty pipeline."""
        with jax.set_mesh(self.mesh):
            batch = self.place(batch)
            if not jax.tree.leaves(state.in_flight):
                state = dataclasses.replace(state, in_flight=self._empty(state.params, batch))
            return self._train(state, batch)

    def _train_step(self, state: TrainState, batch: Tree):
        flying = state.in_flight
        losses, counted, gradients, after = self.pipeline.step(
            self._cast(state.params), self._split(batch), 1 / batch["weights"].sum(), flying
        )
        tokens = jnp.where(counted, after.batch["weights"].sum((1, 2)), 0).sum()
        gradients = self._gradients_of(state.params, gradients)
        new, metrics = self._update(state, gradients, losses.sum() / tokens, batch, ready=flying.step > 0)
        placed = {name: getattr(new, name) for name in ("params", "optimizer_state")}
        shardings = {name: getattr(self.state_sharding, name) for name in placed}
        return dataclasses.replace(new, in_flight=after, **jax.lax.with_sharding_constraint(placed, shardings)), metrics
