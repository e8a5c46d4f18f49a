"""One transformer block, GPT's, llama's or Qwen's by configuration: attention, then feedforward, on a normed residual.

Shapes: b samples, s tokens, h = hidden, a heads of size d in g groups that share a key and value head (g = a: plain
multi-head attention), f = feedforward. Every parameter has logical axis names as metadata, and every activation passes
`constrain` with its own; megajax.sharding.rules maps the names to mesh axes.
With "groups", "heads" and "feedforward" on the tensor axis this is Megatron's column- then row-parallel pair
(1909.08053 section 3), and with the residual's "sequence" there too its sequence parallelism (2205.05198 section 4.2):

    x [sequence split] -> norm -> (all-gather) -> qkv, attention -> output -> (reduce-scatter) -> + x
                       -> norm -> (all-gather) -> up, activation -> down   -> (reduce-scatter) -> + x

`megajax.models.gpt` and `megajax.models.bert` have the models of these blocks.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.config import ModelConfig
from megajax.config.lora import is_base
from megajax.models import remat
from megajax.models.dropout import Dropout
from megajax.models.feedforward import FeedForward
from megajax.models.interface import Microbatch, ModelContext
from megajax.models.mixers.attention import Attention, with_rotary_table
from megajax.models.mixers.latent import LatentAttention
from megajax.models.mixers.recurrent import GatedDelta, Mamba2
from megajax.models.moe import Experts
from megajax.models.nnx_model import NNXModel, named_key
from megajax.models.norms import Norm
from megajax.ops.cached_attention import Cache
from megajax.ops.linear import RESIDUAL

__all__ = ["Block", "TransformerModel"]

MIXERS = {"attention": Attention, "mamba2": Mamba2, "gated_delta": GatedDelta}


class Block(nnx.Module):
    """x + attention(norm(x)), then x + feedforward(norm(x)), or with norms elsewhere.

    In place of attention there may be another mixer, `config.mixer`, or "none", without the first part; without
    `feedforward` the second part is missing.
    With `config.norm_placement` "post" x + norm(attention(x)), with "both" x + norm(attention(norm(x))), with "parallel"
    x + attention(norm(x)) + feedforward(norm(x)); with `config.post_norm`, of BERT, norm(x + attention(x)).
    """

    def __init__(self, config: ModelConfig, key: jax.Array, context: ModelContext):
        """Draws the weights of one layer from its key."""
        self.config, self.context, self.constrain = config, context, context.constrain
        placement = config.norm_placement
        if placement != "post" and config.mixer != "none":
            self.attention_norm = Norm(config)
        if placement in ("pre", "both") and config.feedforward_size:
            self.feedforward_norm = Norm(config)
        if placement in ("post", "both"):
            self.attention_output_norm, self.feedforward_output_norm = Norm(config), Norm(config)
        name = "attention" if config.mixer == "attention" else "mixer"  # a parameter's name says what it is of
        if config.mixer != "none":
            mixer = LatentAttention if name == "attention" and config.kv_latent else MIXERS[config.mixer]
            setattr(self, name, mixer(config, named_key(key, name), context))
        inner = Experts if config.experts else FeedForward
        if config.feedforward_size:
            self.feedforward = inner(config, named_key(key, "feedforward"), context)

    def _split(self, y: jax.Array, name: str) -> jax.Array:
        """The normed residual, sharded by sequence before it is gathered, so that its gradient is reduce-scattered."""
        return checkpoint_name(self.constrain(y, *RESIDUAL), name)

    def _added(self, part: str, y: jax.Array, dropout: Dropout) -> jax.Array:
        """What is added to the residual for the result y of attention or the MLP, "attention" or "feedforward"."""
        norm = getattr(self, f"{part}_output_norm", None)
        if norm is not None:
            y = norm(self._split(y, f"{part}_output"))
        y = dropout(y, part, *RESIDUAL)
        multiplier = self.config.residual_multiplier
        return y if multiplier == 1 else y * jnp.asarray(multiplier, y.dtype)

    def __call__(self, x: jax.Array, microbatch: Microbatch, layer: jax.Array) -> jax.Array:
        """From x [b, split s, h] to the same shape, type and sharding."""
        return self.cached(x, None, microbatch, layer)[0]

    def cached(
        self, x: jax.Array, cache: Cache | None, microbatch: Microbatch, layer: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """As a call, for tokens that follow those of `cache`; also returns their entries in it (`cache_arrays`)."""
        dropout = Dropout(self.config.dropout, self.context, microbatch, layer)
        lora_drop = (
            Dropout(self.config.lora_dropout, self.context, microbatch, layer) if self.config.lora_dropout else None
        )
        post_norm, placement = self.config.post_norm, self.config.norm_placement
        one_pass = self.context.operations.norm
        entries, mixes = {}, self.config.mixer != "none"
        if mixes:
            y = x
            if not post_norm and placement != "post":
                y = self.attention_norm(x, one_pass)
                y = y if self.config.first_attention_norm else jnp.where(layer == 0, x, y)
                y = self._split(y, "attention_input")
            mix = self.attention if self.config.mixer == "attention" else self.mixer
            attended, entries = mix(y, microbatch, layer, dropout, cache, lora_drop)
            x = x + self._added("attention", attended, dropout)
        if not self.config.feedforward_size:
            return self.constrain(x, *RESIDUAL), entries
        if placement != "parallel":
            x = checkpoint_name(self.constrain(x, *RESIDUAL), "residual") if mixes else x
            norm = self.attention_norm if post_norm else None if placement == "post" else self.feedforward_norm
            y = x if norm is None else self._split(norm(x, one_pass), "feedforward_input")
        fed = self.feedforward(y, microbatch) if self.config.experts else self.feedforward(y, lora_drop)
        x = (y if post_norm else x) + self._added("feedforward", fed, dropout)
        if post_norm:
            x = self.feedforward_norm(checkpoint_name(self.constrain(x, *RESIDUAL), "output_residual"))
        return self.constrain(x, *RESIDUAL), entries


class TransformerModel(NNXModel):
    """What all models of these blocks have; a subclass adds its shared module, batches and losses."""

    block_module = Block
    saved_names = remat.MODES

    def trains(self, name: str, of: nnx.Param) -> bool:
        """With adapters, only these, and of BERT a task's head."""
        return super().trains(name, of) and not is_base(self.config, name)

    def prepare_microbatch(self, microbatch: Microbatch) -> Microbatch:
        """With rotary positions, also their table."""
        return with_rotary_table(self.config, microbatch, microbatch["tokens"].shape[1])

    @property
    def vocabulary(self) -> int:
        """Tokens, without padding."""
        return self.config.vocabulary
