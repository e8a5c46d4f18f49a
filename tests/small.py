"""A tiny run for tests: eight blocks, sixteen samples, every size different so that mixed-up axes fail."""

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint.layout import StateLayout
from megajax.config import BertConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.models.interface import ModelContext, PipelineModel, mean_loss, model_class
from megajax.ops.vocabulary import VocabularySharding
from megajax.pipeline import layout
from megajax.runtime.mesh import make_mesh
from megajax.schedules.stages import StageLayers
from megajax.train.step import Training, make_training

BATCH = 16
MODEL = ModelConfig(name="test", layers=8, hidden=32, heads=4, vocabulary=61, sequence_length=16)
LLAMA = dataclasses.replace(
    MODEL, norm="rmsnorm", activation="swiglu", positions="rotary", tied_embeddings=False, biases=False, kv_heads=2
)

QWEN = dataclasses.replace(
    LLAMA, head_size=12, query_key_norm=True, qkv_biases=True, activation="geglu", rotary_fraction=0.5, sliding_window=5
)
BERT = BertConfig(name="test", layers=8, hidden=32, heads=4, vocabulary=61, sequence_length=16, token_types=3)


# Of experts, to be counted by hand.
SPARSE = ModelConfig(
    layers=2,
    hidden=8,
    heads=2,
    vocabulary=128,
    sequence_length=16,
    feedforward=6,
    experts=4,
    experts_per_token=3,
    activation="swiglu",
    biases=False,
    positions="rotary",
    norm="rmsnorm",
)


def make_run(
    mesh=(1, 1, 1), *, schedule="interleaved_1f1b", chunks=1, microbatches=4, model=MODEL, train=None, **parallel
) -> RunConfig:
    """A run on (data, pipe, tensor) = mesh, with `microbatches` for each replica."""
    data, pipe, tensor = mesh
    layout_of = ParallelConfig(
        data=data,
        pipe=pipe,
        tensor=tensor,
        chunks=chunks,
        schedule=schedule,
        microbatch_size=BATCH // (microbatches * data),
        **parallel,
    )
    settings = {"global_batch_size": BATCH, "steps": 20, "warmup_steps": 4, "learning_rate": 3e-3, "precision": "fp32"}
    run = RunConfig(model, layout_of, TrainConfig(**settings | (train or {})))
    run.validate()
    assert run.microbatches == microbatches
    return run


def make_batch(run: RunConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tokens, a third of them with weight 0, split into the run's microbatches; for BERT with padding.

    For models with `balance_bias_rate` too: a fourth of the tokens, the whole second sample, and none of the third one.
    """
    random = np.random.default_rng(seed)
    tokens = random.integers(0, run.model.vocabulary, (BATCH, run.model.sequence_length + 1), dtype=np.int32)
    batch = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "weights": (random.random((BATCH, run.model.sequence_length)) > 0.3).astype(np.float32),
        "sample": (BATCH * seed + np.arange(BATCH)).astype(np.uint32),
    }
    if getattr(run.model, "balance_bias_rate", 0):
        padding = random.random(batch["tokens"].shape) < 0.25
        padding[1], padding[2] = True, False
        batch["padding_mask"] = padding.astype(np.int32)
        batch["weights"] *= ~padding
    if isinstance(run.model, BertConfig):
        batch["types"] = random.integers(0, run.model.token_types, batch["tokens"].shape, dtype=np.int32)
        batch["padding"] = random.integers(0, run.model.sequence_length // 2, BATCH, dtype=np.int32)
        batch["swapped"] = random.integers(0, 2, BATCH, dtype=np.int32)
        real = np.arange(run.model.sequence_length) < run.model.sequence_length - batch["padding"][:, None]
        batch["weights"] *= real & (random.random(real.shape) > 0.6)
        if run.model.has_task:
            del batch["labels"], batch["swapped"]
            targets = {"class": run.model.choices if run.model.has_choices else run.model.classes}
            if run.model.has_spans:
                targets = dict.fromkeys(("start", "end"), run.model.sequence_length // 2)
            batch |= {name: random.integers(0, most, BATCH, dtype=np.int32) for name, most in targets.items()}
            batch["weights"] = (random.random(BATCH) > 0.3).astype(np.float32)
            if run.model.has_choices:  # a question has the class and the weight of its first sample
                batch["weights"] *= np.arange(BATCH) % run.model.choices == 0
    return {name: a.reshape(run.microbatches, -1, *a.shape[1:]) for name, a in batch.items()}


def build_model(config, **context) -> PipelineModel:
    """The config's model on one device, with these fields of `ModelContext`."""
    return model_class(config)(config, ModelContext(**context))


@functools.cache
def busy_params(model: ModelConfig, deviation: float = 0.028, tensor: int = 1):
    """Canonical parameters, all random: initial biases are zero and scales one, which would hide mistakes.

    In the shapes of a tensor group's padded vocabulary. Drawn by NumPy: to compile the model's own initial values takes two
    seconds.
    """
    random = np.random.default_rng(8)

    def draw(path, leaf):
        is_scale = path[-1].key == "scale"  # of a norm
        return (is_scale + deviation * random.standard_normal(leaf.shape)).astype(leaf.dtype)

    build = build_model(model, vocabulary=VocabularySharding(tensor))
    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(build.init, jax.random.key(7)))


