"""The interface of a model, `PipelineModel`, which trains with any schedule on any mesh, and its `ModelContext`.

A model is `embed`, then `config.layers` equal blocks, then `head_loss`: pure functions of

    params = {"blocks": leaves [layers, ...], "shared": leaves}

Every pipeline rank holds "shared" and its own layers of "blocks". Blocks may be of several kinds: a config with
`layer_kinds`, the name of each layer's kind, has {kind: leaves [layers of the kind, ...]} as "blocks", and `block` gets
weights of any of these structures. Register a subclass of `PipelineModel` for the type of its config;
`megajax.models.nnx_model.NNXModel` implements most of it from two Flax NNX modules.
"""

import abc
import dataclasses
import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.config import ConfigError, RunConfig
from megajax.config.layer_kinds import layer_kinds
from megajax.models.costs import ModelCosts
from megajax.models.ids import Ids
from megajax.models.remat import grouped
from megajax.models.traced_costs import traced_costs
from megajax.ops.attention_choice import FusableAttention
from megajax.ops.cached_attention import Cache, CachedArray
from megajax.ops.distillation import Teacher
from megajax.ops.expert_group import WHOLE_GROUP, ExpertGroup
from megajax.ops.grouped_matmul import GroupedMatmuls
from megajax.ops.linear import RESIDUAL, Constrain, Operations, identity, plain_operations
from megajax.ops.vocabulary import WHOLE_VOCABULARY, VocabularySharding, token_scores

__all__ = [
    "FusableAttention",
    "ModelContext",
    "PipelineModel",
    "batch_shapes",
    "mean_loss",
    "model_class",
    "register_model",
]

Tree = Any  # nested dictionaries
ENDS = ("shared_module", "embed", "head_loss", "logits", "token_scores")  # attributes of a model that read token tables
Microbatch = Mapping[str, jax.Array]
Activations = jax.Array | dict[str, jax.Array]  # what blocks pass on


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelContext:
    """The settings and sharded operations that a run passes to its model. The defaults are for one device without a mesh.

    Attributes:
      constrain: `(x, *axes)` -> x with the sharding constraint of its logical axes, see `megajax.sharding.rules.AxisRules`.
      operations: the matmuls and the attention of a block.
      vocabulary: how token tables' rows are sharded, with the matching lookup and collectives.
      dtype: type of activations and matmuls. `embed`, `block` and `head_loss` get weights of this type.
      recompute: "none", "selective" or "full", the values that a block's backward recomputes.
      experts: the replicas that split the experts of a layer; by default each has all.
      grouped_matmuls: the matmuls of experts; by default XLA's, on no mesh.
      sum_over_sequence: (array of [b, ...]) -> its sum over the context ranks, which have parts of the same samples.
      gather_sequence: (array of [b, local s, ...]) -> the whole samples' [b, s, ...], on all context ranks.
      dropout_seed, training, tensor: of dropout masks; False: without dropout, as in evaluation; devices of a tensor group.
      z_loss, label_smoothing, teacher: of the loss in training (`TrainConfig`), of models with `has_loss_options`.
    """

    constrain: Constrain = identity
    operations: Operations = plain_operations()
    vocabulary: VocabularySharding = WHOLE_VOCABULARY
    dtype: Any = jnp.float32
    recompute: str = "selective"
    experts: ExpertGroup = WHOLE_GROUP
    grouped_matmuls: GroupedMatmuls = GroupedMatmuls()
    sum_over_sequence: Callable[[jax.Array], jax.Array] = identity
    gather_sequence: Callable[[jax.Array], jax.Array] = identity
    dropout_seed: int = 0
    training: bool = True
    tensor: int = 1
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    teacher: Teacher | None = None

    def whole(self, x: jax.Array) -> jax.Array:
        """x with all of every axis on each device of a tensor group; the gradient too.

        For operands and results of what moves elements along an axis that `constrain` splits over tensor: slices, rolls,
        pads. XLA makes a collective permute of them if either is split, which hangs in work that only one stage does:

            shifted = context.whole(jnp.roll(context.whole(x), 1, axis=1))
        """
        return self.constrain(x, *[None] * x.ndim)


