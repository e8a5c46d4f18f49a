"""Generated tokens on every mesh equal those of the model without cache and without pipeline."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.config import ParallelConfig
from megajax.config.sample import SampleConfig
from megajax.estimate import hlo
from megajax.generate.decoder import Decoder, DecodeSizes, decoding_rules, decoding_run
from megajax.models.context import model_rules
from megajax.pipeline.layout import to_pipeline_layout
from megajax.runtime.mesh import make_mesh
from megajax.schedules.stages import StageLayers, loop, wave
from tests import small
from tests.collective_order import beside_loops
from tests.models.test_cached import recomputed

GREEDY = SampleConfig(temperature=0)
GPT = dataclasses.replace(small.MODEL, layers=4, sequence_length=96)
LLAMA = dataclasses.replace(small.LLAMA, layers=4, sequence_length=96)
MODELS = pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
PROMPTS = [np.random.default_rng(length).integers(0, 61, length).astype(np.int32) for length in (3, 17, 9, 30, 1)]


@functools.cache
def lively(model):
    """Parameters whose greedy text does not repeat one token."""
    return jax.tree.map(lambda a: 4 * a, small.busy_params(model))


def decoder_on(mesh, model, sizes, sampling=GREEDY, **layout) -> Decoder:
    data, pipe, tensor = mesh
    parallel = ParallelConfig(data=data, pipe=pipe, tensor=tensor, **layout)
    run = decoding_run(small.make_run(model=model), parallel)
    run.validate()
    return Decoder(run, make_mesh(run.parallel), sizes, sampling, seed=5)


def tokens_of(decoder, weights, prompts, numbers=None) -> np.ndarray:
    """The new tokens, [prompts, sizes.new]."""
    batch = decoder.prefill(weights, prompts, numbers or range(len(prompts)))
    parts = [decoder.first_tokens(batch)[:, None]]
    for _ in range(decoder.sizes.blocks):
        batch, more = decoder.decode(weights, batch)
        parts.append(more)
    return np.concatenate(parts, axis=1)[: len(prompts), : decoder.sizes.new]


def loaded(decoder, model):
    """The canonical parameters on the decoder's mesh."""
    return decoder.weights(stored(model, decoder.where))


def stored(model, where):
    return {**lively(model), "blocks": to_pipeline_layout(lively(model)["blocks"], where)}


@functools.cache
def expected(model, new: int) -> np.ndarray:
    """Greedy text by recomputing the whole sample for every token."""
    unpipelined = small.build_model(model, training=False)
    run = jax.jit(lambda params, tokens: recomputed(unpipelined, params, tokens)[..., :61])
    text = np.zeros((len(PROMPTS), model.sequence_length), np.int32)
    ends = np.array([len(prompt) for prompt in PROMPTS])
    for row, prompt in enumerate(PROMPTS):
        text[row, : len(prompt)] = prompt
    rows = np.arange(len(PROMPTS))
    for step in range(new):
        logits = np.asarray(run(lively(model), text))
        text[rows, ends + step] = logits[rows, ends + step - 1].argmax(-1)
    return np.stack([text[row, end : end + new] for row, end in enumerate(ends)])


@pytest.mark.slow  # quick: the text of transformers on this mesh, in test_hugging_face.py
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("mesh", [(1, 2, 2)], ids=str)
def test_greedy_text_equals_recomputed_text_for_64_tokens(model, mesh):
    """Prompts of 1 to 30 tokens in one batch, in chunks of 8."""
    wanted = expected(model, 64)
    assert len(np.unique(wanted)) > 20
    decoder = decoder_on(mesh, model, DecodeSizes(len(PROMPTS), 30, 64, chunk=8))
    np.testing.assert_array_equal(tokens_of(decoder, loaded(decoder, model), PROMPTS), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "model"), [((1, 3, 1), GPT), ((2, 3, 1), LLAMA)], ids=["gpt", "llama"])
