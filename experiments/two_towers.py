"""A retriever of two towers whose blocks pass on query and documents. `python -m experiments.two_towers`"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct

from megajax import ParallelConfig, RunConfig, TrainConfig, Trainer
from megajax.models.nnx_model import NNXModel, named_key, parameter, register_model
from megajax.schedules.arguments import CommandParser


@struct.dataclass
class TwoTowersConfig:
    name: str = "two-towers"
    layers: int = 4
    query: tuple[int, int] = (16, 6)  # hidden size and tokens
    document: tuple[int, int] = (32, 12)
    candidates: int = 4  # documents of a query, of which the first is right
    tokens: int = 40


def weight(key, name, shape, *axes):
    return parameter(jax.random.normal(named_key(key, name), shape) / shape[0] ** 0.5, *axes)


class Tower(nnx.Module):  # one layer of one tower, on x [..., tokens, hidden]
    def __init__(self, hidden, key, context):
        self.constrain = context.constrain
        self.norm = nnx.RMSNorm(hidden, rngs=nnx.Rngs(0))
        self.attend = nnx.MultiHeadAttention(
            4, hidden, rngs=nnx.Rngs(named_key(key, "attend")), use_bias=False, decode=False
        )
        self.up = weight(key, "up", (hidden, 4 * hidden), "hidden", "feedforward")
        self.down = weight(key, "down", (4 * hidden, hidden), "feedforward", "hidden")

    def __call__(self, x):
        x += self.attend(self.norm(x))
        inner = jax.nn.gelu(self.norm(x) @ self.up[...])
        inner = self.constrain(inner, "batch", *[None] * (x.ndim - 2), "feedforward")
        return self.constrain(x + inner @ self.down[...], "batch", *[None] * (x.ndim - 1))


class Block(nnx.Module):
    def __init__(self, config, key, context):
        self.query = Tower(config.query[0], named_key(key, "query"), context)
        self.document = Tower(config.document[0], named_key(key, "document"), context)

    def __call__(self, x, microbatch, layer):
        return {"query": self.query(x["query"]), "document": self.document(x["document"])}


class Ends(nnx.Module):
    def __init__(self, config, key, context):
        self.query = weight(key, "query", (config.tokens, config.query[0]), None, "hidden")
        self.document = weight(key, "document", (config.tokens, config.document[0]), None, "hidden")
        self.match = weight(key, "match", (config.query[0], config.document[0]), "hidden", None)

    def embed(self, microbatch):
        return {name: getattr(self, name)[...][microbatch[name]] for name in ("query", "document")}

    def head_loss(self, y, microbatch):
        query, documents = (y[name].astype(jnp.float32).mean(-2) for name in ("query", "document"))
        scores = jnp.einsum("bh,hk,bck->bc", query, self.match[...].astype(jnp.float32), documents)
        return -jax.nn.log_softmax(scores)[:, 0].sum()


@register_model(TwoTowersConfig)
class TwoTowers(NNXModel):
    block_module, shared_module = Block, Ends
    activation_axes = {"query": ("batch", None, "hidden"), "document": ("batch", None, None, "hidden")}

    def batch_shapes(self):
        query, documents = (self.config.query[1],), (self.config.candidates, self.config.document[1])
        return {name: jax.ShapeDtypeStruct(of, np.int32) for name, of in (("query", query), ("document", documents))}


class Pairs:
    def batch(self, consumed_samples):  # of 4 microbatches of 8 queries: the first six tokens of the right document
        documents = np.random.default_rng(consumed_samples).integers(0, 40, (4, 8, 4, 12), "i4")
        return {"query": documents[:, :, 0, :6], "document": documents}


PARALLEL = ParallelConfig(data=2, pipe=2, tensor=2, chunks=2, microbatch_size=4, zero=1)
RUN, DATA = RunConfig(TwoTowersConfig(), PARALLEL, TrainConfig(global_batch_size=32, warmup_steps=10)), Pairs()
if __name__ == "__main__":
    CommandParser("python -m experiments.two_towers", description=__doc__).parse_args()
    jax.config.update("jax_num_cpu_devices", 8)  # where there are no GPUs
    print("loss", Trainer(RUN, data=DATA).fit().metrics["loss"])
