"""`Decoder`: the compiled programs that continue batches of prompts on a mesh, and the weights as they take them."""

import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint.layout import StateLayout, without_pipe
from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig
from megajax.config.layer_kinds import layer_kinds
from megajax.config.sample import LogitsRules, SampleConfig
from megajax.generate.sampling import NO_RULES, Texts, next_token, reads_texts
from megajax.models.context import model_context, model_rules
from megajax.models.interface import PipelineModel, model_class
from megajax.ops.attention_choice import Choice
from megajax.pipeline import layout
from megajax.pipeline.decode import DecodeProgram, Rows
from megajax.pipeline.layout import is_spec
from megajax.pipeline.parameters import initial_params, parameter_specs
from megajax.schedules.stages import StageLayers
from megajax.sharding.rules import AxisRules
from megajax.train.deadlocks import with_check
from megajax.train.precision import cast, compute_dtype

__all__ = ["DecodeSizes", "Decoder", "Decoding", "decoding_rules", "decoding_run"]

Tree = Any
BLOCK = 32  # most tokens of each sample between two looks at the text
PLAIN_ATTENTION = Choice("xla", "a block multiplies queries and cached keys itself")


def decoding_run(run: RunConfig, parallel: ParallelConfig | None = None) -> RunConfig:
    """The configuration with which a run's model generates text.

    Of the layout it keeps data, context, expert, pipe, tensor and the split of the vocabulary. Devices of a context group
    are replicas here, each with its own samples. Dropped are options that only matter to training: chunks and schedule (one
    chunk of layers a rank keeps all ranks busy), ZeRO (weights are replicated over data), the split of the sequence over
    tensor (a new token is one), and so whole experts of tensor ranks, recomputation and offloading, rings and fp8.

    Args:
      run: the training's.
      parallel: the layout of another mesh; None: of the run's own.
    """
    given = parallel or run.parallel
    kept = ParallelConfig(
        data=given.data * given.context,
        expert=given.expert_replicas,
        pipe=given.pipe,
        tensor=given.tensor,
        vocab_parallel=given.vocab_parallel,
        axis_order=given.axis_order,
        schedule="gpipe",
        sequence_parallel=False,
        attention="xla",
    )
    train = TrainConfig(precision=run.train.precision, global_batch_size=kept.data, seed=run.train.seed)
    return dataclasses.replace(run, parallel=kept, train=train)


def decoding_rules(rules: AxisRules) -> AxisRules:
    """The sharding rules with which `decoding_run` generates text, from those of the training."""
    if not rules.experts_over_tensor:
        return rules.replace(sequence=None)
    experts = "expert" if rules.expert_parallel else None
    return rules.replace(sequence=None, experts=experts, expert_feedforward="tensor")