@functools.cache
def expected(model: ModelConfig, seed: int = 0, dropout_seed: int = 1234):
    """Loss and gradients of the unpipelined model on one device in fp32, of the whole batch as one microbatch."""
    unpipelined = build_model(model, recompute="none", dropout_seed=dropout_seed)
    batch = make_batch(make_run(microbatches=1, model=model), seed)
    loss = lambda params: mean_loss(unpipelined, params, batch)  # noqa: E731
    return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss))(busy_params(model)))


def expected_loss(model: ModelConfig) -> np.ndarray:
    """`expected`'s loss alone, which is compiled faster."""
    unpipelined, batch = build_model(model, recompute="none"), make_batch(make_run(microbatches=1, model=model))
    return np.asarray(jax.jit(lambda params: mean_loss(unpipelined, params, batch))(busy_params(model)))


def place(training: Training, canonical):
    """Canonical parameters, sharded for a run.

    Layers are moved by their numbers: jax would compile a program for each shape of the leaves.
    """

    def arrange(where, blocks):
        numbers = np.asarray(layout.to_pipeline_layout(1 + np.arange(where.layers), where))  # 0: an empty slot
        return jax.tree.map(lambda leaf: np.concatenate([np.zeros_like(leaf[:1]), leaf])[numbers], blocks)

    blocks = layout.map_kinds(arrange, training.where, jax.tree.map(np.asarray, canonical["blocks"]))
    return jax.device_put({**canonical, "blocks": blocks}, training.params_sharding)


def canonical(params, training: Training):
    """The inverse of `place`, as numpy."""

    def collect(where, blocks):
        slots = np.arange(where.chunks * where.ranks * where.slots).reshape(where.chunks, where.ranks, where.slots)
        numbers = np.asarray(layout.from_pipeline_layout(slots, where))
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:])[numbers], blocks)

    params = jax.tree.map(np.asarray, params)
    return {**params, "blocks": layout.map_kinds(collect, training.where, params["blocks"])}


def random_state(training: Training):
    """A state whose values all differ, of the run's shapes and shardings; the initial one has to be compiled."""
    random = np.random.default_rng(0)

    def draw(leaf, sharding):
        return jax.device_put((7 * random.standard_normal(leaf.shape)).astype(leaf.dtype), sharding)

    return jax.tree.map(draw, training.state_shapes, training.state_sharding)


def busy_state(training: Training):
    """`random_state` with `busy_params`, of a model that computes."""
    return dataclasses.replace(random_state(training), params=place(training, busy_params(training.run.model)))


def canonical_state(state, training: Training):
    """A state with the layers of parameters and moments in the model's order, as numpy."""
    clip, adam, *rest = state.optimizer_state
    adam = adam._replace(mu=canonical(adam.mu, training), nu=canonical(adam.nu, training))
    params = canonical(state.params, training)
    return jax.tree.map(np.asarray, dataclasses.replace(state, params=params, optimizer_state=(clip, adam, *rest)))


def training_of(run: RunConfig) -> Training:
    """The run's programs on the test's CPU devices."""
    return make_training(run, make_mesh(run.parallel))


def small_state() -> tuple[StateLayout, dict]:
    """A state of three arrays for tests of checkpoints, and its layout: nothing has to be compiled for a model."""
    sharding = NamedSharding(
        jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1]), P()
    )
    blocks = np.arange(2 * 3 * 40, dtype=np.float32).reshape(1, 2, 3, 40)  # [chunks, pipe, layers, ...]
    params = {"blocks": {"kernel": blocks}, "shared": {"scale": np.linspace(0, 1, 50, dtype=np.float32)}}
    state = {"params": params, "optimizer_state": {"count": np.int32(7)}}
    state = jax.tree.map(lambda leaf: jax.device_put(leaf, sharding), state)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    return StateLayout(shapes, jax.tree.map(lambda _: sharding, state), StageLayers(6, ranks=2)), state


def assert_gradients_close(got, want, rtol: float) -> None:
    """Each gradient is within rtol of the largest in its array, to which the rounding of single elements is relative."""

    def check(path, got, want):
        scale = np.abs(want).max()
        worst = np.abs(got - want).max()
        assert worst <= rtol * scale, f"{jax.tree_util.keystr(path)}: {worst:.3g} off, largest {scale:.3g}"

    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree_util.tree_map_with_path(check, got, want)
