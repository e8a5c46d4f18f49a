"""`Scorer`: the losses of tokens, and whether each is the most likely one, in batches on any layout.

The forward pass is the one of a run's validation (`train.step.Training.forward`): a schedule without backwards, so
microbatches keep all pipeline ranks busy. Requests are sorted by length and padded to a few lengths, so that a handful of
programs are compiled. The longest come first: the first batch takes the most memory.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint.layout import StateLayout
from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig
from megajax.train.precision import cast, compute_dtype
from megajax.train.step import Training, make_training

__all__ = ["Batch", "Request", "Score", "Scorer", "evaluation_run", "make_scorer", "sum_over_context"]

Tree = Any
LENGTHS = tuple(sorted(2**power * part for power in range(5, 30) for part in (2, 3)))  # 64, 96, 128, 192, ...
ARRAYS = {"tokens", "labels", "weights", "sample"}  # of a batch
MICROBATCHES = 4  # for each pipeline rank: of p * (4 + 1) - 1 ticks p - 1 are the bubble


def evaluation_run(run: RunConfig, parallel: ParallelConfig) -> RunConfig:
    """The configuration with which a run's model is scored.

    Options that only matter to training are dropped: chunks and schedule (one chunk of layers a rank), ZeRO-1, recomputation
    and offloading, fp8. The sequence is split over tensor if the model's context divides: a released model's may not.

    Args:
      run: of the weights' source.
      parallel: data, context, pipe, tensor and zero count.
    """
    kept = ParallelConfig(
        data=parallel.data,
        context=parallel.context,
        pipe=parallel.pipe,
        tensor=parallel.tensor,
        zero=3 if parallel.zero == 3 else 0,
        schedule="gpipe",
        sequence_parallel=run.model.sequence_length % (parallel.context * parallel.tensor) == 0,
        recompute="none",
    )
    train = TrainConfig(precision=run.train.precision, global_batch_size=kept.data, seed=run.train.seed)
    return dataclasses.replace(run, parallel=kept, train=train)


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A sequence whose last tokens are scored.

    Attributes:
      tokens: int32 [n + 1]; the first n are the model's input, the last n its labels.
      scored: labels that count, the last ones: 1 to n.
    """

    tokens: np.ndarray
    scored: int


class Score(NamedTuple):
    """Sums over the scored tokens of a request.

    Attributes:
      loss: of -log(probability), fp32.
      right: tokens that are the most likely ones.
    """

    loss: float
    right: int


@dataclasses.dataclass(frozen=True)
class Batch:
    """Requests that are run together.

    Attributes:
      shape: microbatches, samples of a microbatch over all replicas, and tokens of a sample with padding.
      numbers: of the requests; fewer than the samples in the last batch.
    """

    shape: tuple[int, int, int]
    numbers: tuple[int, ...]


