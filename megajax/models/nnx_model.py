"""A `PipelineModel` made of two Flax NNX modules: the block, and what all pipeline ranks share (embedding and head).

NNX defines parameters and their metadata. The modules are split once, here, and merged again inside each pure function,
so everything outside this file is plain dictionaries of arrays.
"""

import functools
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from megajax.config import ConfigError
from megajax.config.layer_kinds import layer_kinds
from megajax.models import remat
from megajax.models.interface import Activations, Microbatch, ModelContext, PipelineModel, Tree, register_model
from megajax.ops.cached_attention import Cache

__all__ = ["NNXModel", "named_key", "parameter", "register_model"]

# Names of parameters without weight decay: "bias", "b", "qkv_bias", "scale", "gamma"; and all of a "norm" or "layer_norm".
UNDECAYED = re.compile(
    r"(^|/|_)(b|bias(es)?|scales?|gain|gamma|beta)\d*$|(^|/|_|layer|rms|group|batch)(norm|ln)(_|\d|/|$)", re.IGNORECASE
)


def named_key(key: jax.Array, name: str) -> jax.Array:
    """A key for `name`: a parameter's value depends on its name, not on the other parameters of the model."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def parameter(
    value: jax.Array,
    *axes: str | None,
    decay: bool | None = None,
    fp32: bool = False,
    looked_up: bool = False,
    trainable: bool = True,
) -> nnx.Param:
    """A parameter with one logical axis name (or None) for each of its axes.

    The names are metadata of megajax, not NNX's `out_sharding`, for which NNX would look up a mesh axis at once. A plain
    `nnx.Param` is legal too: it is replicated over tensor.

    Args:
      value: fp32, full size.
      axes: names, see megajax.sharding.rules.
      decay: whether weight decay applies. None: by its name and number of axes, see `NNXModel.decays`.
      fp32: whether blocks get it in fp32 whatever the run's precision.
      looked_up: whether only rows of it are read, and converted then, as `ModelContext.vocabulary.lookup` does. A table that
        no replica gathers then stays in fp32, without a second one in the run's precision.
      trainable: False: it is frozen, and has no gradient and no optimizer state.
    """
    assert value.ndim == len(axes)
    return nnx.Param(value, logical_axes=axes, decay=decay, fp32=fp32, looked_up=looked_up, trainable=trainable)


class NNXModel(PipelineModel):
    """A model from two module classes, both constructed as `Module(config, key, context)`.

    A subclass sets `block_module` and `shared_module` and writes `batch_shapes`; `key` is a different one for each layer.
    If the config has kinds of layers (`PipelineModel`), the block of a kind is that of `config.of_kind(kind)`.

    Attributes:
      block_module: its `__call__(x, microbatch, layer)` returns x. For a model that generates text it has
        `cached(x, cache, microbatch, layer)` too, see `PipelineModel.block_cached`.
      shared_module: has `embed(microbatch) -> x` and `head_loss(y, microbatch) -> fp32 scalar`; `logits(y)` if the model
        generates text or is evaluated; and optionally `token_scores(y, microbatch)`, see `PipelineModel`.
      saved_names: recompute mode -> names (`checkpoint_name`) of the values that a block saves for its backward. None:
        "none" saves everything, "selective" the results of matmuls with weights, "full" the block's input alone.
    """

    block_module: ClassVar[Callable[..., nnx.Module]]
    shared_module: ClassVar[Callable[..., nnx.Module]]
    saved_names: ClassVar[Mapping[str, tuple[str, ...]] | None] = None

    def __init__(self, config: Any, context: ModelContext = ModelContext()):  # noqa: B008 (frozen)
        """Makes no arrays. The first use of a module's structure or parameters traces its constructor.

        Raises:
          ConfigError: unknown recompute mode; and at that use a module with state other than parameters.
        """
        super().__init__(config, context)
        self._checkpointed = remat.checkpointed(self._run_block, context.recompute, self.saved_names)

    @functools.cached_property
    def _blocks(self) -> dict[str | None, tuple[nnx.GraphDef, nnx.State]]:
        """Structure and parameters of the block of each kind; of a model without kinds those of None."""
        configs = {kind: self.config.of_kind(kind) if kind else self.config for kind in _kinds(self.config)}
        return {kind: _split(lambda key: self.block_module(configs[kind], key, self.context)) for kind in configs}  # noqa: B023

    @functools.cached_property
    def _shared(self) -> tuple[nnx.GraphDef, nnx.State]:
        return _split(lambda key: self.shared_module(self.config, key, self.context))

    def init(self, key: jax.Array) -> Tree:
        """Fresh parameters. A value depends on the key, the parameter's name and the layer, not on the mesh."""

        def of(kind):
            config = self.config.of_kind(kind) if kind else self.config

            def block(layer):
                layer_key = jax.random.fold_in(named_key(key, "blocks"), layer)
                return _values(self.block_module(config, layer_key, self.context))

            numbers = np.flatnonzero(np.array(layer_kinds(self.config)) == kind) if kind else jnp.arange(config.layers)
            return jax.vmap(block)(numbers)

        return {
            "blocks": _by_kind({kind: of(kind) for kind in _kinds(self.config)}),
            "shared": _values(self.shared_module(self.config, named_key(key, "shared"), self.context)),
        }

    def logical_axes(self) -> Tree:
        """From the parameters' metadata."""

        def axes(name: str, of: nnx.Param) -> tuple[str | None, ...]:
            own = of.get_metadata().get("logical_axes", (None,) * len(of.shape))
            return ("layers", *own) if name.startswith("blocks/") else own

        return self._map_named(axes)

    def decays(self, name: str, of: nnx.Param) -> bool:
        """Whether weight decay applies to a parameter of a name such as "blocks/attention/query/bias"; see `decay_mask`.

        Default: as its `decay` says (`parameter`). Without one, not to biases, scales and norms by their names, whatever
        their shape: those of nnx.MultiHeadAttention have two axes; nor to other arrays of one axis or none.
        """
        given = of.get_metadata().get("decay")
        return len(of.shape) > 1 and not UNDECAYED.search(name) if given is None else given

    def decay_mask(self) -> Tree:
        """`decays` of each parameter."""
        return self._map_named(self.decays)

    def trains(self, name: str, of: nnx.Param) -> bool:
        """Whether a parameter of a name such as "blocks/attention/qkv/kernel" is trained. Default: by its `trainable`."""
        return of.get_metadata().get("trainable", True)

    def trainable_mask(self) -> Tree:
        """`trains` of each parameter."""
        return self._map_named(self.trains)

    def _map_named(self, of: Callable[[str, nnx.Param], Any]) -> Tree:
        blocks = {kind: _map_named(of, block[1], "blocks") for kind, block in self._blocks.items()}
        return {"blocks": _by_kind(blocks), "shared": _map_named(of, self._shared[1], "shared")}

    def fp32_mask(self) -> Tree:
        """From the parameters' metadata."""
        return self._map_named(lambda _, of: of.get_metadata().get("fp32", False))

    def lookup_mask(self) -> Tree:
        """From the parameters' metadata."""
        return self._map_named(lambda _, of: of.get_metadata().get("looked_up", False))

    def embed(self, shared: Tree, microbatch: Microbatch) -> Activations:
        """The shared module's `embed`."""
        return self.merged_shared(shared).embed(microbatch)

    def block(self, weights: Tree, x: Activations, microbatch: Microbatch, layer: jax.Array) -> Activations:
        """The block module's `__call__`, checkpointed by the recompute mode."""
        return self._checkpointed(weights, x, microbatch, layer)

    def head_loss(self, shared: Tree, y: Activations, microbatch: Microbatch) -> jax.Array:
        """The shared module's `head_loss`."""
        return self.merged_shared(shared).head_loss(y, microbatch)

    def logits(self, shared: Tree, y: jax.Array) -> jax.Array:
        """The shared module's `logits`."""
        if not hasattr(self.shared_module, "logits"):
            return super().logits(shared, y)
        return self.merged_shared(shared).logits(y)

    def token_scores(self, shared: Tree, y: jax.Array, microbatch: Microbatch) -> tuple[jax.Array, jax.Array]:
        """The shared module's `token_scores`; from `logits` if it has none."""
        if not hasattr(self.shared_module, "token_scores"):
            return super().token_scores(shared, y, microbatch)
        return self.merged_shared(shared).token_scores(y, microbatch)

    def block_cached(
        self, weights: Tree, x: jax.Array, cache: Cache, microbatch: Microbatch, layer: jax.Array
    ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """The block module's `cached`."""
        if not hasattr(self.block_module, "cached"):
            return super().block_cached(weights, x, cache, microbatch, layer)
        return self._merged(weights).cached(x, cache, microbatch, layer)

    def merged_shared(self, shared: Tree) -> Any:
        """The shared module with these parameters, for methods of its own."""
        return nnx.merge(self._shared[0], shared)

    def _run_block(self, weights: Tree, x: Activations, microbatch: Microbatch, layer: jax.Array) -> Activations:
        return self._merged(weights)(x, microbatch, layer)

    def _merged(self, weights: Tree) -> nnx.Module:
        """The block that has these weights; kinds differ in their structure."""
        graphs = [graph for graph, _ in self._blocks.values()]
        if len(graphs) > 1:
            found = jax.tree.structure(weights)
            graphs = [
                graph
                for graph, parameters in self._blocks.values()
                if jax.tree.structure(_map_named(lambda *_: 0, parameters, "blocks")) == found
            ]
            assert len(graphs) == 1, "kinds of layers must differ in the structure of their parameters"
        return nnx.merge(graphs[0], weights)


def _kinds(config: Any) -> tuple[str | None, ...]:
    """The kinds of layers of a model's configuration; None: they are all alike."""
    kinds = layer_kinds(config)
    return (None,) if kinds is None else tuple(sorted(set(kinds)))


def _by_kind(trees: dict[str | None, Tree]) -> Tree:
    """A tree for each kind, or the one tree of a model without kinds."""
    return trees[None] if None in trees else trees


def _split(make: Callable[[jax.Array], nnx.Module]) -> tuple[nnx.GraphDef, nnx.State]:
    """The structure of the module that `make` returns for a key, and its parameters as shapes with metadata."""
    key = jax.eval_shape(lambda: jax.random.key(0))  # a shape: the planner must not start the devices
    graph, parameters, rest = nnx.split(nnx.eval_shape(make, key), nnx.Param, ...)
    if jax.tree.leaves(rest):
        names = ", ".join("/".join(map(str, path)) for path, _ in nnx.to_flat_state(rest))
        raise ConfigError(f"{names}: a model's modules may hold nnx.Param only, and these are of other types.")
    return graph, parameters


def _values(module: nnx.Module) -> Tree:
    """The parameters of a module as nested dictionaries of arrays."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def _map_named(of: Callable[[str, nnx.Param], Any], tree, path: str) -> Tree:
    """A nested dictionary of `of` each parameter's path and itself, in an NNX state."""
    below = lambda name, node: _map_named(of, node, f"{path}/{name}")  # noqa: E731
    leaf = lambda name, node: of(f"{path}/{name}", node)  # noqa: E731
    return {name: (leaf if isinstance(node, nnx.Param) else below)(name, node) for name, node in tree.items()}
