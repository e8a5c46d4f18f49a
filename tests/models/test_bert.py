"""BERT against a loop over samples and heads in numpy, fp64, as 1810.04805 and 1909.08053 figure 7b describe it."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf

from megajax.config import BertConfig, ConfigError, preset
from megajax.config.batch_ramp import PADDING
from megajax.estimate import model_costs
from megajax.estimate.flops import forward_flops
from megajax.models.interface import mean_loss
from tests import small

PRE = dataclasses.replace(small.BERT, layers=2, activation="gelu_exact")
POST = dataclasses.replace(PRE, post_norm=True, tied_embeddings=False)
MODELS = pytest.mark.parametrize("config", [PRE, POST], ids=["pre", "post"])
PRE_FIRST = pytest.mark.parametrize("config", [PRE, pytest.param(POST, marks=pytest.mark.slow)], ids=["pre", "post"])


def norm(x, p):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def gelu(x):
    return x * (1 + erf(x / math.sqrt(2))) / 2


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def attention(x, p, length):
    """x [s, h]; nothing attends to tokens from `length` on."""
    qkv = np.einsum("sh,hgqd->sgqd", x, p["qkv"]["kernel"]) + p["qkv"]["bias"]
    heads = []
    for head in range(qkv.shape[1]):
        query, key, value = (qkv[:, head, i] for i in range(3))
        heads.append(softmax(query @ key[:length].T / math.sqrt(query.shape[-1])) @ value[:length])
    return np.einsum("asd,adh->sh", np.stack(heads), p["output"]["kernel"]) + p["output"]["bias"]


def feedforward(x, p):
    return gelu(x @ p["up"]["kernel"] + p["up"]["bias"]) @ p["down"]["kernel"] + p["down"]["bias"]


def encode(config, params, tokens, types, length):
    """The encoder's output of one sample, [s, h]."""
    p = params["shared"]["embedding"]
    x = p["tokens"][tokens] + p["positions"][: len(tokens)] + p["types"][types]
    if config.post_norm:
        x = norm(x, p["norm"])
    for layer in range(config.layers):
        p = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"])
        if config.post_norm:
            x = norm(x + attention(x, p["attention"], length), p["attention_norm"])
            x = norm(x + feedforward(x, p["feedforward"]), p["feedforward_norm"])
        else:
            x = x + attention(norm(x, p["attention_norm"]), p["attention"], length)
            x = x + feedforward(norm(x, p["feedforward_norm"]), p["feedforward"])
    return x if config.post_norm else norm(x, params["shared"]["head"]["norm"])


def all_states(config, params, rows):
    """The encoder's output of each sample of a microbatch."""
    lengths = config.sequence_length - rows["padding"]
    samples = zip(rows["tokens"], rows["types"], lengths, strict=True)
    return [encode(config, params, *sample) for sample in samples]


def classified(config, params, rows):
    """The classifier's scores of each sample of a microbatch."""
    head = params["shared"]["head"]
    pooled = [
        np.tanh(x[0] @ head["pooler"]["kernel"] + head["pooler"]["bias"]) for x in all_states(config, params, rows)
    ]
    return [x @ head["classifier"]["kernel"] + head["classifier"]["bias"] for x in pooled]


def heads(config, params, states):
    """Logits of the words [s, v] and of the order [2]."""
    p, embedding = params["shared"]["head"], params["shared"]["embedding"]
    z = norm(gelu(states @ p["transform"]["kernel"] + p["transform"]["bias"]), p["transform_norm"])
    table = embedding["tokens"] if config.tied_embeddings else p["vocabulary"]
    words = (z @ table.T + p["bias"])[:, : config.vocabulary]
    pooled = np.tanh(states[0] @ p["pooler"]["kernel"] + p["pooler"]["bias"])
    return words, pooled @ p["order"]["kernel"] + p["order"]["bias"]


def loss(config, params, batch):
    """The mean over masked words plus the mean over samples."""
    words, orders = [], []
    rows = {name: array.reshape(-1, *array.shape[2:]) for name, array in batch.items()}
    for row, states in enumerate(all_states(config, params, rows)):
        logits, order = heads(config, params, states)
        for place in np.flatnonzero(rows["weights"][row]):
            words.append(-math.log(softmax(logits[place])[rows["labels"][row, place]]))
        orders.append(-math.log(softmax(order)[rows["swapped"][row]]))
    return np.mean(words) + (np.mean(orders) if config.has_order else 0)


def encoder_output(model, params, microbatch):
    """The last block's output, [b, s, h], as megajax computes it."""
    x = model.embed(params["shared"], microbatch)
    for layer in range(model.config.layers):
        weights = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"])
        x = model.block(weights, x, microbatch, jnp.int32(layer))
    return x


def loss_and_scores(model, scores, params, batch):
    """The loss of a batch of one microbatch, and what `scores`, a method of the model, returns for it."""

    @jax.jit
    def run(params):
        rows = {name: array[0] for name, array in batch.items()}
        found = scores(params["shared"], encoder_output(model, params, rows), rows)
        return mean_loss(model, params, batch), *found

    return run(params)


