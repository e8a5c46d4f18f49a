"""A diffusion transformer: blocks pass on an image and its conditioning. `python -m experiments.diffusion_transformer`"""

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
    image: tuple[int, int] = (16, 12)  # patches, and values of one


def weight(key, name, shape, *axes):
    return parameter(jax.random.normal(named_key(key, name), shape) / (2 * shape[0] ** 0.5), *axes)


def norm(x):  # without parameters: the conditioning scales and shifts
    return jax.nn.standardize(x.astype(jnp.float32), epsilon=1e-6)


class Block(nnx.Module):  # adaLN, 2212.09748 section 3.2
    def __init__(self, config, key, context):
        h, a, self.constrain = config.hidden, 4, context.constrain
        self.modulation = weight(key, "modulation", (h, 7 * h), "hidden", None)
        self.qkv = weight(key, "qkv", (h, 3, a, h // a), "hidden", None, "heads", None)
        self.out = weight(key, "out", (a, h // a, h), "heads", None, "hidden")
        self.up = weight(key, "up", (h, 4 * h), "hidden", "feedforward")
        self.down = weight(key, "down", (4 * h, h), "feedforward", "hidden")

    def __call__(self, x, microbatch, layer):
        image, vector = x["image"], x["conditioning"][:, None]
        shift, scale, gate, *second, refined = jnp.split(jax.nn.silu(vector) @ self.modulation[...], 7, axis=-1)
        y = (norm(image) * (1 + scale) + shift).astype(image.dtype)
        q, k, v = jnp.moveaxis(jnp.einsum("bsh,hnad->bsnad", y, self.qkv[...]), 2, 0)
        scores = jnp.einsum("bsad,btad->bast", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(self.constrain(scores, "batch", "heads", None, None)).astype(v.dtype)
        image += gate * jnp.einsum("bast,btad,adh->bsh", weights, v, self.out[...])
        inner = jax.nn.gelu((norm(image) * (1 + second[1]) + second[0]).astype(image.dtype) @ self.up[...])
        inner = self.constrain(inner, "batch", None, "feedforward")
        return {"image": image + second[2] * (inner @ self.down[...]), "conditioning": (vector + refined)[:, 0]}


class Ends(nnx.Module):
    def __init__(self, config, key, context):
        for name, rows in {"place": config.image[0], "patch": config.image[1], "label": 10}.items():
            setattr(self, name, weight(key, name, (rows, config.hidden), None, "hidden"))

    def embed(self, microbatch):
        image = microbatch["noisy"].astype(self.patch.dtype) @ self.patch[...] + self.place[...]
        angles = microbatch["time"][:, None] * 2.0 ** (jnp.arange(self.label.shape[1] // 2) - 8)
        vector = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1) + self.label[...][microbatch["class"]]
        return {"image": image, "conditioning": vector.astype(image.dtype)}

    def head_loss(self, y, microbatch):  # the noise is predicted
        found = norm(y["image"] + y["conditioning"][:, None]) @ self.patch[...].T.astype(jnp.float32)
        return jnp.square(found - microbatch["noise"]).mean((1, 2)).sum()


@register_model(DiTConfig)
class DiT(NNXModel):
    block_module, shared_module = Block, Ends
    activation_axes = {"image": ("batch", None, "hidden"), "conditioning": ("batch", "hidden")}

    def batch_shapes(self):
        shapes = {"noisy": self.config.image, "noise": self.config.image, "time": (), "class": ()}
        return {name: jax.ShapeDtypeStruct(of, "i4" if name == "class" else "f4") for name, of in shapes.items()}


class Images:
    def batch(self, consumed_samples):  # of 4 microbatches of 8 samples: noise on a class's grey
        random = np.random.default_rng(consumed_samples)
        label, time = random.integers(0, 10, (4, 8), "i4"), random.random((4, 8), "f4")
        noise, clean = random.normal(size=(4, 8, 16, 12)).astype("f4"), np.cos(label, dtype="f4")[..., None, None]
        return {"noisy": clean + time[..., None, None] * noise, "noise": noise, "time": time, "class": label}


PARALLEL = ParallelConfig(data=2, pipe=2, tensor=2, chunks=2, microbatch_size=4, zero=1)
RUN, DATA = RunConfig(DiTConfig(), PARALLEL, TrainConfig(global_batch_size=32, warmup_steps=10)), Images()
if __name__ == "__main__":
    CommandParser("python -m experiments.diffusion_transformer", description=__doc__).parse_args()
    jax.config.update("jax_num_cpu_devices", 8)  # where there are no GPUs
    print("loss", Trainer(RUN, data=DATA).fit().metrics["loss"])
