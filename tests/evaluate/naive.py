"""Naive loops over windows and passages, one at a time, with a softmax in numpy fp64: what evaluation must reproduce."""

import functools
import math

import jax
import numpy as np

from tests import small
from tests.models.test_cached import recomputed

CONTEXT, VOCABULARY = 48, 61
MODEL = small.dataclasses.replace(small.LLAMA, layers=5, sequence_length=CONTEXT)  # 5: uneven on 2 stages


class NumberTokenizer:
    """Words of numbers, "3" or "5.17", with a token for each number."""

    name, vocabulary, end_of_document = "numbers", VOCABULARY, 0

    def encode(self, text: str) -> np.ndarray:
        return np.array([int(number) for word in text.split() for number in word.split(".")], np.int32)


@functools.cache
def _compiled():
    model, params = small.build_model(MODEL, training=False), small.busy_params(MODEL)
    return jax.jit(lambda tokens: recomputed(model, params, tokens)[0, :, :VOCABULARY])


def log_softmax(tokens) -> np.ndarray:
    """fp64 [n, vocabulary], of the tokens that follow each of these; padding after them has no effect."""
    padded = np.zeros((1, CONTEXT), np.int32)
    padded[0, : len(tokens)] = tokens
    logits = np.asarray(_compiled()(padded), np.float64)[: len(tokens)]
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def wikitext(tokens: np.ndarray, words: int, length: int, stride: int) -> tuple[float, float]:
    """Perplexity and adjusted perplexity: Megatron-LM's loop over overlapping windows, with its mask over padding."""
    total = counted = 0
    for window in range(max(math.ceil(max(len(tokens) - 1 - stride, 0) / stride) + 1, 1)):
        part = tokens[window * stride : window * stride + length + 1]
        mask = np.zeros(length, int)
        mask[: len(part) - 1] = 1
        if window and stride != length:
            mask[:-stride] = 0
        if len(part) < 2:
            continue
        likely = log_softmax(part[:-1])
        for place in range(len(part) - 1):
            total -= mask[place] * likely[place, part[place + 1]]
            counted += mask[place]
    assert counted == len(tokens) - 1
    return math.exp(total / (len(tokens) - 1)), math.exp(total / (words - 1))


def lambada(text: str, strict: bool) -> tuple[bool, float]:
    """Whether the last word, or the last token, is the most likely continuation; and its loss."""
    encode = NumberTokenizer().encode
    if strict:
        word = text.split()[-1]
        context, target = encode(text[: text.rfind(word)].strip()), encode(" " + word)
    else:
        context, target = encode(text)[:-1], encode(text)[-1:]
    tokens = np.concatenate([context, target])[-CONTEXT - 1 :]
    likely = log_softmax(tokens[:-1])[-len(target) :]
    right = bool((likely.argmax(-1) == target).all())
    return right, -float(likely[np.arange(len(target)), target].sum())


def greedy(text: str, tokens: int) -> str:
    """The most likely word of this many tokens after a text."""
    context = list(NumberTokenizer().encode(text))
    for _ in range(tokens):
        context.append(int(log_softmax(context[-CONTEXT:])[-1].argmax()))
    return ".".join(map(str, context[-tokens:]))