class Scorer:
    """Scores requests on a mesh.

    Attributes:
      run: of the model and its layout.
      training: the forward pass.
      samples: most samples that a replica runs at once.
    """

    def __init__(self, training: Training, samples: int = 8):
        """Builds the program; it is compiled for each shape of a batch.

        Args:
          training: of a run that trains, on whose parameters `score` then works as they are, or of `make_scorer`.
          samples: most samples that a replica runs at once.

        Raises:
          ConfigError: the model has no logits, or reads more than tokens.
        """
        self.run, self.training, self.samples = training.run, training, samples
        mesh = training.mesh
        assert training.model.vocabulary > 0  # raises for a model without logits
        if more := training.model.batch_shapes().keys() - ARRAYS:
            raise ConfigError(
                f"{type(training.model).__name__} reads {min(more)} besides tokens, so a text alone cannot be scored: "
                "evaluate a GPT or Llama."
            )
        shardings = (self.training.params_sharding, self.training.batch_sharding)
        score = jax.jit(self._scores, in_shardings=shardings, out_shardings=NamedSharding(mesh, P()))
        self._score = self.training.checked(score)

    @property
    def params_layout(self) -> StateLayout:
        """The layout of {"params": ...} in the type to compute with."""
        dtype = compute_dtype(self.run.train.precision)
        shapes = jax.eval_shape(lambda params: cast(params, dtype), self.training.state_shapes.params)
        return StateLayout({"params": shapes}, {"params": self.training.params_sharding}, self.training.where)

    def weights(self, params: Tree) -> Tree:
        """The parameters in the type to compute with; `params` is used up."""
        dtype = compute_dtype(self.run.train.precision)
        leaves, structure = jax.tree.flatten(params)
        del params
        for index, leaf in enumerate(leaves):  # one at a time: the fp32 leaf is freed before the next is cast
            leaves[index] = cast(leaf, dtype)
        return jax.tree.unflatten(structure, leaves)

    def plan(self, requests: Sequence[Request]) -> list[Batch]:
        """Batches of all requests, the longest first; they depend on nothing but the requests and the layout.

        Raises:
          ConfigError: a token is outside of the model's vocabulary.
        """
        largest = max(int(request.tokens.max()) for request in requests)
        if largest >= self.training.model.vocabulary:
            raise ConfigError(
                f"the data has token {largest}, but the model has tokens 0 to {self.training.model.vocabulary - 1}: the "
                "tokenizer is not the model's; give a directory with its own."
            )
        parallel = self.run.parallel
        each = parallel.data * min(self.samples, -(-len(requests) // parallel.data))
        most = MICROBATCHES * parallel.pipe if parallel.pipe > 1 else 1
        microbatches = min(most, -(-len(requests) // each))
        lengths = [len(request.tokens) - 1 for request in requests]
        order = sorted(range(len(requests)), key=lambda number: -lengths[number])
        parts = (order[first : first + microbatches * each] for first in range(0, len(order), microbatches * each))
        shape = lambda part: (microbatches, each, self._padded(lengths[part[0]], max(lengths)))  # noqa: E731
        return [Batch(shape(part), tuple(part)) for part in parts]

    def _padded(self, length: int, longest: int) -> int:
        """The length of a batch: one of LENGTHS, but not above the longest request's or the model's context."""
        parallel = self.run.parallel
        unit = math.lcm(64, 2 * parallel.context, parallel.context * parallel.tensor)
        whole = lambda tokens: -(-tokens // unit) * unit  # noqa: E731
        usual = next(one for one in LENGTHS if one >= length)
        return min(whole(usual) if usual % unit else usual, whole(longest), self.run.model.sequence_length)

    def score(
        self, weights: Tree, requests: Sequence[Request], batches: Iterable[Batch]
    ) -> Iterator[tuple[Batch, list[Score]]]:
        """The scores of each batch's requests; a batch runs while the scores of the one before it are read.

        Args:
          weights: of `weights`, or a training's parameters.
          requests: all of them.
          batches: of `plan`, all or some.
        """
        running: tuple[Batch, Tree] | None = None
        for batch in batches:
            dispatched = batch, self._dispatch(weights, requests, batch)
            if running:
                yield running[0], _read(*running)
            running = dispatched
        if running:
            yield running[0], _read(*running)

    def _dispatch(self, weights: Tree, requests: Sequence[Request], batch: Batch) -> Tree:
        microbatches, samples, length = batch.shape
        rows = {name: np.zeros((microbatches * samples, length), np.int32) for name in ("tokens", "labels")}
        rows |= {"weights": np.zeros((microbatches * samples, length), np.float32)}
        for row, number in enumerate(batch.numbers):
            tokens, scored = requests[number].tokens, requests[number].scored
            count = len(tokens) - 1
            rows["tokens"][row, :count], rows["labels"][row, :count] = tokens[:-1], tokens[1:]
            rows["weights"][row, count - scored : count] = 1
        rows |= {"sample": np.zeros(microbatches * samples, np.uint32)}
        split = {name: array.reshape(microbatches, samples, *array.shape[1:]) for name, array in rows.items()}
        with jax.set_mesh(self.training.mesh):
            return self._score(weights, self.training.place(split))

    def _scores(self, params: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        """Traced: losses fp32 and right tokens int32 of each sample, [microbatches, samples]."""
        model, functions = self.training.evaluation()

        def collect(shared: Tree, y: jax.Array, microbatch: Tree) -> tuple[jax.Array, jax.Array]:
            losses, right = model.token_scores(shared, y, microbatch)
            counts = microbatch["weights"] > 0
            return jnp.where(counts, losses, 0).sum(1), (counts & right).sum(1, dtype=jnp.int32)

        return sum_over_context(self.run.parallel, self.training.forward(functions, collect, params, batch))


def sum_over_context(parallel: ParallelConfig, collected: Tree) -> Tree:
    """Traced: rows [microbatches, samples * context, ...] to [microbatches, samples, ...].

    The ranks of a context group have one row of a sample each, of their tokens.
    """

    def summed(rows: jax.Array) -> jax.Array:
        split = rows.reshape(len(rows), parallel.data, parallel.context, -1, *rows.shape[2:])
        return split.sum(2).reshape(len(rows), -1, *rows.shape[2:])

    return jax.tree.map(summed, collected)


def make_scorer(run: RunConfig, mesh: Mesh, samples: int = 8) -> Scorer:
    """The scorer of a run that does not train, as `evaluation_run` returns it, on its mesh."""
    return Scorer(make_training(run, mesh), samples)


def _read(batch: Batch, running: Tree) -> list[Score]:
    losses, right = (np.asarray(rows).reshape(-1) for rows in running)
    found = [Score(float(losses[row]), int(right[row])) for row in range(len(batch.numbers))]
    if bad := sum(not math.isfinite(score.loss) for score in found):
        raise ConfigError(
            f"the loss of {bad} of {len(found)} samples is not finite: the weights are damaged, or exceed the range of "
            "the precision; pass --precision fp32."
        )
    return found
