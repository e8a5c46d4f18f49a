"""What a run may resume with: models with the same parameters. Judged by the shapes that the models' own code gives."""

import dataclasses

import jax
import pytest

from megajax.checkpoint import metadata
from megajax.checkpoint.shapes import MEASUREMENTS
from megajax.config import BertConfig, ConfigError, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.config.same_parameters import changed_parameters
from megajax.models.context import model_shapes
from megajax.pipeline.parameters import initial_params

BASE = {"layers": 4, "hidden": 32, "heads": 4, "vocabulary": 100, "sequence_length": 32}
LLAMA = {"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "biases": False, "tied_embeddings": False}
SCALED = {"rotary_scaling": "yarn", "rotary_factor": 2.0}
EXPERTS = {"experts": 4, "shared_feedforward": 64, "dense_layers": 1, "balance_bias_rate": 0.1}
MODELS = {
    "gpt": ModelConfig(**BASE),
    "llama": ModelConfig(**BASE, **LLAMA, **SCALED, kv_heads=2, query_key_norm=True),
    "experts": ModelConfig(**BASE, **LLAMA, **EXPERTS),
    "bert": BertConfig(**BASE, output_heads="classification"),
}
# What the issue's users change between the stages of a run: long contexts, DeepSeek-V3's recipe.
USED_OTHERWISE = [
    *[("llama", "sequence_length", 64), ("llama", "rotary_base", 5e5), ("llama", "rotary_fraction", 0.5)],
    *[("llama", "rotary_factor", 4.0), ("llama", "rotary_scaling", "linear"), ("llama", "rotary_original_length", 16)],
    *[("gpt", "sliding_window", 8), ("gpt", "activation", "gelu_exact"), ("gpt", "norm_epsilon", 1e-6)],
    *[("gpt", "dropout", 0.1), ("llama", "norm", "layernorm"), ("gpt", "query_key_norm_over", "projection")],
    *[("experts", "balance_loss", 0.1), ("experts", "balance_bias_rate", 0.0), ("experts", "router_z_loss", 0.1)],
    *[("experts", "expert_capacity", 1.5), ("experts", "experts_per_token", 1), ("experts", "router_softmax", "after")],
    *[("experts", "router_normalize", False), ("bert", "choices", 2)],
]
OTHER_PARAMETERS = [
    *[
        ("gpt", "layers", 8),
        ("gpt", "hidden", 64),
        ("gpt", "heads", 2),
        ("gpt", "head_size", 16),
        ("llama", "kv_heads", 1),
    ],
    *[
        ("gpt", "feedforward", 64),
        ("gpt", "vocabulary", 300),
        ("gpt", "sequence_length", 64),
        ("gpt", "norm", "rmsnorm"),
    ],
    *[("gpt", "activation", "swiglu"), ("llama", "activation", "gelu"), ("gpt", "positions", "rotary")],
    *[("gpt", "tied_embeddings", False), ("gpt", "biases", False), ("llama", "qkv_biases", True)],
    *[("llama", "query_key_norm", False), ("llama", "query_key_norm_over", "projection")],
    *[("experts", "experts", 8), ("experts", "dense_layers", 2), ("experts", "moe_layer_freq", "2")],
    *[("experts", "dense_feedforward", 48), ("experts", "shared_feedforward", 0), ("bert", "post_norm", True)],
    *[("bert", "token_types", 3), ("bert", "output_heads", "spans"), ("bert", "classes", 3)],
]


def shapes(model) -> dict:
    """The parameters' shapes by name, as the model's code makes them."""
    run = RunConfig(model, ParallelConfig(), TrainConfig(precision="fp32"))
    made = model_shapes(run)
    tree = jax.eval_shape(lambda key: initial_params(made, run.parallel, key), jax.random.key(0))
    names = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }
    return {name: leaf.shape for name, leaf in names.items() if not name.endswith(MEASUREMENTS)}


@pytest.fixture(scope="module")
def usual():
    return {name: shapes(model) for name, model in MODELS.items()}


@pytest.mark.parametrize(("name", "field", "value"), [*USED_OTHERWISE, *OTHER_PARAMETERS])
def test_a_model_is_refused_where_its_parameters_have_other_shapes(usual, name, field, value):
    was, now = MODELS[name], dataclasses.replace(MODELS[name], **{field: value})
    now.validate()
    differs = shapes(now) != usual[name]
    assert differs == ((name, field, value) in OTHER_PARAMETERS)
    assert changed_parameters(dataclasses.asdict(was), now, [field]) == [field] * differs


def test_layers_of_a_kind_at_other_places_are_other_parameters():
    """The shapes are the same."""
    first, second = (
        dataclasses.replace(MODELS["experts"], dense_layers=0, moe_layer_freq=text) for text in ("[1,0]*2", "[0,1]*2")
    )
    assert shapes(first) == shapes(second) and changed_parameters(dataclasses.asdict(first), second, ["moe_layer_freq"])


@pytest.mark.parametrize("damage", [{"layers": "4"}, {"heads": 0}, {"no_such": 1}, {"hidden": None}, {"experts": [1]}])
def test_a_stored_model_that_cannot_be_read_is_another(damage):
    assert changed_parameters({**dataclasses.asdict(MODELS["gpt"]), **damage}, MODELS["gpt"], damage) == [*damage]


def test_what_changed_is_said():
    """All of it in one line; or what makes the parameters differ, in the error."""
    run = RunConfig(MODELS["llama"], ParallelConfig(), TrainConfig())
    meta = metadata.run_meta(run, None)
    longer = dataclasses.replace(run.model, sequence_length=64, rotary_base=5e5, name="longer")
    lines = metadata.differences(meta, dataclasses.replace(run, model=longer), meta["tokenizer"])
    same = "resume    the same parameters are used otherwise: "
    assert lines == [f"{same}sequence_length was 32, is 64, rotary_base was 10000.0, is 500000.0"]
    wider = dataclasses.replace(longer, hidden=64)
    with pytest.raises(ConfigError, match="is of another model .custom.: hidden was 32, is 64; pass"):
        metadata.differences(meta, dataclasses.replace(run, model=wider), meta["tokenizer"])


@dataclasses.dataclass(frozen=True)
class Own:
    """A model of the user's: its arrays decide."""

    name: str = "own"
    layers: int = 2
    temperature: float = 1.0


def test_the_fields_of_ones_own_model_are_reported():
    run = RunConfig(Own(), ParallelConfig(), TrainConfig())
    meta = metadata.run_meta(run, None)
    lines = metadata.differences(meta, dataclasses.replace(run, model=Own(temperature=2.0)), meta["tokenizer"])
    assert lines == ["resume    the same parameters are used otherwise: temperature was 1.0, is 2.0"]
