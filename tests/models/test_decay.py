"""Which parameters decay: by their names, by `parameter(decay=...)`, or as a model says."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx, struct

from megajax.models.interface import ModelContext
from megajax.models.nnx_model import NNXModel, parameter
from tests import small


@struct.dataclass
class OwnConfig:
    name: str = "own"
    layers: int = 2


class OwnBlock(nnx.Module):
    def __init__(self, config, key, context):
        rngs = nnx.Rngs(key)
        self.attention = nnx.MultiHeadAttention(4, 8, use_bias=True, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.ln_2 = nnx.RMSNorm(8, rngs=rngs)
        self.group_norm = nnx.GroupNorm(8, num_groups=2, rngs=rngs)
        self.conv = nnx.Conv(8, 8, (3,), rngs=rngs)
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.low_rank = nnx.Param(jnp.ones((8, 2)))
        self.head_scale = nnx.Param(jnp.ones((4, 2)))
        self.relative_bias = nnx.Param(jnp.ones((4, 5)))
        self.b = nnx.Param(jnp.ones((4, 2)))
        self.gate = parameter(jnp.ones(8), "hidden")
        self.kept = parameter(jnp.ones(8), "hidden", decay=True)
        self.table = parameter(jnp.ones((8, 8)), "hidden", None, decay=False)
        self.symbols = parameter(jnp.ones((8, 8)), "hidden", None)


class OwnShared(nnx.Module):
    def __init__(self, config, key, context):
        self.embedding = nnx.Embed(7, 8, rngs=nnx.Rngs(key))


class Own(NNXModel):
    block_module, shared_module = OwnBlock, OwnShared

    def batch_shapes(self):
        return {}


def mask_of(model):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): value
        for path, value in jax.tree.leaves_with_path(model.decay_mask())
    }


def test_by_name_whatever_the_number_of_axes():
    mask = mask_of(Own(OwnConfig(), ModelContext()))
    assert {name for name, decays in mask.items() if decays} == {
        *(f"blocks/attention/{part}/kernel" for part in ("query", "key", "value", "out")),
        "blocks/conv/kernel",
        "blocks/up/kernel",
        "blocks/low_rank",
        "blocks/kept",
        "blocks/symbols",
        "shared/embedding/embedding",
    }
    assert "blocks/attention/query/bias" in mask and "blocks/b" in mask


def test_a_model_may_say_otherwise():
    class Says(Own):
        def decays(self, name, of):
            return "embedding" not in name and (name == "blocks/gate" or super().decays(name, of))

    before, after = mask_of(Own(OwnConfig())), mask_of(Says(OwnConfig()))
    assert {name for name in before if before[name] != after[name]} == {"shared/embedding/embedding", "blocks/gate"}


@pytest.mark.parametrize(
    "config",
    [
        small.MODEL,
        small.QWEN,
        small.BERT,
        small.SPARSE,
        dataclasses.replace(small.QWEN, query_key_norm_over="projection"),
    ],
    ids=str,
)
def test_of_the_built_in_models_matrices_decay(config):
    """All matrices and tables; the axes of a matrix's sides may be several."""
    sides = ("kernel", "tokens", "positions", "types", "vocabulary", "up", "down")
    for name, decays in mask_of(small.build_model(config)).items():
        assert decays == (name.split("/")[-1] in sides), name