def wide(params):
    return jax.tree.map(np.float64, params)


@PRE_FIRST
def test_the_loss_and_its_slope_are_the_papers(config):
    """The slope along a random direction against a difference of the reference's losses."""
    model, params = small.build_model(config), small.busy_params(config)
    batch = small.make_batch(small.make_run(microbatches=2, model=config))
    value, gradient = jax.jit(jax.value_and_grad(lambda params: mean_loss(model, params, batch)))(params)
    np.testing.assert_allclose(value, loss(config, wide(params), batch), rtol=1e-5)
    draw = np.random.default_rng(0)
    direction = jax.tree.map(lambda leaf: draw.normal(size=leaf.shape), params)
    ends = [
        loss(config, jax.tree.map(lambda p, d, step=step: np.float64(p) + step * d, params, direction), batch)
        for step in (1e-5, -1e-5)
    ]
    slope = sum((np.float64(g) * d).sum() for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / 2e-5, rtol=1e-4)


@MODELS
def test_states_and_both_heads(config):
    model, params = small.build_model(config), small.busy_params(config)
    batch = {name: a[0] for name, a in small.make_batch(small.make_run(microbatches=1, model=config)).items()}

    @jax.jit
    def run(params):
        x, shared = encoder_output(model, params, batch), params["shared"]
        return model.states(shared, x), model.logits(shared, x), model.order_logits(shared, x, batch)

    states, words, orders = run(params)
    for row, want in enumerate(all_states(config, wide(params), batch)):
        np.testing.assert_allclose(states[row], want, rtol=1e-4, atol=1e-5)
        want_words, want_order = heads(config, wide(params), want)
        np.testing.assert_allclose(words[row, :, : config.vocabulary], want_words, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(orders[row], want_order, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_without_the_order_head_the_loss_is_that_of_masked_words():
    config = dataclasses.replace(PRE, output_heads="masked_lm", layers=1)
    model, params = small.build_model(config), small.busy_params(config)
    assert not {"pooler", "order"} & set(params["shared"]["head"])
    batch = small.make_batch(small.make_run(microbatches=2, model=config))
    other = small.busy_params(dataclasses.replace(PRE, layers=1))["shared"]["head"]  # the reference computes both heads
    shared = params["shared"] | {"head": other | params["shared"]["head"]}
    want = loss(config, wide(params | {"shared": shared}), batch)
    np.testing.assert_allclose(jax.jit(lambda p: mean_loss(model, p, batch))(params), want, rtol=1e-5)
    encoder = small.build_model(dataclasses.replace(PRE, output_heads="none"))
    with pytest.raises(ConfigError, match="output_heads = none has no loss"):
        jax.eval_shape(lambda p: mean_loss(encoder, p, batch), encoder.init(jax.random.key(0)))


@PRE_FIRST
def test_classes_of_samples(config):
    """The loss is the mean over samples of weight 1; the predicted class has the largest logit."""
    config = dataclasses.replace(config, layers=1, output_heads="classification", classes=3)
    model, params = small.build_model(config), small.busy_params(config)
    batch = small.make_batch(small.make_run(microbatches=1, model=config))
    rows = {name: array[0] for name, array in batch.items()}
    scores = classified(config, wide(params), rows)
    losses = [-math.log(softmax(score)[label]) for score, label in zip(scores, rows["class"], strict=True)]
    want = np.average(losses, weights=rows["weights"])
    value, got, best = loss_and_scores(model, model.class_scores, params, batch)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(got, losses * rows["weights"], rtol=1e-4)
    np.testing.assert_array_equal(best, np.argmax(scores, axis=1))


@PRE_FIRST
def test_choices(config):
    """The cross entropy over the four samples of each question, a mean over the questions whose first sample counts."""
    config = dataclasses.replace(config, layers=1, output_heads="multiple_choice", choices=4)
    model, params = small.build_model(config), small.busy_params(config)
    batch = small.make_batch(small.make_run(microbatches=1, model=config))
    batch["weights"][0, 4] = 0  # of the second question
    rows = {name: array[0] for name, array in batch.items()}
    scores = np.reshape(classified(config, wide(params), rows), (-1, 4))
    classes, weights = rows["class"][::4], rows["weights"][::4]
    losses = [-math.log(softmax(score)[label]) for score, label in zip(scores, classes, strict=True)]
    assert weights.tolist() == [1, 0, 1, 1]
    value, got, best = loss_and_scores(model, model.class_scores, params, batch)
    np.testing.assert_allclose(value, np.average(losses, weights=weights), rtol=1e-5)
    np.testing.assert_allclose(got, losses * weights, rtol=1e-4)
    np.testing.assert_array_equal(best, np.argmax(scores, axis=1))
    halves = {name: array.reshape(8, 2, *array.shape[2:]) for name, array in batch.items()}
    with pytest.raises(
        ConfigError, match="microbatch_size = 2 is not a multiple of choices = 4.*pass --microbatch-size 4"
    ):
        jax.eval_shape(lambda p: mean_loss(model, p, halves), params)


@pytest.mark.slow
@PRE_FIRST
def test_first_and_last_token_of_an_answer(config):
    """The loss is the mean over samples of weight 1 of the mean of two cross entropies over all places, padding too."""
    config = dataclasses.replace(config, layers=1, output_heads="spans")
    model, params = small.build_model(config), small.busy_params(config)
    assert "pooler" not in params["shared"]["head"]
    batch = small.make_batch(small.make_run(microbatches=1, model=config))
    rows, head = {name: array[0] for name, array in batch.items()}, wide(params)["shared"]["head"]["spans"]
    scores = [states @ head["kernel"] + head["bias"] for states in all_states(config, wide(params), rows)]
    losses = []
    for row, logits in enumerate(scores):
        first, last = (softmax(logits[:, side]) for side in (0, 1))
        losses.append(-(math.log(first[rows["start"][row]]) + math.log(last[rows["end"][row]])) / 2)
    want = np.average(losses, weights=rows["weights"])
    value, got, found = loss_and_scores(model, model.span_scores, params, batch)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(got, losses * rows["weights"], rtol=1e-4)
    np.testing.assert_allclose(found, scores, rtol=1e-4, atol=1e-5)


def test_samples_of_padding_do_not_count_and_those_without_masked_words_do():
    """The padding of a smaller batch has a number of its own; a sample of weights 0 has an order."""
    model, params = small.build_model(PRE), small.busy_params(PRE)
    batch = small.make_batch(small.make_run(microbatches=2, model=PRE))
    half = {name: array[:1] for name, array in batch.items()}
    unmasked = batch | {"weights": np.concatenate([batch["weights"][:1], np.zeros_like(batch["weights"][1:])])}
    padded = unmasked | {"sample": np.where(np.arange(2)[:, None] == 0, batch["sample"], np.uint32(PADDING))}
    value = jax.jit(lambda batch: mean_loss(model, params, batch))
    np.testing.assert_allclose(value(padded), value(half), rtol=1e-6)
    for one, samples in ((half, 8), (unmasked, 16), (padded, 8)):
        orders = np.asarray(model.prepare_batch(one)["order_weights"])
        np.testing.assert_allclose(orders[orders > 0], [half["weights"].sum() / samples] * samples, rtol=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        PRE,
        POST,
        *(
            dataclasses.replace(PRE, output_heads=name)
            for name in ("masked_lm", "classification", "multiple_choice", "spans", "none")
        ),
    ]
    + [dataclasses.replace(PRE, biases=False, norm="rmsnorm", activation="swiglu", positions="rotary", kv_heads=2)],
    ids=["pre", "post", "masked_lm", "classification", "multiple_choice", "spans", "none", "llama"],
)
def test_parameters_are_counted(config):
    """By the shapes of `init`, without the vocabulary's padding."""
    params = jax.eval_shape(small.build_model(config).init, jax.random.key(0))
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    tables = [params["shared"]["embedding"]["tokens"], *map(params["shared"]["head"].get, ("vocabulary", "bias"))]
    total -= sum(table.size * (128 - config.vocabulary) // 128 for table in tables if table is not None)
    assert config.parameters == total == model_costs(config).parameters


def test_flops_have_no_causal_half():
    """2 n params FLOPs by hand for the 336M model's matmuls: 12 h^2 a layer, s x s scores, the head's layer, the words."""
    hidden, tokens, layers, words = 1024, 512, 24, 30522
    want = 2 * tokens * (12 * hidden**2 * layers + 2 * tokens * hidden * layers + hidden**2 + hidden * words)
    costs = model_costs(preset("bert-336m"))
    assert sum(forward_flops(costs).values()) == want and costs.attention.pairs(tokens) == tokens * tokens


@pytest.mark.parametrize("window", [1, 5, 100, 400, 512])
def test_windows_reach_in_both_directions(window):
    """Pairs of tokens that see each other, counted one by one; a token and itself are half a pair on each side."""
    costs = model_costs(dataclasses.replace(preset("bert-336m"), sliding_window=window))
    distance = np.abs(np.subtract.outer(np.arange(512), np.arange(512)))
    own = 512 - window  # tokens whose window is whole have themselves twice
    assert costs.attention.pairs(512) == (distance < window).sum() + own


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chunked_attention": 3}, "chunked_attention = 3 is not BERT's: pass --chunked-attention none"),
        ({"post_norm": True, "embedding_norm": True}, "embedding_norm = True.*pass --no-embedding-norm"),
        (
            {"post_norm": True, "first_attention_norm": False},
            "first_attention_norm = False.*pass --first-attention-norm",
        ),
        ({"norm_placement": "post", "first_attention_norm": False}, "first_attention_norm = False"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_fields_that_do_not_go_together(fields, message):
    with pytest.raises(ConfigError, match=message):
        BertConfig(layers=1, hidden=8, heads=1, vocabulary=9, sequence_length=4, **fields).validate()
