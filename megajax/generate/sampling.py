"""The choice of the next token from its logits, on the devices, by the rules of transformers and in their order.

Scores are first changed by rules that greedy texts obey too (`apply_rules`: penalties, tokens that may not occur), then by
those of the sampling (`keep_likely` and what follows: temperature, top-k, top-p, min-p), and one token is drawn, by keys
that no mesh changes.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from megajax.config.sample import LogitsRules, SampleConfig

__all__ = ["NO_RULES", "Texts", "apply_rules", "draw", "keep_likely", "next_token", "reads_texts", "sampled_scores"]

NO_RULES = LogitsRules()
TOP_H_TOKENS = 100  # of transformers' TopHLogitsWarper


class Texts(NamedTuple):
    """The tokens before those to draw, of b samples whose prompts end in the same slot.

    Attributes:
      tokens: int32 [b, slots]; those of a sample are in slots `start` to `slot` - 1. No slots if `reads_texts` is false.
      start: int32 [b].
      slot: int32 scalar, of the tokens to draw.
      prompt: int32 [b], tokens of the prompts.
    """

    tokens: jax.Array
    start: jax.Array
    slot: jax.Array
    prompt: jax.Array


def reads_texts(sampling: SampleConfig, rules: LogitsRules) -> bool:
    """Whether the choice of a token depends on which tokens precede it."""
    long = any(len(tokens) > 1 for tokens in (*rules.bad_words, *(tokens for tokens, _ in rules.sequence_bias)))
    return sampling.repetition_penalty != 1 or sampling.no_repeat_ngram_size > 0 or long


def next_token(
    logits: jax.Array,
    number: jax.Array,
    texts: Texts,
    sampling: SampleConfig,
    rules: LogitsRules,
    seed: int | jax.Array,
) -> jax.Array:
    """The token that follows each text, int32 [b]; see `apply_rules` and `draw`."""
    scores = apply_rules(logits, texts, sampling, rules)
    return draw(scores, number, texts.slot - texts.start, sampling, seed, rules)


def apply_rules(logits: jax.Array, texts: Texts, sampling: SampleConfig, rules: LogitsRules) -> jax.Array:
    """The scores [b, v] after transformers' logits processors, in the order of its `generate`.

    Args:
      logits: fp32 [b, v], without padding.
      texts: before the tokens to draw.
      sampling: its penalties, `min_new_tokens` and `new_tokens`.
      rules: those of the model's settings.
    """
    vocabulary = logits.shape[-1]
    length = texts.slot - texts.start  # int32 [b]
    new = length - texts.prompt

    def without(scores: jax.Array, tokens: Iterable[int], where: jax.Array | bool) -> jax.Array:
        """The scores with -inf for the tokens in the rows `where`."""
        banned = _members(tokens, vocabulary) & jnp.broadcast_to(where, length.shape)[:, None]
        return jnp.where(banned, -jnp.inf, scores)

    scores = _add_bias(logits, texts, rules.sequence_bias)
    if sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        penalized = jnp.where(scores < 0, scores * penalty, scores / penalty)
        scores = jnp.where(_occurring(texts, _inside(texts), vocabulary), penalized, scores)
    if sampling.no_repeat_ngram_size:
        scores = jnp.where(_repeating(texts, sampling.no_repeat_ngram_size, vocabulary), -jnp.inf, scores)
    scores = _add_bias(scores, texts, [(tokens, -math.inf) for tokens in rules.bad_words])
    if rules.ends and rules.min_length:
        scores = without(scores, rules.ends, length < rules.min_length)
    if rules.ends and sampling.min_new_tokens:
        scores = without(scores, rules.ends, new < sampling.min_new_tokens)
    for tokens, where in (
        (() if rules.forced_bos is None else (rules.forced_bos,), length == 1),
        (
            rules.forced_eos,
            new == sampling.new_tokens - 1 if rules.max_length is None else length == rules.max_length - 1,
        ),
    ):
        if tokens:
            only = jnp.where(_members(tokens, vocabulary), 0.0, -jnp.inf)
            scores = jnp.where(where[:, None], only, scores)
    if rules.remove_invalid_values:
        largest = jnp.finfo(scores.dtype).max
        scores = jnp.nan_to_num(scores, nan=0.0, posinf=largest, neginf=-largest)
    if rules.exponential_decay_length_penalty and rules.ends:
        start, factor = rules.exponential_decay_length_penalty
        over = (new - start)[:, None]
        penalty = jnp.abs(scores) * (jnp.float32(factor) ** over - 1)
        changed = _members(rules.ends, vocabulary) & (over > 0) & jnp.isfinite(scores)
        scores = jnp.where(changed, scores + penalty, scores)
    if rules.suppress_tokens:
        scores = without(scores, rules.suppress_tokens, True)
    if rules.begin_suppress_tokens:
        forced = (texts.prompt == 1) if rules.forced_bos is not None else 0
        scores = without(scores, rules.begin_suppress_tokens, new == forced)
    return scores


def _members(tokens: Iterable[int], vocabulary: int) -> jax.Array:
    """bool [v]: whether a token is one of `tokens`."""
    inside = [token for token in tokens if 0 <= token < vocabulary]
    return jnp.zeros(vocabulary, bool).at[jnp.array(inside, jnp.int32)].set(True)


def _inside(texts: Texts) -> jax.Array:
    """bool [b, slots]: whether a slot has a token of its sample."""
    slots = jnp.arange(texts.tokens.shape[1])
    return (slots >= texts.start[:, None]) & (slots < texts.slot)


def _occurring(texts: Texts, where: jax.Array, vocabulary: int) -> jax.Array:
    """bool [b, v]: whether a token is in one of the slots `where` [b, slots]."""
    rows = jnp.arange(len(texts.tokens))[:, None]
    return jnp.zeros((len(texts.tokens), vocabulary), bool).at[rows, texts.tokens].max(where, mode="drop")


def _last(texts: Texts, count: int) -> jax.Array:
    """The last `count` tokens, int32 [b, count]; no tokens of the samples where they have fewer."""
    slots = texts.slot - count + jnp.arange(count)
    return jnp.take(texts.tokens, jnp.maximum(slots, 0), axis=1)


def _repeating(texts: Texts, size: int, vocabulary: int) -> jax.Array:
    """bool [b, v]: whether a token would end a sequence of `size` tokens that its text has already."""
    inside, prefix = _inside(texts), _last(texts, size - 1)
    whole = (texts.slot - texts.start >= size)[:, None]
    # A sequence that ends in a slot: its token `back` slots before is that of the prefix, and is the sample's.
    for back in range(1, size):
        shifted = jnp.roll(texts.tokens, back, axis=1)
        whole &= jnp.roll(inside, back, axis=1).at[:, :back].set(False) & (shifted == prefix[:, size - 1 - back, None])
    return _occurring(texts, whole & inside, vocabulary)


def _add_bias(scores: jax.Array, texts: Texts, biases: Iterable[tuple[tuple[int, ...], float]]) -> jax.Array:
    """The scores with what is added to the last token of each sequence, in texts that end with the tokens before it."""
    by_prefix: dict[int, dict[tuple[int, ...], float]] = {}
    for tokens, bias in biases:
        by_prefix.setdefault(len(tokens) - 1, {})[tokens] = bias
    if not by_prefix:
        return scores
    total = jnp.zeros_like(scores)
    for count, group in sorted(by_prefix.items()):
        prefixes = jnp.array([tokens[:-1] for tokens in group], jnp.int32).reshape(len(group), count)
        last = jnp.array([tokens[-1] for tokens in group], jnp.int32)
        bias = jnp.array(list(group.values()), scores.dtype)
        if count == 0:
            total = total.at[:, last].set(bias)
            continue
        matching = (_last(texts, count)[:, None] == prefixes).all(-1)
        matching &= (texts.slot - texts.start >= count)[:, None]
        total = total.at[:, last].add(jnp.where(matching, bias, 0.0))
    return scores + total


def draw(
    logits: jax.Array,
    number: jax.Array,
    position: jax.Array,
    sampling: SampleConfig,
    seed: int | jax.Array,
    rules: LogitsRules = NO_RULES,
) -> jax.Array:
    """Draws a token for each sample.

    The key of a draw depends on the seed, the sample's number and the token's position in it, so the text of a sample is
    the same on every mesh and in any batch. Logits are divided by the temperature, then cut to the most likely ones, in the
    order of transformers' `generate`.

    Args:
      logits: fp32 [b, vocabulary], without padding.
      number: uint32 [b], of the samples in the run.
      position: int32 [b], of the tokens to draw.
      sampling: temperature (0: the most likely token), top_k, top_p and min_p.
      seed: of the run.
      rules: top_h, typical_p, epsilon_cutoff and eta_cutoff.

    Returns:
      int32 [b].
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def one(logits, number, position):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), position)
        return jax.random.categorical(key, logits)

    return jax.vmap(one)(sampled_scores(logits, sampling, rules), number, position).astype(jnp.int32)