class PipelineModel(abc.ABC):
    """A model that the pipeline can run.

    b samples of a microbatch on one replica; x, what blocks pass on, is an array [b, ...] or a dictionary of them, of
    floating-point types, whose logical axes are `activation_axes`; stages send each other all of it. All methods below
    `decay_mask` are traced; `microbatch` is a dictionary of arrays [b, ...], as `batch_shapes` describes.

    Attributes:
      activation_axes: logical axes of x between blocks; of a dictionary, {"image": (...), "text": (...)}.
      vocabulary_over_pipe: whether `embed` and `head_loss` may hold tables whose rows are sharded over pipe too, and so
        run on all pipeline ranks at once, with `ModelContext.vocabulary`'s collectives (`--vocab-parallel pipe`). A subclass
        that replaces any of ENDS does not inherit it: its own ends may not have these collectives.
      scaled_arrays: arrays that `prepare_batch` adds, [microbatches, samples], which the training step multiplies by the
        factor of each microbatch's loss in the gradients (the loss scale), for losses whose gradients blocks add themselves.
      measured_kind: the kind of the layers that `take_measurements` measures; None: all layers.
      has_loss_options: whether the loss has the context's `z_loss`, `label_smoothing` and `teacher`; not inherited where
        shared_module or `head_loss` is replaced.
      has_outputs: whether `head_loss` returns (loss, outputs), arrays [b, ...] that are computed on the way and from which
        `metrics` makes values for the log. They have no gradient.
      config: any frozen dataclass with `layers` and `name`; optionally with `layer_kinds`, see above, and for the estimate
        `of_kind(kind)`, the configuration of a model all of whose layers are of one kind.
      context: see `ModelContext`.
    """

    activation_axes: ClassVar[tuple[str | None, ...] | Mapping[str, tuple[str | None, ...]]] = RESIDUAL
    vocabulary_over_pipe: ClassVar[bool] = False
    scaled_arrays: ClassVar[tuple[str, ...]] = ()
    has_outputs: ClassVar[bool] = False
    has_loss_options: ClassVar[bool] = False

    def __init_subclass__(cls, **arguments: Any):
        """See `vocabulary_over_pipe` and `has_loss_options`."""
        super().__init_subclass__(**arguments)
        place = lambda name: next(n for n, base in enumerate(cls.__mro__) if name in vars(base))  # noqa: E731
        for ability, ends in {"vocabulary_over_pipe": ENDS, "has_loss_options": ("shared_module", "head_loss")}.items():
            if any(place(name) < place(ability) for name in ends if hasattr(cls, name)):
                setattr(cls, ability, False)

    @property
    def measured_kind(self) -> str | None:
        """See above."""
        return None

    def __init__(self, config: Any, context: ModelContext = ModelContext()):  # noqa: B008 (frozen)
        """Builds the model's functions; creates no arrays."""
        self.config, self.context = config, context

    @abc.abstractmethod
    def init(self, key: jax.Array) -> Tree:
        """Initial fp32 parameters {"blocks": leaves [layers, ...], "shared": leaves}; a pure function, jitted by the caller.
        A value should depend only on the key, the parameter's name and the layer, so that it is equal on every mesh.
        """

    @abc.abstractmethod
    def logical_axes(self) -> Tree:
        """A tree like the parameters whose leaves are tuples of logical axis names; those of blocks start with "layers"."""

    @abc.abstractmethod
    def decay_mask(self) -> Tree:
        """A tree like the parameters of bools: whether weight decay applies. Usually not to biases and norms."""

    def fp32_mask(self) -> Tree:
        """A tree like the parameters of bools: whether a leaf is computed with in fp32 in any precision. Default: none."""
        return jax.tree.map(lambda _: False, self.decay_mask())

    def lookup_mask(self) -> Tree:
        """A tree like the parameters of bools: whether only rows of a leaf are read, and cast by `embed`. Default: none."""
        return jax.tree.map(lambda _: False, self.decay_mask())

    def trainable_mask(self) -> Tree:
        """A tree like the parameters of bools: whether a leaf is trained. Default: all. The others are frozen: nothing of a
        step but the forward and the gradient of x reads them (`pipeline/trained.py`).
        """
        return jax.tree.map(lambda _: True, self.decay_mask())

    def take_measurements(self, gradients: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        """Separates values that blocks return as gradients of parameters of their own from the gradients.

        Returns:
          (gradients, with zeros for those parameters; the values by name, arrays that start with the axes of layers that
          `gradients["blocks"]` has; those of "outside" are of no layer, its "losses" scalars). Default: there are none.
        """
        return gradients, {}

    def apply_measurements(self, updates: Tree, measurements: Mapping[str, jax.Array]) -> Tree:
        """The addends to the parameters, with those that follow from measurements instead of gradients. Default: none."""
        return updates

    def id_bounds(self) -> Mapping[str, Ids]:
        """The legal values of the batch's arrays of ids, by name, checked before a step. Default: none are known."""
        return {}

    @abc.abstractmethod
    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and type of one sample of a batch, by name: for the dry run, which has no data."""

    def prepare_batch(self, batch: Microbatch) -> Microbatch:
        """The batch that is split into microbatches, replicas and context ranks, [microbatches, samples, ...]. A model may
        add arrays that depend on the whole batch, as the weights between two means. Default: none.
        """
        return batch

    def prepare_microbatch(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch that blocks are given, [b, ...], or [1, ...] if it is the same for all samples.
        Computed once for all blocks of a chunk, and not saved for the backward. A model may add arrays that all blocks
        read; a block must compute them itself if they are not there. Default: none.
        """
        return microbatch

    @abc.abstractmethod
    def embed(self, shared: Tree, microbatch: Microbatch) -> Activations:
        """The first block's input, x of `ModelContext.dtype`."""

    @abc.abstractmethod
    def block(self, weights: Tree, x: Activations, microbatch: Microbatch, layer: jax.Array) -> Activations:
        """x to x: one block, of which `weights` has the leaves without their axis of layers; `layer` is its index.

        The residuals of `jax.vjp` are stored for the backward pass: apply `jax.checkpoint` by `ModelContext.recompute`
        (`megajax.models.remat.checkpointed`).
        """

    @abc.abstractmethod
    def head_loss(self, shared: Tree, y: Activations, microbatch: Microbatch) -> jax.Array:
        """The loss of the last block's output, summed over the microbatch: an fp32 scalar."""

    def only_loss(self, shared: Tree, y: jax.Array, microbatch: Microbatch) -> jax.Array:
        """The loss of `head_loss`, without outputs."""
        loss = self.head_loss(shared, y, microbatch)
        return loss[0] if self.has_outputs else loss

    def metrics(self, outputs: Tree, batch: Microbatch) -> Mapping[str, jax.Array]:
        """Scalars for the step's record, by name; of a model with `has_outputs`. Default: none.

        Args:
          outputs: of `head_loss`, arrays [microbatches, samples, ...].
          batch: the whole one, likewise.
        """
        return {}

    def loss_weight(self, batch: Microbatch) -> jax.Array:
        """The divisor of the summed loss: fp32 scalar, a sum over the samples of any batch.

        Default: the sum of the batch's "weights" if it has them, its number of samples if not.
        """
        if "weights" in batch:
            return batch["weights"].sum()
        name, sample = next(iter(self.batch_shapes().items()))
        return jnp.float32(batch[name].size // math.prod(sample.shape))

    def logits(self, shared: Tree, y: jax.Array) -> jax.Array:
        """Scores of the next token, fp32 [b, s, `vocabulary` or more]; only models that generate text have them."""
        raise ConfigError(f"{type(self).__name__} has no logits: it cannot generate text.")

    def token_scores(self, shared: Tree, y: jax.Array, microbatch: Microbatch) -> tuple[jax.Array, jax.Array]:
        """Of each of the microbatch's "labels" [b, s]: its loss, fp32, and whether it is the most likely token, bool.

        For evaluation. Default: from `logits`. A model that shards its token tables over pipe too can compute both from
        each rank's rows (`megajax.ops.vocabulary.token_scores`), without gathering the logits.
        """
        return token_scores(self.logits(shared, y), microbatch["labels"], self.vocabulary)

    @property
    def vocabulary(self) -> int:
        """Tokens that `logits` scores."""
        raise ConfigError(f"{type(self).__name__} has no logits: it cannot generate text.")

    def cache_arrays(self, samples: int, slots: int) -> Mapping[str, CachedArray]:
        """What a block keeps of earlier tokens, by name, for `samples` and `slots` tokens of each; to generate text."""
        raise ConfigError(f"{type(self).__name__} has no cached decoding (cache_arrays): it cannot generate text.")

    def block_cached(
        self, weights: Tree, x: jax.Array, cache: Cache, microbatch: Microbatch, layer: jax.Array
    ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """`block` for the tokens that follow those of `cache`; to generate text.

        Args:
          weights: of one block.
          x: the input for n new tokens of each sample.
          cache: of the same block and samples.
          microbatch: "tokens" and "positions" int32 [b, n]. Padding has position PADDING_POSITION, and its x no meaning.
          layer: the block's index.

        Returns:
          x for the next block; and the new tokens' part of the cache, like `cache.arrays` with n slots, or a new state.
        """
        raise ConfigError(f"{type(self).__name__} has no cached decoding (block_cached): it cannot generate text.")

    @classmethod
    def fusable_attention(cls, config: Any) -> FusableAttention | None:
        """For blocks that call `ModelContext.operations.attend`; None: the model has no such attention."""
        return None

    def costs(self) -> ModelCosts:
        """FLOPs, parameters and saved bytes for the estimates; default: found by tracing the block."""
        return traced_costs(self)


_MODELS: dict[type, type[PipelineModel]] = {}


@dataclasses.dataclass(frozen=True)
class ExecutorFunctions:
    """The functions of a model that the executor runs."""

    prepare_microbatch: Callable
    embed: Callable
    block: Callable
    head_loss: Callable

    @classmethod
    def from_model(cls, model: PipelineModel, group: int) -> "ExecutorFunctions":
        """The model's, with `group` blocks as one (`remat.grouped`)."""
        block = model.block if group == 1 else grouped(model.block, group)
        return cls(model.prepare_microbatch, model.embed, block, model.head_loss)


def register_model(config_class: type) -> Callable[[type[PipelineModel]], type[PipelineModel]]:
    """Class decorator: configs of type `config_class` are of this model."""

    def register(model: type[PipelineModel]) -> type[PipelineModel]:
        _MODELS[config_class] = model
        return model

    return register


def model_class(config: Any) -> type[PipelineModel]:
    """The model registered for the type of `config`.

    Raises:
      ConfigError: there is none.
    """
    for name in ("gpt", "bert"):  # models that come with megajax register when they are imported
        importlib.import_module(f"megajax.models.{name}")
    for base in type(config).__mro__:
        if base in _MODELS:
            return _MODELS[base]
    known = ", ".join(sorted(kind.__name__ for kind in _MODELS)) or "none"
    raise ConfigError(
        f"no model is registered for {type(config).__name__} (registered: {known}): decorate the model's class with "
        f"@register_model({type(config).__name__}), and pass --import FILE.py if another file does."
    )


def batch_shapes(run: RunConfig, model: PipelineModel) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and type of one sample of the run's batches: the model's arrays, and those of documents and padding."""
    data = run.data
    switches = {"positions": data.resets_positions, "document": data.resets_attention, "padding_mask": data.sft_data}
    of = lambda dtype, *sizes: jax.ShapeDtypeStruct((run.model.sequence_length, *sizes), dtype)  # noqa: E731
    more = {name: of(np.int32) for name, given in switches.items() if given}
    types = {"teacher_ids": np.int32, "teacher_logits": np.float32} if run.train.distill_weight else {}
    return model.batch_shapes() | more | {name: of(dtype, run.train.distill_top) for name, dtype in types.items()}


def mean_loss(model: PipelineModel, params: Tree, batch: Microbatch) -> jax.Array:
    """Mean loss of a batch with no pipeline: what every schedule must reproduce.

    Args:
      model: the model.
      params: as `PipelineModel.init` returns them.
      batch: arrays [microbatches, samples, ...].

    Returns:
      fp32 scalar: summed `head_loss` over `loss_weight`, both of the whole batch.
    """
    kinds, batch = layer_kinds(model.config), model.prepare_batch(batch)

    def one(total, microbatch):
        def through(x, weights_and_layer):
            weights, layer = weights_and_layer
            return model.block(weights, x, microbatch, layer), None

        x = model.embed(params["shared"], microbatch)
        if kinds is None:
            layers = len(jax.tree.leaves(params["blocks"])[0])
            y, _ = lax.scan(through, x, (params["blocks"], jnp.arange(layers)))
        else:
            y = x
            for layer, kind in enumerate(kinds):
                own = jax.tree.map(lambda leaf: leaf[kinds[:layer].count(kind)], params["blocks"][kind])  # noqa: B023
                y = model.block(own, y, microbatch, jnp.int32(layer))
        return total + model.only_loss(params["shared"], y, microbatch), None

    return lax.scan(one, jnp.float32(0), batch)[0] / model.loss_weight(batch)
