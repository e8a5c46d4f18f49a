"""A model of your own in one file, no language model: it removes noise from vectors. `python -m experiments.own_model`"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct

from megajax import ParallelConfig, RunConfig, TrainConfig, Trainer
from megajax.models.nnx_model import NNXModel, named_key, parameter, register_model
from megajax.schedules.arguments import CommandParser


@struct.dataclass
class DenoiserConfig:
    name: str = "denoiser"
    layers: int = 8
    width: int = 32


class Block(nnx.Module):  # x [b, h] -> x + down(gelu(up(x))); the sharding rules split "feedforward" over tensor
    def __init__(self, config, key, context):
        self.constrain, h = context.constrain, config.width
        self.up = parameter(jax.random.normal(named_key(key, "up"), (h, 4 * h)) / h**0.5, "hidden", "feedforward")
        self.down = parameter(jax.random.normal(named_key(key, "down"), (4 * h, h)) / (8 * h), "feedforward", "hidden")

    def __call__(self, x, microbatch, layer):
        inner = self.constrain(jax.nn.gelu(x @ self.up[...]), "batch", "feedforward")
        return self.constrain(x + inner @ self.down[...], "batch", "hidden")


class Ends(nnx.Module):  # held by all pipeline stages; the first stage calls embed, the last one head_loss
    def __init__(self, config, key, context):
        self.table = parameter(jnp.eye(config.width), "hidden", None)

    def embed(self, microbatch):
        return microbatch["noisy"].astype(self.table.dtype) @ self.table[...]

    def head_loss(self, y, microbatch):
        return jnp.square((y @ self.table[...].T).astype(jnp.float32) - microbatch["clean"]).sum()


@register_model(DenoiserConfig)
class Denoiser(NNXModel):
    block_module, shared_module, activation_axes = Block, Ends, ("batch", "hidden")

    def batch_shapes(self):
        return {name: jax.ShapeDtypeStruct((self.config.width,), np.float32) for name in ("noisy", "clean")}


class NoisySigns:
    def batch(self, consumed_samples):  # of 4 microbatches of 8 samples
        clean, noise = np.random.default_rng(consumed_samples).normal(size=(2, 4, 8, 32)).astype(np.float32)
        return {"clean": np.sign(clean), "noisy": np.sign(clean) + noise}


PARALLEL = ParallelConfig(data=2, pipe=2, tensor=2, chunks=2, microbatch_size=4, zero=1)
RUN, DATA = RunConfig(DenoiserConfig(), PARALLEL, TrainConfig(global_batch_size=32, warmup_steps=10)), NoisySigns()
if __name__ == "__main__":
    CommandParser("python -m experiments.own_model", description=__doc__).parse_args()  # --help, and no other option
    jax.config.update("jax_num_cpu_devices", 8)  # where there are no GPUs
    print("loss", Trainer(RUN, data=DATA).fit().metrics["loss"])