def sampled_scores(logits: jax.Array, sampling: SampleConfig, rules: LogitsRules) -> jax.Array:
    """The logits [b, v] over the temperature, with -inf for tokens that are not drawn."""
    kept = logits / sampling.temperature
    if rules.top_h is not None:
        kept = _keep_top_h(kept, rules.top_h)
    kept = keep_likely(kept, sampling.top_k, sampling.top_p)
    if sampling.min_p > 0:
        probabilities = jax.nn.softmax(kept)
        kept = jnp.where(probabilities < sampling.min_p * probabilities.max(-1, keepdims=True), -jnp.inf, kept)
    if rules.typical_p < 1:
        kept = _keep_typical(kept, rules.typical_p)
    for cutoff, adaptive in ((rules.epsilon_cutoff, False), (rules.eta_cutoff, True)):
        if 0 < cutoff < 1:
            kept = _keep_above(kept, cutoff, adaptive)
    return kept


def keep_likely(logits: jax.Array, top_k: int | None, top_p: float) -> jax.Array:
    """The logits [b, v], with those of unlikely tokens at -inf.

    Args:
      logits: already divided by the temperature.
      top_k: the number of tokens to keep; None: all.
      top_p: then keeps the fewest of the most likely tokens whose probabilities add up to this or more, at least one
        (nucleus sampling, 1904.09751 section 3.1). Tokens of equal logits are kept or dropped together.
    """
    vocabulary = logits.shape[-1]
    count = vocabulary if top_k is None else min(top_k, vocabulary)
    if count == vocabulary and top_p == 1:
        return logits
    descending = jax.lax.top_k(logits, count)[0]
    if top_p < 1:
        # Added from the least likely on, as transformers does: near 1, fp32 sums from the other end are all 1.
        rest = jnp.cumsum(jax.nn.softmax(descending)[:, ::-1], axis=-1)[:, ::-1]
        descending = jnp.where((rest > 1 - top_p).at[:, 0].set(True), descending, jnp.inf)
    return jnp.where(logits < descending.min(-1, keepdims=True), -jnp.inf, logits)


