"""A diffusion transformer with adaLN (2212.09748 section 3.2): blocks pass on an image and the vector that conditions it.

    python -m experiments.diffusion_transformer
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct

from megajax import ParallelConfig, RunConfig, TrainConfig, Trainer
from megajax.models.nnx_model import NNXModel, named_key, parameter, register_model
from megajax.schedules.arguments import CommandParser


@struct.dataclass
class DiTConfig:
    name: str = "dit"
    layers: int = 8
    hidden: int = 32
    heads: int = 4
    image: tuple[int, int] = (16, 12)  # patches, and values of one
    classes: int = 10


def weight(key, name, shape, *axes):
    return parameter(jax.random.normal(named_key(key, name), shape) / (2 * shape[0] ** 0.5), *axes)


def norm(x):  # without parameters: the conditioning scales and shifts
    x = x.astype(jnp.float32)
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


class Block(nnx.Module):
    def __init__(self, config, key, context):
        h, a, self.constrain = config.hidden, config.heads, context.constrain
        self.modulation = weight(key, "modulation", (h, 6 * h), "hidden", None)
        self.refine = weight(key, "refine", (h, h), "hidden", None)
        self.qkv = weight(key, "qkv", (h, 3, a, h // a), "hidden", None, "heads", None)
        self.out = weight(key, "out", (a, h // a, h), "heads", None, "hidden")
        self.up = weight(key, "up", (h, 4 * h), "hidden", "feedforward")
        self.down = weight(key, "down", (4 * h, h), "feedforward", "hidden")

    def __call__(self, x, microbatch, layer):
        image, vector = x["image"], jax.nn.silu(x["conditioning"])
        shift, scale, gate, shift2, scale2, gate2 = jnp.split((vector @ self.modulation[...])[:, None], 6, axis=-1)
        y = (norm(image) * (1 + scale) + shift).astype(image.dtype)
        q, k, v = jnp.moveaxis(jnp.einsum("bsh,hnad->bsnad", y, self.qkv[...]), 2, 0)
        scores = jnp.einsum("bsad,btad->bast", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(self.constrain(scores, "batch", "heads", None, None)).astype(v.dtype)
        image += gate * jnp.einsum("bast,btad,adh->bsh", weights, v, self.out[...])
        y = (norm(image) * (1 + scale2) + shift2).astype(image.dtype)
        inner = self.constrain(jax.nn.gelu(y @ self.up[...]), "batch", None, "feedforward")
        return {"image": image + gate2 * (inner @ self.down[...]), "conditioning": x["conditioning"] + vector @ self.refine[...]}


class Ends(nnx.Module):
    def __init__(self, config, key, context):
        (patches, values), h = config.image, config.hidden
        self.patch = weight(key, "patch", (values, h), None, "hidden")
        self.place = weight(key, "place", (patches, h), None, "hidden")
        self.label = weight(key, "label", (config.classes, h), None, "hidden")

    def embed(self, microbatch):
        image = microbatch["noisy"].astype(self.patch.dtype) @ self.patch[...] + self.place[...]
        angles = microbatch["time"][:, None] * 2.0 ** jnp.arange(self.label.shape[1] // 2)
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).astype(image.dtype)
        return {"image": image, "conditioning": time + self.label[...][microbatch["class"]]}

    def head_loss(self, y, microbatch):  # the noise is predicted
        found = norm(y["image"] + y["conditioning"][:, None]) @ self.patch[...].T.astype(jnp.float32)
        return jnp.square(found - microbatch["noise"]).mean((1, 2)).sum()


@register_model(DiTConfig)
class DiT(NNXModel):
    block_module, shared_module = Block, Ends
    activation_axes = {"image": ("batch", None, "hidden"), "conditioning": ("batch", "hidden")}

    def batch_shapes(self):
        sizes = {"noisy": (self.config.image, "f4"), "noise": (self.config.image, "f4")}
        return {name: jax.ShapeDtypeStruct(*of) for name, of in {**sizes, "time": ((), "f4"), "class": ((), "i4")}.items()}


class Images:
    def batch(self, consumed_samples):  # of 4 microbatches of 8 samples: a wave for each class, and noise
        random = np.random.default_rng(consumed_samples)
        label, time = random.integers(0, 10, (4, 8), "i4"), random.random((4, 8), "f4")
        noise, part = random.normal(size=(4, 8, 16, 12)), time[..., None, None]
        clean = np.cos(np.arange(192).reshape(16, 12) * (1 + label[..., None, None]))
        noisy = np.sqrt(1 - part) * clean + np.sqrt(part) * noise
        return {"noisy": np.float32(noisy), "noise": np.float32(noise), "time": time, "class": label}


PARALLEL = ParallelConfig(data=2, pipe=2, tensor=2, chunks=2, microbatch_size=4, zero=1)
RUN, DATA = RunConfig(DiTConfig(), PARALLEL, TrainConfig(global_batch_size=32, warmup_steps=10)), Images()
if __name__ == "__main__":
    CommandParser("python -m experiments.diffusion_transformer", description=__doc__).parse_args()
    jax.config.update("jax_num_cpu_devices", 8)  # where there are no GPUs
    print("loss", Trainer(RUN, data=DATA).fit().metrics["loss"])