@dataclasses.dataclass(frozen=True)
class DecodeSizes:
    """The sizes of the compiled programs.

    Attributes:
      samples: prompts that are continued together; rounded up to a multiple of data * pipe, groups of one size.
      prompt: most tokens of a prompt.
      new: most new tokens of a sample.
      chunk: tokens of a prompt that pass the model at once.
    """

    samples: int
    prompt: int
    new: int
    chunk: int = 128

    @property
    def width(self) -> int:
        """Tokens of a chunk: no more than the longest prompt."""
        return min(self.chunk, self.prompt)

    @property
    def chunks(self) -> int:
        """Chunks of the longest prompt."""
        return -(-self.prompt // self.width)

    @property
    def blocks(self) -> int:
        """Calls of `Decoder.decode` for `new` tokens; the first token follows from the prompt alone."""
        return -(-(self.new - 1) // BLOCK)

    @property
    def block(self) -> int:
        """Tokens of one call, so that the calls are equal."""
        return -(-(self.new - 1) // max(1, self.blocks))

    @property
    def slots(self) -> int:
        """Tokens of a sample's cache, padding included."""
        return self.chunks * self.width + self.blocks * self.block


@dataclasses.dataclass(frozen=True)
class Decoding:
    """A batch that is being continued.

    Attributes:
      cache: of all layers, on the devices.
      tokens: the newest ones, int32 [groups, samples]; they are not in the cache.
      texts: int32 [samples, slots], prompts and the tokens that followed, without `tokens`; no slots if no rule reads them.
      rows: the samples.
      slot: the slot of `tokens`.
    """

    cache: Tree
    tokens: jax.Array
    texts: np.ndarray
    rows: Rows
    slot: int


class Decoder:
    """Continues batches of prompts on a mesh; see `megajax.pipeline.decode` for the order of the work.

    Attributes:
      run, mesh, sizes: as given; `samples` of a batch is a multiple of data * pipe.
      groups: of samples, one for each pipeline rank.
      program: the functions that are compiled.
      where: the layers of each pipeline rank.
      stored_specs, specs: PartitionSpecs of the parameters in pipeline layout, and as `weights` returns them.
    """

    def __init__(
        self,
        run: RunConfig,
        mesh: Mesh,
        sizes: DecodeSizes,
        sampling: SampleConfig,
        *,
        logits_rules: LogitsRules = NO_RULES,
        seed: int = 0,
        model: type[PipelineModel] | None = None,
        rules: AxisRules | None = None,
    ):
        """Builds the programs; nothing is compiled.

        Args:
          run: as `decoding_run` returns it.
          mesh: its mesh.
          sizes: of the programs.
          sampling: how tokens are drawn.
          logits_rules: of the model's generation settings.
          seed: of the draws.
          model: the model's class; None: the one registered for the type of `run.model`.
          rules: sharding rules; None: the model's.

        Raises:
          ConfigError: the model does not generate text, or a rule names a token that it does not have.
        """
        self.run, self.mesh, self.groups = run, mesh, run.parallel.pipe
        together = run.parallel.data * self.groups
        self.sizes = dataclasses.replace(sizes, samples=-(-sizes.samples // together) * together)
        kind = model or model_class(run.model)
        rules = rules or model_rules(run, kind)
        dtype = compute_dtype(run.train.precision)
        context = model_context(run, rules, PLAIN_ATTENTION, mesh.devices.flat[0], dtype, training=False)
        self.model = kind(run.model, context)
        if not isinstance(kind.activation_axes, tuple):
            raise ConfigError(
                f"{kind.__name__} passes several arrays from block to block ({', '.join(kind.activation_axes)}): texts are "
                "generated of models that pass on one."
            )
        assert self.model.vocabulary > 0 and self.model.cache_arrays(1, 1)  # raises for a model that does neither
        logits_rules.validate(self.model.vocabulary)
        self.stored_specs = specs = parameter_specs(self.model, run.parallel, rules).computed
        kinds = layer_kinds(run.model)
        self.where = run.parallel.stage_layers(run.model.layers, kinds=kinds)
        of_layer = jax.tree.map(lambda spec: P("pipe", *spec[3:]), specs["blocks"], is_leaf=is_spec)
        blocks = layout.map_kinds(lambda where, of_layer: (of_layer,) * where.slots, self.where, of_layer)
        self.specs = {"blocks": blocks, "shared": specs["shared"]}

        def sample(logits: jax.Array, of: Rows, tokens: jax.Array, slot: jax.Array) -> jax.Array:
            texts = Texts(tokens, of.start, slot, of.prompt)
            return next_token(logits, of.number, texts, sampling, logits_rules, seed)

        stages = {"stage_kinds": self.where} if kinds else {"layer_counts": self.where.unequal_counts}
        reads = reads_texts(sampling, logits_rules)
        self.program = DecodeProgram(self.model, sample, mesh, rules, self.specs, self.sizes.slots, reads, **stages)
        self._prefill, self._decode = self._jitted()
        self._compiled: dict[str, jax.stages.Compiled] = {}

    def _jitted(self) -> tuple:
        named = lambda specs: jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=is_spec)  # noqa: E731
        replicated, cache = NamedSharding(self.mesh, P()), named(self.program.cache_specs(self.where.slots))
        weights, rows = named(self.specs), Rows(replicated, replicated, replicated)
        prefill = jax.jit(
            partial(self.program.prefill, width=self.sizes.width),
            in_shardings=(weights, replicated, rows, replicated),
            out_shardings=(cache, replicated),
        )
        decode = jax.jit(
            partial(self.program.decode, count=self.sizes.block),
            in_shardings=(weights, cache, replicated, replicated, rows, replicated),
            out_shardings=(cache, replicated),
            donate_argnums=1,
        )
        check = lambda program: with_check(program, type(self.model), self.run.parallel, self.mesh)  # noqa: E731
        return check(prefill), check(decode)

    @property
    def params_layout(self) -> StateLayout:
        """The layout of {"params": ...} in the type to compute with, to load a checkpoint for `weights`."""
        dtype, parallel = compute_dtype(self.run.train.precision), self.run.parallel
        shapes = jax.eval_shape(lambda key: cast(initial_params(self.model, parallel, key), dtype), jax.random.key(0))
        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.stored_specs, is_leaf=is_spec)
        return StateLayout({"params": shapes}, {"params": shardings}, self.where)

    def weights(self, params: Tree, stored: StageLayers | None = None) -> Tree:
        """The weights that the programs take, from parameters in a training's layout on the same mesh.

        They are cast, and each layer becomes arrays of its own, with one chunk of layers a rank: an interleaved or "v"
        layout is resharded here, once, and not walked chunk by chunk for every token, which would send v times as often.

        Args:
          params: blocks [chunks, pipe, slots of a stage, ...], of any float type and sharding.
          stored: the layers of each of its stages; None: as in `params_layout`.
        """
        dtype = compute_dtype(self.run.train.precision)
        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs["shared"], is_leaf=is_spec)
        shared = jax.jit(partial(cast, dtype=dtype), out_shardings=shardings)(params["shared"])
        stored, blocks, specs = (
            stored or self.where,
            params["blocks"],
            (self.stored_specs["blocks"], self.specs["blocks"]),
        )
        del params  # a caller that keeps no reference has its memory back leaf by leaf
        if self.where.kinds is None:
            leaves, structure = jax.tree.flatten(blocks)
            del blocks
            return {"blocks": self._layers(leaves, structure, specs, (stored, self.where)), "shared": shared}
        flat = {kind: jax.tree.flatten(tree) for kind, tree in blocks.items()}
        del blocks
        split = {
            kind: self._layers(*tree, tuple(one[kind] for one in specs), (stored.of(kind), self.where.of(kind)))
            for kind, tree in flat.items()
        }
        return {"blocks": split, "shared": shared}

    def _layers(self, leaves: list, structure: Any, specs: tuple[Tree, Tree], where: tuple) -> tuple:
        """A tree for each slot of a stage, from the leaves of one kind of layers, which are removed from the list.

        Args:
          leaves, structure: blocks in the layout of a training.
          specs: of blocks as they are stored, and as the programs take them.
          where: the layers of each stage, there and here.
        """
        dtype = compute_dtype(self.run.train.precision)
        flat = (jax.tree.leaves(tree, is_leaf=is_spec) for tree in (specs[0], specs[1][0]))
        layers: list[list] = [[] for _ in range(where[1].slots)]
        for pair in zip(*flat, strict=True):
            whole, own = (NamedSharding(self.mesh, spec) for spec in pair)
            between = without_pipe(leaves[0].shape, whole, where[0])
            split = _split_layers(leaves.pop(0), *where, dtype, (between, own))
            for layer, own in zip(layers, split, strict=True):
                layer.append(own)
        return tuple(jax.tree.unflatten(structure, layer) for layer in layers)

    def compile(self, weights: Tree) -> float:
        """Compiles both programs; returns the seconds that it took."""
        start, sizes = time.perf_counter(), self.sizes
        of = lambda *shape: jax.ShapeDtypeStruct((self.groups, sizes.samples // self.groups, *shape), np.int32)  # noqa: E731
        rows = Rows(of(), jax.ShapeDtypeStruct(of().shape, np.uint32), of())
        scalar = jax.ShapeDtypeStruct((), np.int32)
        with jax.set_mesh(self.mesh):
            prefill = self._prefill.lower(weights, of(sizes.chunks * sizes.width), rows, scalar)
            cache = jax.eval_shape(self._prefill, weights, of(sizes.chunks * sizes.width), rows, scalar)[0]
            self._compiled = {"prefill": prefill.compile()}
            if sizes.blocks:
                texts = of(self._text_slots)
                self._compiled["decode"] = self._decode.lower(weights, cache, of(), texts, rows, scalar).compile()
        return time.perf_counter() - start

    @property
    def _text_slots(self) -> int:
        """Slots of `Decoding.texts`."""
        return self.sizes.slots if self.program.reads_texts else 0

    def compiled(self, name: str) -> jax.stages.Compiled:
        """The compiled "prefill" or "decode", to read its memory, loops and communication; `compile` first."""
        return self._compiled[name]

    def prefill(self, weights: Tree, prompts: Sequence[np.ndarray], numbers: Sequence[int]) -> Decoding:
        """Runs a batch of prompts through the model; the result's `tokens` are the first new ones.

        Args:
          weights: of `weights`.
          prompts: int [tokens], at least one token each and at most `sizes.prompt`; at most `sizes.samples` prompts.
          numbers: of the samples, which seed their draws.
        """
        if not self._compiled:
            self.compile(weights)
        samples, width = self.sizes.samples, self.sizes.width
        chunks = -(-max(map(len, prompts)) // width)
        tokens = np.zeros((samples, self.sizes.chunks * width), np.int32)
        start = np.full(samples, chunks * width - 1, np.int32)  # samples that fill up the batch have one token
        seeds, lengths = np.zeros(samples, np.uint32), np.ones(samples, np.int32)
        for row, (prompt, number) in enumerate(zip(prompts, numbers, strict=True)):
            start[row], seeds[row], lengths[row] = chunks * width - len(prompt), number, len(prompt)
            tokens[row, start[row] : chunks * width] = prompt
        grouped = lambda a: self._place(a.reshape(self.groups, -1, *a.shape[1:]))  # noqa: E731
        rows = Rows(grouped(start), grouped(seeds), grouped(lengths))
        call = self._compiled["prefill"]
        cache, first = call(weights, grouped(tokens), rows, self._place(np.int32(chunks)))
        texts = np.zeros((samples, self._text_slots), np.int32)
        texts[:, : tokens.shape[1]] = tokens[:, : self._text_slots]
        return Decoding(cache, first, texts, rows, chunks * width)

    def decode(self, weights: Tree, batch: Decoding) -> tuple[Decoding, np.ndarray]:
        """`sizes.block` more tokens of every sample, int32 [samples, block]; `batch` is used up."""
        call, texts, slot = self._compiled["decode"], batch.texts.copy(), self._place(np.int32(batch.slot))
        if self._text_slots:
            texts[:, batch.slot] = self.first_tokens(batch)
        grouped = self._place(texts.reshape(self.groups, len(texts) // self.groups, self._text_slots))
        cache, drawn = call(weights, batch.cache, batch.tokens, grouped, batch.rows, slot)
        drawn = np.asarray(drawn)  # [block, groups, samples of a group]
        of_samples = drawn.reshape(len(drawn), -1).T
        if self._text_slots:
            texts[:, batch.slot + 1 : batch.slot + len(drawn)] = of_samples[:, :-1]
        return Decoding(cache, self._place(drawn[-1]), texts, batch.rows, batch.slot + len(drawn)), of_samples

    def first_tokens(self, batch: Decoding) -> np.ndarray:
        """The tokens that follow the prompts, int32 [samples]."""
        return np.asarray(batch.tokens).reshape(-1)

    def cache_bytes(self) -> int:
        """Bytes of the caches on one device."""
        total, slots = 0, self.where.slots
        each = self.program.cached(slots, self.sizes.samples // self.groups)
        for arrays, specs in zip(each, self.program.cache_specs(slots), strict=True):
            for name, array in arrays.items():
                shape = (self.groups, self.groups, *array.shape)
                shard = NamedSharding(self.mesh, specs[name]).shard_shape(shape)
                total += int(np.prod(shard)) * jnp.dtype(array.dtype).itemsize
        return total

    def _place(self, array: np.ndarray) -> jax.Array:
        """An array on all devices; several processes each give the whole of it."""
        sharding, array = NamedSharding(self.mesh, P()), np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


@partial(jax.jit, static_argnames=("stored", "where", "dtype", "shardings"))
def _split_layers(
    leaf: jax.Array, stored: StageLayers, where: StageLayers, dtype: Any, shardings: tuple[NamedSharding, NamedSharding]
) -> tuple:
    """A leaf of blocks in a training's layout, as one array [pipe, ...] for each slot of a stage.

    `shardings` are that of the leaf without the pipe axis, where layers move from stage to stage
    (`checkpoint.layout.arrange`), and that of the result.
    """
    between, sharding = shardings
    staged = cast(leaf, dtype)
    if stored != where:
        constrain = jax.lax.with_sharding_constraint if stored.idle or where.idle else lambda x, _: x
        layers = layout.from_pipeline_layout(constrain(staged, between), stored)
        staged = constrain(layout.to_pipeline_layout(layers, where), between)
    one = lambda index: jax.lax.with_sharding_constraint(staged[0][:, index], sharding)  # noqa: E731
    return tuple(one(index) for index in range(where.slots))