def test_greedy_text_with_uneven_stages(mesh, model):
    """4 layers on 3 stages: 1, 2 and 1."""
    decoder = decoder_on(mesh, model, DecodeSizes(len(PROMPTS), 30, 16, chunk=16), vocab_parallel="tensor")
    assert decoder.where.counts == (1, 2, 1)
    np.testing.assert_array_equal(tokens_of(decoder, loaded(decoder, model), PROMPTS), expected(model, 64)[:, :16])


@pytest.mark.slow
@MODELS
@pytest.mark.parametrize(
    "mesh", [(1, 1, 1), (1, 1, 2), (1, 4, 1), (2, 1, 1), (2, 2, 2), (1, 4, 2), (2, 4, 1), (8, 1, 1)], ids=str
)
@pytest.mark.parametrize("vocab_parallel", ["pipe", "tensor"])
def test_greedy_text_on_more_meshes(model, mesh, vocab_parallel):
    decoder = decoder_on(mesh, model, DecodeSizes(5, 30, 64, chunk=16), vocab_parallel=vocab_parallel)
    np.testing.assert_array_equal(tokens_of(decoder, loaded(decoder, model), PROMPTS), expected(model, 64))


@pytest.mark.slow
def test_embedding_and_head_on_single_ranks():
    """--vocab-parallel tensor: the last rank alone computes logits; their padding is cut off without a ppermute."""
    decoder = decoder_on((1, 2, 2), GPT, DecodeSizes(5, 30, 8, chunk=16), vocab_parallel="tensor")
    assert not decoder.program.rules.vocabulary_over_pipe
    np.testing.assert_array_equal(tokens_of(decoder, loaded(decoder, GPT), PROMPTS), expected(GPT, 8))


@pytest.mark.parametrize(
    ("layers", "place", "group"),
    [
        *(pytest.param(*layout, marks=pytest.mark.slow) for layout in [(5, wave, 1), (4, loop, 1), (4, wave, 1)]),
        pytest.param(6, loop, 1, marks=pytest.mark.slow),
        pytest.param(10, loop, 2, marks=pytest.mark.slow),
    ],
)
def test_weights_of_any_training_layout(layers, place, group):
    """Interleaved chunks and the v-shaped placement of zb_v and dualpipe_v; uneven stages, of groups of layers too."""
    model = dataclasses.replace(GPT, layers=layers)
    decoder = decoder_on((1, 2, 1), model, DecodeSizes(5, 30, 4))
    where = StageLayers(layers, 2, 2, place(2, 2), group)
    blocks = jax.device_put(stored(model, where)["blocks"], NamedSharding(decoder.mesh, P(None, "pipe")))
    weights, wanted = decoder.weights(stored(model, where) | {"blocks": blocks}, where), loaded(decoder, model)
    jax.tree.map(np.testing.assert_array_equal, weights, wanted)
    first = [np.asarray(jax.tree.leaves(layer)[0]) for layer in weights["blocks"]]  # of each slot: [pipe, ...]
    canonical, starts = jax.tree.leaves(lively(model)["blocks"])[0], np.cumsum([0, *decoder.where.counts[:-1]])
    for rank, count in enumerate(decoder.where.counts):
        for slot, of_slot in enumerate(first):
            layer = canonical[starts[rank] + slot] if slot < count else 0 * canonical[0]
            np.testing.assert_array_equal(of_slot[rank], layer)


@pytest.mark.slow
def test_a_batch_may_be_smaller_and_a_second_batch_follows():
    """The programs are compiled once, for the longest prompt; shorter batches run fewer chunks of it."""
    decoder = decoder_on((1, 2, 1), GPT, DecodeSizes(4, 30, 8, chunk=4))
    weights = loaded(decoder, GPT)
    for rows in ([3], [0, 4], [1, 2, 0, 4]):
        got = tokens_of(decoder, weights, [PROMPTS[row] for row in rows], rows)
        np.testing.assert_array_equal(got, expected(GPT, 8)[rows])


