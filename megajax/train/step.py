"""One training step, one evaluation step, and the state they work on, as jitted programs over a mesh.

A step: cast the fp32 parameters, run the pipeline schedule forwards and backwards over the global batch, sum gradients
over `data`, clip, update. The loss is the sum of the microbatches' losses over the batch's `loss_weight` (for GPT its number
of tokens), so it does not depend on how the batch is split into microbatches or over replicas.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint.layout import StateLayout, arrange, name_of
from megajax.config import RunConfig
from megajax.config.batch_ramp import PADDING
from megajax.models.context import attention_choice, model_context, model_rules, model_shapes
from megajax.models.ids import checked_ids
from megajax.models.interface import ExecutorFunctions, PipelineModel, batch_shapes, model_class
from megajax.ops.ring_attention import split_batch
from megajax.pipeline.device_checks import check_devices
from megajax.pipeline.executor import ExecutorOptions, forward_function, gradient_function
from megajax.pipeline.layout import batch_spec, is_spec, leading_sizes, map_kinds, of_all_layers
from megajax.pipeline.parameters import group_blocks, initial_params, parameter_specs
from megajax.pipeline.program import StepProgram
from megajax.pipeline.trained import merge, only_trained, split, trained_mask
from megajax.runtime.compat import updates_in_place
from megajax.schedules.registry import make_schedule
from megajax.sharding.optimizer_state import state_specs
from megajax.sharding.rules import AxisRules
from megajax.sharding.whole_layers import on_whole_layers
from megajax.train.continuous import Continuous
from megajax.train.deadlocks import with_check
from megajax.train.latency_estimates import compiler_options, knows_matmuls, with_latencies
from megajax.train.lr_schedule import Schedule, learning_rate
from megajax.train.optimizer import MakeOptimizer, make_optimizer, samples_trained
from megajax.train.precision import cast_frozen, compute_dtype, make_loss_scale, shared_apart, to_compute, uncast
from megajax.train.state import TrainState, average_of, averaged

Tree = Any


class Training:
    """The compiled programs of a run on a mesh, as its `StepProgram` describes them.

    Batches are dicts of [microbatches, samples, ...], with one sample as the model's `batch_shapes` says. A step is compiled
    once for each batch size that it is given. With several processes each gives the whole batch, and only its own devices'
    part of it is used.

    Attributes:
      program, run, device: what the step is, the run that asked for it, and a device of its mesh.
      schedule, where: the program's table, and its layers of each pipeline stage.
      model: the run's model in training.
      rules: the sharding rules.
      trained: mask of the parameters that are trained; None: all (`pipeline/trained.py`).
      only_trained: a tree like the parameters -> what is trained of it, which gradients and optimizer state are like.
    """

    def __init__(
        self,
        program: StepProgram,
        mesh: Mesh,
        model: type[PipelineModel],
        rules: AxisRules,
        optimizer: MakeOptimizer | None = None,
        rate_at: Schedule | None = None,
    ):
        """Builds the programs; nothing is compiled before its first call. For arguments see `make_training`."""
        self.program, self.mesh, self.model_class, self.rules = program, mesh, model, rules
        self.schedule, self.where, self.device = program.schedule, program.layers, mesh.devices.flat[0]
        run = self.run = program.run
        self.model = self._model(training=True)
        self.functions = ExecutorFunctions.from_model(self.model, run.parallel.recompute_blocks)
        self.trained = trained_mask(self.model, run.train.freeze)
        self.only_trained = functools.partial(only_trained, trained=self.trained)
        self.specs = parameter_specs(model_shapes(run, model, rules), run.parallel, rules, self.trained)
        self.params_sharding = self._named(self.specs.stored)
        self.has_own_schedule = rate_at is not None
        self.rate_at = rate_at or (lambda samples: learning_rate(run.train, samples))
        self.optimizer = make_optimizer(
            run.train,
            self.only_trained(self.model.decay_mask()),
            self.only_trained(self.model.logical_axes()),
            optimizer,
            self.rate_at,
            vocabulary=getattr(run.model, "vocabulary", None),
            on_whole_layers=on_whole_layers(mesh, self.only_trained(self.specs.stored)),
        )
        self.executor_options = ExecutorOptions(
            constrain=lambda x: self.rules.constrain_tree(x, self.model.activation_axes),
            specs=self.specs.executor(run.parallel.recompute_blocks),
            share_ends=program.vocabulary_over_pipe,
            offload=run.parallel.offload_activations,
            has_aux=self.model.has_outputs,
            in_place=program.in_place,
            merged=program.merges,
            timed=knows_matmuls(program, self.device, self.model),
            unrolled=program.unrolls,
            compute_bubbles=program.computes_bubbles,
            block_counts=None if self.where.kinds else self.where.unequal_counts,
            stage_kinds=self.where if self.where.kinds else None,
            trained=self.trained,
        )
        self.state_shapes = jax.eval_shape(self._fresh_state)
        self.state_sharding = self._state_sharding()
        rows = batch_spec(mesh) if run.parallel.context == 1 else P()  # context ranks share samples: the program splits
        batch = self.batch_sharding = NamedSharding(mesh, rows)
        state, replicated = self.state_sharding, NamedSharding(mesh, P())
        self._init = jax.jit(self._fresh_state, out_shardings=state)
        self._train = self._jit_step(state, replicated)
        self._no_hold = jax.jit(lambda: jnp.int32(0), out_shardings=replicated)
        evaluate = jax.jit(self._mean_loss, in_shardings=(state.params, batch), out_shardings=replicated)
        self._evaluate = self.checked(evaluate)
        self._gradients = self.checked(jax.jit(self._loss_and_gradients, static_argnums=3), static=(3,))

    @property
    def state_layout(self) -> StateLayout:
        """The layout of the state."""
        return StateLayout(self.state_shapes, self.state_sharding, self.where)

    @property
    def stored_layout(self) -> StateLayout:
        """The layout of what checkpoints hold: of adapters to a model of `init_from`, no weights of that model."""
        is_apart = getattr(self.run.model, "lora", 0) and self.run.train.init_from
        return self.state_layout.with_params(self.only_trained) if is_apart else self.state_layout

    def stored(self, state: TrainState) -> tuple[StateLayout, TrainState]:
        """`stored_layout`, and what a checkpoint of a state holds; its arrays may be those of the state."""
        return self.stored_layout, state

    def refilled(self, state: TrainState, batch: Callable[[int], Tree], consumed_samples: int) -> TrainState:
        """The state to resume from, of one that a checkpoint holds; `batch(consumed_samples)` is the next batch."""
        return state

    def step_shapes(self) -> tuple[TrainState, Tree]:
        """The arguments of `train_step` as jax.ShapeDtypeStruct: enough to compile it, without data and without devices."""
        rows = (self.run.microbatches, self.run.parallel.microbatch_size * self.run.parallel.data)
        whole = lambda sample: jax.ShapeDtypeStruct((*rows, *sample.shape), sample.dtype)  # noqa: E731
        return self.state_shapes, {name: whole(sample) for name, sample in batch_shapes(self.run, self.model).items()}

    def init_state(self) -> TrainState:
        """Fresh parameters and optimizer state, created sharded."""
        with jax.set_mesh(self.mesh):
            return self._init()

    takes_hold = True  # whether `train_step` takes `hold`

    def train_step(
        self, state: TrainState, batch: Tree, hold: jax.Array | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update; `state` is donated. Metrics: scalars loss, grad_norm, learning_rate, loss_scale, skipped, tokens; and
        the model's measurements of each layer, [layers, n] (`PipelineModel.take_measurements`), NaN for a layer without any.

        If the loss or the gradient is not finite only the loss scale is updated, and skipped is 1. "tokens" is the batch's
        `loss_weight`.

        Args:
          hold: int32 scalar; where it is not 0 the returned state equals `state`, the loss scale included. The loop passes
            the `skipped` of the step before, which it has not read yet. None: 0.
        """
        with jax.set_mesh(self.mesh):
            return self._train(state, self.place(batch), self._no_hold() if hold is None else hold)

    def compile_train_step(self, state: TrainState, batch: Tree) -> jax.stages.Compiled:
        """The compiled step, to read its memory and communication; arguments may be jax.ShapeDtypeStruct."""
        with jax.set_mesh(self.mesh):
            return self._train.lower(state, batch, jax.ShapeDtypeStruct((), np.int32)).compile()

    def loss_and_gradients(
        self, params: Tree, batch: Tree, *, scale: float = 1.0, poison_bubbles: bool = False
    ) -> tuple[jax.Array, Tree]:
        """Mean loss, and fp32 gradients of `scale` times it in the layout of `only_trained(params)`, without an update."""
        with jax.set_mesh(self.mesh):
            return self._gradients(params, self.place(batch), np.float32(scale), poison_bubbles)

    def evaluate(self, params: Tree, batch: Tree) -> jax.Array:
        """Mean loss, without dropout; forwards only."""
        with jax.set_mesh(self.mesh):
            return self._evaluate(params, self.place(batch))

    def loss_weight(self, batch: Tree) -> float:
        """What `evaluate` and a step take the mean over: the number of tokens, or of samples."""
        return float(self.model.loss_weight(checked_ids(batch, self.model.id_bounds())))

    def place(self, batch: Tree) -> Tree:
        """The batch, with its ids checked; as global arrays if other processes have devices too, which jit does if not."""
        batch = checked_ids(batch, self.model.id_bounds())
        if jax.process_count() == 1:
            return batch
        placed = lambda a: jax.make_array_from_callback(a.shape, self.batch_sharding, a.__getitem__)  # noqa: E731
        return jax.tree.map(lambda a: a if isinstance(a, jax.Array) else placed(a), batch)

    def _jit_step(self, state: TrainState, *more: NamedSharding) -> Any:
        """Jits `_train_step`; `state` and `more` are the shardings of its state and of its arguments after the batch."""
        described = self.program, self.device, self.model
        step = jax.jit(
            self._train_step,
            in_shardings=(state, self.batch_sharding, *more),
            out_shardings=(state, NamedSharding(self.mesh, P())),
            donate_argnums=0,
            compiler_options=compiler_options(*described),
        )
        return self.checked(with_latencies(step, *described))

    def checked(self, function: Any, static: tuple[int, ...] = ()) -> Any:
        """The jitted function; before the first run of a program, it is checked for collectives that would hang."""
        return with_check(function, self.model_class, self.run.parallel, self.mesh, static)

    # The functions below are traced.

    def _loss_weight(self, batch: Tree) -> jax.Array:
        return jnp.asarray(self.model.loss_weight(batch), jnp.float32)

    def _cast(self, params: Tree) -> Tree:
        """The parameters to compute with: first cast, then gathered from their stored sharding."""
        params = to_compute(params, uncast(self.model, self.specs, self.program.drains), self.run.train.precision)
        params = shared_apart(params) if self.program.in_place else params
        params = jax.lax.with_sharding_constraint(params, self._named(self.specs.computed))
        return {**params, "blocks": group_blocks(params["blocks"], self.run.parallel.recompute_blocks)}

    def _gradients_of(self, params: Tree, gradients: Tree) -> Tree:
        """The executor's gradients, sharded as parameters are stored."""
        gradients = jax.tree.map(lambda own, like: own.reshape(like.shape), gradients, self.only_trained(params))
        return jax.lax.with_sharding_constraint(gradients, self.only_trained(self.params_sharding))

    def _inputs(self, params: Tree, batch: Tree, cotangent: jax.Array | float = 1.0) -> tuple[Tree, Tree, Tree]:
        """The executor's arguments: parameters, the batch, and arrays that need collectives before the ticks start.

        `cotangent` [microbatches] or a scalar, of the loss's gradients.
        """
        params, given, batch = self._cast(params), batch, self.model.prepare_batch(batch)
        added = [array for name, array in batch.items() if name not in given]
        factors = jnp.reshape(cotangent, (-1, 1))
        batch = {**batch, **{name: batch[name] * factors for name in self.model.scaled_arrays if name in batch}}
        batch = split_batch(batch, self.run.parallel.data, self.run.parallel.context)
        return params, batch, (added, self.specs.gathered(params))

    def _fresh_state(self) -> TrainState:
        params = self.fresh_params()
        own = self.only_trained(params)
        ema = average_of(self.run.train, own)
        return TrainState(params, self.optimizer.init(own), make_loss_scale(self.run.train), ema=ema)

    def fresh_params(self) -> Tree:
        """Initial parameters as they are stored; to be traced."""
        shapes = model_shapes(self.run, self.model_class, self.rules)
        key, shardings = jax.random.key(self.run.train.seed), self.params_sharding["blocks"]
        of_kind = lambda where, blocks, own: jax.tree.map(lambda a, to: arrange(a, where, to), blocks, own)  # noqa: E731
        place = lambda blocks, where: map_kinds(of_kind, where, blocks, shardings)  # noqa: E731
        params = initial_params(shapes, self.run.parallel, key, self.schedule.placement, place)
        return cast_frozen(params, self.trained, self.model.fp32_mask(), self.run.train.precision)

    def _train_step(self, state: TrainState, batch: Tree, hold: jax.Array):
        return self.traced_step(state, batch, hold)[0]

    def traced_step(
        self, state: TrainState, batch: Tree, hold: jax.Array, factors: jax.Array | None = None, **options
    ) -> tuple[tuple[TrainState, dict[str, jax.Array]], Tree, jax.Array, Tree]:
        """The step of `train_step`, to be traced, with the values that megajax.verify compares.

        Args:
          factors: fp32 [microbatches], of each microbatch's loss in the gradients; None: 1.
          options: fields of `ExecutorOptions` that replace the run's.

        Returns:
          ((state, metrics), fp32 gradients, each microbatch's summed loss, the executor's records).
        """
        scale = state.loss_scale.scale
        cotangent = scale if factors is None else scale * factors
        loss, gradients, losses, records, outputs = self.execute(state.params, batch, cotangent, **options)
        gradients = jax.tree.map(lambda gradient: gradient / scale, gradients)
        state, metrics = self._update(state, gradients, loss, batch, ready=hold == 0)
        more = {"model": dict(self.model.metrics(outputs, batch))} if self.model.has_outputs else {}
        return (state, metrics | more), gradients, losses, records

    def _update(self, state: TrainState, gradients: Tree, loss: jax.Array, batch: Tree, ready: jax.Array | bool = True):
        """The state after an update, which is skipped if `gradients` are not finite or not `ready`; and metrics."""
        gradients, measurements = self.model.take_measurements(gradients)
        finite = jnp.isfinite(norm := optax.tree.norm(gradients)) & jnp.isfinite(loss)
        batch_size = math.prod(leading_sizes(batch))
        if self.run.train.batch_ramp and "sample" in batch:  # some batches are padded, see data/ramp.py
            batch_size = (batch["sample"] != np.uint32(PADDING)).sum(dtype=jnp.int32)
        params, frozen = split(state.params, self.trained)
        updates, after = self.optimizer.update(gradients, state.optimizer_state, params, batch_size=batch_size)
        updates = self.model.apply_measurements(updates, measurements)
        keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite & ready, n, o), new, old)  # noqa: E731
        scale = jax.tree.map(lambda n, o: jnp.where(ready, n, o), state.loss_scale.update(finite), state.loss_scale)
        new_params = optax.apply_updates(params, updates)
        new = dataclasses.replace(
            state,
            params=merge(keep(new_params, params), frozen),
            ema=keep(averaged(self.run.train, state.ema, new_params), state.ema),
            optimizer_state=keep(after, state.optimizer_state),
            loss_scale=scale,
        )
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": self.rate_at(samples_trained(state.optimizer_state) + batch_size),
            "loss_scale": state.loss_scale.scale,
            "skipped": 1 - finite.astype(jnp.int32),
            "tokens": self._loss_weight(batch),
        }
        further = {"model": one["losses"]} if (one := measurements.pop("outside", {})) else {}
        return new, metrics | of_all_layers(measurements, self.where, self.model.measured_kind) | further

    def _loss_and_gradients(self, params: Tree, batch: Tree, scale: jax.Array, poison_bubbles: bool = False):
        return self.execute(params, batch, scale, poison_bubbles=poison_bubbles)[:2]

    def execute(self, params: Tree, batch: Tree, cotangent: jax.Array | float, **options):
        """(mean loss, gradients sharded as parameters, each microbatch's summed loss, records, the head's outputs)."""
        options = dataclasses.replace(self.executor_options, **options)
        run = gradient_function(self.functions, self.program.schedule_of(leading_sizes(batch)[0]), self.mesh, options)
        total = self._loss_weight(batch)
        computed, inputs, before = self._inputs(params, batch, cotangent)
        losses, gradients, records = run(computed, inputs, cotangent / total, (before, total))
        losses, outputs = losses if self.model.has_outputs else (losses, None)
        return losses.sum() / total, self._gradients_of(params, gradients), losses, records, outputs

    def _mean_loss(self, params: Tree, batch: Tree) -> jax.Array:
        model, functions = self.evaluation()
        collect = lambda shared, y, microbatch: model.only_loss(shared, y, microbatch)[None]  # noqa: E731
        total = self._loss_weight(batch)
        return self.forward(functions, collect, params, batch, total).sum() / total

    def _model(self, training: bool) -> PipelineModel:
        in_one_pass = self.program.in_one_pass if training else ()
        how = self.device, compute_dtype(self.run.train.precision), training, in_one_pass
        return self.model_class(self.run.model, model_context(self.run, self.rules, self.program.attention, *how))

    def evaluation(self) -> tuple[PipelineModel, ExecutorFunctions]:
        """The model without dropout, and its functions, for `forward`."""
        model = self._model(training=False)
        return model, ExecutorFunctions.from_model(model, self.run.parallel.recompute_blocks)

    def forward(
        self, functions: ExecutorFunctions, collect: Callable, params: Tree, batch: Tree, total: Tree = ()
    ) -> Tree:
        """The outputs of `collect` on the last block's output (see `forward_function`); to be traced.

        `total`: the batch's weight, if the caller sums it.
        """
        parallel, (microbatches, _) = self.run.parallel, leading_sizes(batch)
        chunks = {"chunks": parallel.chunks, "placement": self.schedule.placement}
        schedule = make_schedule("forward_only", stages=parallel.pipe, microbatches=microbatches, **chunks)
        run = forward_function(functions, collect, schedule, self.mesh, self.executor_options)
        computed, inputs, before = self._inputs(params, batch)
        return run(computed, inputs, (before, total))

    def _named(self, specs: Tree) -> Tree:
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=is_spec)

    def _state_sharding(self) -> TrainState:
        replicated, shapes = NamedSharding(self.mesh, P()), self.state_shapes
        label = lambda path: f"optimizer_state/{name_of(path)}"  # noqa: E731
        specs = state_specs(self.optimizer.init, *map(self.only_trained, (shapes.params, self.specs.stored)), label)
        loss_scale = jax.tree.map(lambda _: replicated, shapes.loss_scale)
        ema = average_of(self.run.train, self.only_trained(self.params_sharding))
        return TrainState(self.params_sharding, self._named(specs), loss_scale, ema=ema)


def make_training(
    run: RunConfig,
    mesh: Mesh,
    model: type[PipelineModel] | None = None,
    rules: AxisRules | None = None,
    optimizer: MakeOptimizer | None = None,
    rate_at: Schedule | None = None,
) -> Training:
    """The programs of a validated run on its mesh.

    Args:
      run: the run.
      mesh: its mesh.
      model: the class of its model; by default the one registered for the type of `run.model`.
      rules: logical axis -> mesh axes; by default `megajax.models.context.model_rules`.
      optimizer: makes the optimizer; by default that of `run.train`.
      rate_at: the learning rate as a function of the samples trained on (`rate_of`); by default that of `run.train`.

    Raises:
      ConfigError: the mesh's devices cannot run it.
    """
    device, model = mesh.devices.flat[0], model or model_class(run.model)
    rules = rules or model_rules(run, model)
    attention = attention_choice(run, device, model)
    program = StepProgram.of(run, attention, updates_in_place(device), rules.vocabulary_over_pipe)
    check_devices(program, device)
    return (Training if program.drains else ContinuousTraining)(program, mesh, model, rules, optimizer, rate_at)


class ContinuousTraining(Continuous, Training):
    """The programs of PipeDream-2BW."""
