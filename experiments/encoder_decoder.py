"""An encoder and a decoder whose blocks pass on source and target. `python -m experiments.encoder_decoder`"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct

from megajax import ParallelConfig, RunConfig, TrainConfig, Trainer
from megajax.models.nnx_model import NNXModel, named_key, parameter, register_model
from megajax.schedules.arguments import CommandParser


@struct.dataclass
class EncoderDecoderConfig:
    name: str = "encoder-decoder"
    encoder: int = 4
    decoder: int = 4
    hidden: int = 32
    tokens: int = 30
    length: int = 8
    kind: str = ""
    layers = property(lambda own: own.encoder + own.decoder)
    layer_kinds = property(lambda own: None if own.kind else ("encoder",) * own.encoder + ("decoder",) * own.decoder)

    def of_kind(self, kind):  # all of whose layers are of this kind
        return self.replace(kind=kind)


def weight(key, name, shape, *axes):
    return parameter(jax.random.normal(named_key(key, name), shape) / shape[0] ** 0.5, *axes)


class Block(nnx.Module):  # Flax's attention, replicated over tensor, and a feedforward layer that is split over it
    def __init__(self, config, key, context):
        self.constrain, h, self.decodes = context.constrain, config.hidden, config.kind == "decoder"
        rngs, plain = nnx.Rngs(named_key(key, "attention")), {"use_bias": False, "decode": False}
        self.attend, self.norm = nnx.MultiHeadAttention(4, h, rngs=rngs, **plain), nnx.LayerNorm(h, rngs=rngs)
        if self.decodes:
            self.read = nnx.MultiHeadAttention(4, h, rngs=rngs, **plain)
        self.up = weight(key, "up", (h, 4 * h), "hidden", "feedforward")
        self.down = weight(key, "down", (4 * h, h), "feedforward", "hidden")

    def __call__(self, x, microbatch, layer):
        name = "target" if self.decodes else "source"
        y = x[name]
        y += self.attend(self.norm(y), mask=nnx.make_causal_mask(y[..., 0]) if self.decodes else None)
        if self.decodes:
            y += self.read(self.norm(y), x["source"])
        inner = self.constrain(jax.nn.gelu(self.norm(y) @ self.up[...]), "batch", None, "feedforward")
        return {**x, name: self.constrain(y + inner @ self.down[...], "batch", None, "hidden")}


class Ends(nnx.Module):
    def __init__(self, config, key, context):
        self.table = weight(key, "table", (config.tokens, config.hidden), None, "hidden")
        self.place = weight(key, "place", (config.length, config.hidden), None, "hidden")

    def embed(self, microbatch):
        return {name: self.table[...][microbatch[name]] + self.place[...] for name in ("source", "target")}

    def head_loss(self, y, microbatch):
        logits = (y["target"] @ self.table[...].T).astype(jnp.float32)
        right = jnp.take_along_axis(jax.nn.log_softmax(logits), microbatch["labels"][..., None], axis=-1)
        return -right.mean((1, 2)).sum()


@register_model(EncoderDecoderConfig)
class EncoderDecoder(NNXModel):
    block_module, shared_module = Block, Ends
    activation_axes = {"source": ("batch", None, "hidden"), "target": ("batch", None, "hidden")}

    def batch_shapes(self):
        names = ("source", "target", "labels")
        return {name: jax.ShapeDtypeStruct((self.config.length,), np.int32) for name in names}


class Reversed:
    def batch(self, consumed_samples):  # of 4 microbatches of 8 samples; token 0 begins a target
        source = np.random.default_rng(consumed_samples).integers(1, 30, (4, 8, 8), "i4")
        labels = source[..., ::-1]
        return {"source": source, "target": np.pad(labels, [(0, 0), (0, 0), (1, 0)])[..., :-1], "labels": labels}


PARALLEL = ParallelConfig(data=2, pipe=2, tensor=2, microbatch_size=4, zero=1)
RUN, DATA = RunConfig(EncoderDecoderConfig(), PARALLEL, TrainConfig(global_batch_size=32, warmup_steps=10)), Reversed()
if __name__ == "__main__":
    CommandParser("python -m experiments.encoder_decoder", description=__doc__).parse_args()
    jax.config.update("jax_num_cpu_devices", 8)  # where there are no GPUs
    print("loss", Trainer(RUN, data=DATA).fit().metrics["loss"])