def _entropies(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities [b, v], and -p log p of each token; 0 where p is 0."""
    log = jax.nn.log_softmax(logits)
    return log, jnp.where(jnp.isfinite(log), -jnp.exp(log) * log, 0.0)


def _keep_top_h(logits: jax.Array, top_h: float) -> jax.Array:
    """Keeps the most likely tokens whose entropies add up to at most top_h of the whole (top-H sampling, 2509.02510)."""
    descending, order = jax.lax.top_k(logits, min(TOP_H_TOKENS, logits.shape[-1]))
    terms = _entropies(descending)[1]
    kept = (jnp.cumsum(terms, axis=-1) <= top_h * terms.sum(-1, keepdims=True)).at[:, 0].set(True)
    rows = jnp.arange(len(logits))[:, None]
    return jnp.where(jnp.zeros(logits.shape, bool).at[rows, order].set(kept), logits, -jnp.inf)


def _keep_typical(logits: jax.Array, mass: float) -> jax.Array:
    """Keeps the tokens whose information is nearest to the entropy, up to a probability (2202.00666)."""
    log, terms = _entropies(logits)
    distance = jnp.abs(-log - terms.sum(-1, keepdims=True))
    order = jnp.argsort(distance, axis=-1, stable=True)
    ascending = jnp.take_along_axis(distance, order, -1)
    added = jnp.cumsum(jax.nn.softmax(jnp.take_along_axis(logits, order, -1)), axis=-1)
    last = jnp.minimum((added < mass).sum(-1, keepdims=True), logits.shape[-1] - 1)
    dropped = (ascending > jnp.take_along_axis(ascending, last, -1)).at[:, 0].set(False)
    rows = jnp.arange(len(logits))[:, None]
    return jnp.where(jnp.zeros(logits.shape, bool).at[rows, order].set(dropped), -jnp.inf, logits)


def _keep_above(logits: jax.Array, cutoff: float, adaptive: bool) -> jax.Array:
    """Keeps the tokens of a probability of `cutoff` or more, and the most likely one (2210.15191, epsilon and eta)."""
    least = jnp.float32(cutoff)
    if adaptive:
        entropy = _entropies(logits)[1].sum(-1, keepdims=True)
        least = jnp.minimum(least, jnp.sqrt(least) * jnp.exp(-entropy))
    unlikely = (jax.nn.softmax(logits) < least) & (logits < logits.max(-1, keepdims=True))
    return jnp.where(unlikely, -jnp.inf, logits)
