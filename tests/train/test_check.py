"""`megajax.check`: a model and batches that do not fit each other are named in one line, before anything is compiled."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import megajax
from experiments import own_model
from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig
from megajax.models.gpt import GPT, Shared
from megajax.models.interface import ModelContext
from megajax.train.check import check
from megajax.train.trainer import Trainer
from tests import dense_experts, small

CONFIG = own_model.DenoiserConfig(layers=2, width=6)
BATCH = {name: np.zeros((2, 4, 6), np.float32) for name in ("noisy", "clean")}
HERE = re.escape(__file__)


def denoiser(**parts):
    """The example's model with functions of its block or ends replaced."""
    block = type("Block", (own_model.Block,), {k: v for k, v in parts.items() if k == "__call__"})
    ends = type("Ends", (own_model.Ends,), {k: v for k, v in parts.items() if k in ("embed", "head_loss")})
    rest = {k: v for k, v in parts.items() if k not in ("__call__", "embed", "head_loss")}
    return type("Own", (own_model.Denoiser,), {"block_module": block, "shared_module": ends, **rest})(
        CONFIG, ModelContext(dtype=jnp.bfloat16)
    )


@pytest.mark.parametrize(
    "config",
    [small.MODEL, small.QWEN, small.BERT, dense_experts.FIRST_DENSE, dense_experts.DROPPING],
    ids=["gpt", "qwen", "bert", "dense and sparse", "dropping"],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_built_in_models_and_batches_fit(config, precision):
    run = small.make_run((2, 1, 1), microbatches=2, model=config, train={"precision": precision})
    check(run, small.make_batch(run))


def test_the_example_fits_with_whatever_precision():
    check(own_model.RUN, own_model.DATA)
    check(denoiser(), {name: array.astype(np.float64) for name, array in BATCH.items()})
    assert megajax.check is check


def misfits():
    wide = lambda self, x, microbatch, layer: (x @ self.up[...]).astype(x.dtype)  # noqa: E731
    promoted = lambda self, x, microbatch, layer: x.astype(jnp.float32)  # noqa: E731
    fails = lambda self, x, microbatch, layer: x @ jnp.ones((7, 7))  # noqa: E731
    axes = {"up": ("layers", "hidden"), "down": ("layers", "feedforward", "hidden")}
    axes_of = lambda self: {"blocks": axes, "shared": {"table": ("hidden", None)}}  # noqa: E731
    mask = lambda self: {"blocks": {"up": True}, "shared": {"table": True}}  # noqa: E731
    return [
        ({"__call__": wide}, BATCH, "block of Own returns bfloat16 [4, 24]; expected bfloat16 [4, 6], as embed"),
        ({"__call__": promoted}, BATCH, "block of Own returns float32 [4, 6]; expected bfloat16 [4, 6]"),
        (
            {"__call__": fails},
            BATCH,
            rf"block does not take the batch \({HERE}, line \d+\): TypeError: dot_general requires",
        ),
        (
            {"embed": lambda self, microbatch: microbatch["tokens"]},
            BATCH,
            rf"embed reads 'tokens' of the microbatch \({HERE}, line \d+\), and the batch has clean, noisy",
        ),
        (
            {"embed": lambda self, microbatch: (microbatch["noisy"],) * 2},
            BATCH,
            "embed of Own returns a tuple for the batch; expected one array of 2 axes, those of activation_axes = .'batch'",
        ),
        (
            {"embed": lambda self, microbatch: microbatch["noisy"][:, None]},
            BATCH,
            "embed of Own returns float32 [4, 1, 6] for the batch",
        ),
        (
            {"head_loss": lambda self, y, microbatch: jnp.square(y).mean(1)},
            BATCH,
            r"head_loss of Own returns bfloat16 [4]; expected float32 []",
        ),
        (
            {"head_loss": lambda self, y, microbatch: y.sum()},
            BATCH,
            r"head_loss of Own returns bfloat16 []; expected float32 []",
        ),
        (
            {"loss_weight": lambda self, batch: batch["noisy"].sum(-1)},
            BATCH,
            "loss_weight of Own returns float32 [2, 4]; expected a scalar",
        ),
        (
            {"logical_axes": axes_of},
            BATCH,
            r"names 2 axes of blocks/up, \('layers', 'hidden'\); expected one for each axis of float32 [2, 6, 24]",
        ),
        (
            {"decay_mask": mask},
            BATCH,
            r"decay_mask\(\) of Own has no blocks/down: return a tree like the parameters of init\(\)",
        ),
        (
            {},
            BATCH | {"noisy": np.zeros((2, 4, 5), np.float32)},
            r"the batch\['noisy'\] is float32 [2, 4, 5]; expected floats [microbatches, samples, 6], by batch_shapes",
        ),
        (
            {},
            BATCH | {"clean": np.zeros((2, 4, 6), np.int64)},
            r"the batch\['clean'\] is int64 [2, 4, 6]; expected floats",
        ),
        ({}, {"clean": BATCH["clean"]}, "embed reads 'noisy' of the microbatch"),
    ]


@pytest.mark.parametrize(("parts", "batch", "message"), misfits())
def test_what_does_not_fit_is_named(parts, batch, message):
    pattern = re.sub(r"\[(?=[\w ,]*\])", r"\[", message)
    with pytest.raises(ConfigError, match=pattern) as error:
        check(denoiser(**parts), batch)
    assert "\n" not in str(error.value)


def test_ids_are_checked_too_and_a_head_may_read_other_arrays():
    run = small.make_run(microbatches=2)
    batch = {name: array.copy() for name, array in small.make_batch(run).items()}
    batch["tokens"][1, 2, 3] = 61
    with pytest.raises(ConfigError, match="'tokens' has 61 at microbatch 1, sample 2"):
        check(run, batch)

    class Rated(Shared):
        def head_loss(self, y, microbatch):
            return (super().head_loss(y, microbatch) * microbatch["rating"]).sum()

    class RatedGPT(GPT):
        shared_module = Rated

    model = RatedGPT(small.MODEL, ModelContext())
    with pytest.raises(ConfigError, match="head_loss reads 'rating' of the microbatch"):
        check(model, small.make_batch(run))
    check(model, small.make_batch(run) | {"rating": np.ones((2, 8), np.float32)})


def test_a_trainer_checks_its_first_batch_before_it_compiles(tmp_path):
    class Data:
        def batch(self, consumed_samples):
            return {"noisy": np.zeros((2, 8, 6)), "clear": np.zeros((2, 8, 6))}

    run = RunConfig(
        CONFIG, ParallelConfig(microbatch_size=8), TrainConfig(global_batch_size=16, steps=2, warmup_steps=1)
    )
    trainer = Trainer(run, data=Data(), devices=jax.devices()[:1])
    with pytest.raises(
        ConfigError, match="head_loss reads 'clean' of the microbatch .*, and batch.0. has clear, noisy"
    ):
        trainer.fit()