@pytest.mark.slow
def test_one_seed_gives_one_text_on_every_mesh_and_in_every_batch():
    sampling = SampleConfig(temperature=1.0, top_k=40, top_p=0.95)
    texts = []
    for mesh in ((1, 1, 1), (2, 2, 2)):
        decoder = decoder_on(mesh, LLAMA, DecodeSizes(4, 30, 20), sampling)
        weights = loaded(decoder, LLAMA)
        texts.append(tokens_of(decoder, weights, PROMPTS[:4], [0, 1, 2, 3]))
    alone = tokens_of(decoder, weights, PROMPTS[2:3], [2])
    np.testing.assert_array_equal(texts[1], texts[0])
    np.testing.assert_array_equal(alone[0], texts[0][2])
    other = tokens_of(decoder, weights, PROMPTS[2:3], [3])
    assert (other != alone).any()


@pytest.mark.slow
def test_no_rank_idles_more_than_p_minus_1_ticks():
    """n tokens of all p groups take n p + p - 1 ticks, in each of which a rank runs its layers and its part of the head.

    Read from the compiled program: the loop's trip count; and a device's FLOPs, which are those of p replicas with the same
    samples on the same devices, times the ticks over the n p of work.
    """
    flops = {}
    for mesh in ((4, 1, 1), (1, 4, 1)):
        decoder = decoder_on(mesh, GPT, DecodeSizes(8, 8, 25))
        decoder.compile(loaded(decoder, GPT))
        text = decoder.compiled("decode").as_text()
        pipe, count = mesh[1], decoder.sizes.block
        ticks = count * pipe + pipe - 1
        assert count == 24 and f'"known_trip_count":{{"n":"{ticks}"}}' in text
        flops[pipe] = hlo.read(text).flops()
        array = next(iter(decoder.model.cache_arrays(2, decoder.sizes.slots).values()))
        whole = f"f32[{','.join(map(str, (1, pipe, *array.shape)))}]"
        assert whole in text and not re.search(re.escape(whole) + r"\S* copy\(", text)  # the caches stay in place
    assert flops[4] / flops[1] == pytest.approx((24 * 4 + 3) / (24 * 4), rel=1e-6)


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=pytest.mark.slow) for mesh in ((2, 2, 2), (1, 1, 1), (1, 4, 2))], ids=str
)
def test_the_cache_is_split_over_all_axes(mesh):
    """2 (keys, values) * layers * samples * kv heads * slots * head size * 4 bytes, over data * pipe * tensor."""
    decoder = decoder_on(mesh, LLAMA, DecodeSizes(8, 16, 17, chunk=8))
    batch = decoder.prefill(loaded(decoder, LLAMA), PROMPTS[:1], [0])
    total = 2 * 4 * 8 * 2 * 32 * 8 * 4
    assert decoder.cache_bytes() == total // np.prod(mesh)
    shards = [shard.data.nbytes for leaf in jax.tree.leaves(batch.cache) for shard in leaf.addressable_shards]
    assert sum(shards) == total and len(set(shards)) == 1
    assert decoder.compiled("decode").memory_analysis().alias_size_in_bytes >= decoder.cache_bytes()  # in place
    for program in ("prefill", "decode"):  # on CPU devices, see tests/train/test_collective_order.py
        assert beside_loops(decoder.compiled(program).as_text())[0] == []


@pytest.mark.parametrize(
    "layout", [{}, {"expert": 2}, {"expert": 2, "expert_tensor": 1}, {"expert": 4, "expert_tensor": 1}]
)
def test_rules_of_the_training_become_those_of_generation(layout):
    """A new token is not split over tensor, so that its ranks have parts of experts again."""
    model = dataclasses.replace(small.LLAMA, experts=4, experts_per_token=2)
    run = small.make_run((2, 1, 2), model=model, **layout)
    generation = decoding_run(run)
    assert decoding_rules(model_rules(run)).table == model_rules(generation).table
    assert generation.parallel.mesh_sizes == run.parallel.mesh_sizes
