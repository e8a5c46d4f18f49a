"""The training step of a pipeline that is not drained between steps: PipeDream-2BW (`pipeline.pipedream_2bw`).

**Checkpoints.** After step t the pipeline holds batch t, which runs with the weights from before step t's update. A
checkpoint has these weights besides the state, as "in_flight", in the type that is computed with. A run that resumes takes
step t once more, with them and batch t and without an update, which fills the pipeline with the same values. The pipeline's
own arrays, which depend on the layout, are not stored.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from megajax.checkpoint.layout import StateLayout
from megajax.config import ConfigError
from megajax.pipeline.pipedream_2bw import InFlight, PipeDream2BW
from megajax.pipeline.program import StepProgram

__all__ = ["Continuous"]

Tree = Any


class Continuous:
    """What PipeDream-2BW replaces in `Training`: a step's batch enters a pipeline that still holds the last batch, and the
    update is the last one's.

    The first step makes no update. The loss of a step is the mean over the microbatches that passed the head in it, most
    of them of its own batch, each at the weights that it was run with.
    """

    takes_hold = False

    def __init__(self, program: StepProgram, mesh: Mesh, *model_and_rules):
        """As of `Training`."""
        super().__init__(program, mesh, *model_and_rules)
        run = program.run
        if self.model.has_outputs:
            name = type(self.model).__name__
            raise ConfigError(
                f"schedule = {run.parallel.schedule} does not train {name}, whose loss has outputs: pass --schedule 1f1b."
            )
        self.pipeline = PipeDream2BW(self.functions, run.parallel.pipe, run.microbatches, mesh, self.executor_options)
        self._train = self._jit_step(dataclasses.replace(self.state_sharding, in_flight=None))  # XLA shards it
        self._start = lambda params, batch: self.pipeline.start(*self._inputs(params, batch)[:2])
        self._weights = jax.jit(self._weights_in_flight, out_shardings=self.params_sharding)
        self._widen = jax.jit(
            lambda weights, like: jax.tree.map(lambda w, p: w.astype(p.dtype), weights, like),
            out_shardings=self.params_sharding,
        )

    @functools.cached_property
    def stored_layout(self) -> StateLayout:
        """As of `Training`, with the weights of the batch in flight: like the parameters, in the type computed with."""
        with jax.set_mesh(self.mesh):
            weights = jax.eval_shape(self._as_stored, self.state_shapes.params)
        shapes = dataclasses.replace(self.state_shapes, in_flight=weights)
        return StateLayout(shapes, dataclasses.replace(self.state_sharding, in_flight=self.params_sharding), self.where)

    def stored(self, state: Any) -> tuple[StateLayout, Any]:
        """As of `Training`."""
        with jax.set_mesh(self.mesh):
            return self.stored_layout, dataclasses.replace(state, in_flight=self._weights(state))

    def refilled(self, state: Any, batch: Callable[[int], Tree], consumed_samples: int) -> Any:
        """As of `Training`; a state without weights in flight starts with an empty pipeline."""
        if isinstance(state.in_flight, InFlight) or not jax.tree.leaves(state.in_flight):
            return state
        with jax.set_mesh(self.mesh):
            weights = self._widen(state.in_flight, state.params)
        # The first step of an empty pipeline updates nothing.
        last = batch(consumed_samples - self.run.train.global_batch_size)
        filled, _ = self.train_step(dataclasses.replace(state, params=weights, in_flight=()), last)
        return dataclasses.replace(filled, params=state.params)

    def train_step(self, state: Any, batch: Tree) -> tuple[Any, dict[str, jax.Array]]:
        """As `Training.train_step`; a state with nothing in flight starts with an empty pipeline."""
        with jax.set_mesh(self.mesh):
            batch = self.place(batch)
            if not isinstance(state.in_flight, InFlight):
                state = dataclasses.replace(state, in_flight=self._empty(state.params, batch))
            return self._train(state, batch)

    def compile_train_step(self, state: Any, batch: Tree) -> jax.stages.Compiled:
        """As `Training.compile_train_step`; if nothing is in flight in `state`, XLA chooses the sharding of `in_flight`."""
        with jax.set_mesh(self.mesh):
            flying = state.in_flight or jax.eval_shape(self._start, state.params, batch)
            return self._train.lower(dataclasses.replace(state, in_flight=flying), batch).compile()

    @functools.cached_property
    def _empty(self) -> Callable[[Tree, Tree], Tree]:
        """Returns an empty pipeline with the shardings of a step's output, read from a compiled step: XLA chooses them."""
        step = self.compile_train_step(*self.step_shapes())
        return jax.jit(self._start, out_shardings=step.output_shardings[0].in_flight)

    # The functions below are traced.

    def _as_stored(self, params: Tree) -> Tree:
        """The weights that a step computes with, in the shapes of the parameters."""
        return jax.tree.map(lambda weight, like: weight.reshape(like.shape), self._cast(params), params)

    def _weights_in_flight(self, state: Any) -> Tree:
        """The weights of the batch in flight, as in a checkpoint; with an empty pipeline those of the next batch."""
        if not isinstance(state.in_flight, InFlight):
            return self._as_stored(state.params) if not jax.tree.leaves(state.in_flight) else state.in_flight
        weights = self.pipeline.newest_weights(state.in_flight)
        return jax.tree.map(lambda weight, like: weight.reshape(like.shape), weights, state.params)

    def _train_step(self, state: Any, batch: Tree):
        flying = state.in_flight
        weight = self._loss_weight(batch)
        computed, inputs, before = self._inputs(state.params, batch)
        losses, counted, gradients, after = self.pipeline.step(computed, inputs, 1 / weight, flying, (before, weight))
        total = jnp.where(counted, jax.vmap(self._loss_weight)(after.batch), 0).sum()
        gradients = self._gradients_of(state.params, gradients)
        new, metrics = self._update(state, gradients, losses.sum() / total, batch, ready=flying.step > 0)
        return dataclasses.replace(new, in_flight=after), metrics
