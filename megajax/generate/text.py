"""From prompts to texts: batches of samples, where each of them ends, and how fast it went."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from megajax.config import ConfigError
from megajax.config.sample import LogitsRules, SampleConfig
from megajax.data.tokenizers import Tokenizer
from megajax.generate.decoder import Decoder

__all__ = [
    *("Ending", "Sample", "Speed", "check_length", "continue_prompts", "decode_after", "encode_prompt"),
    "most_new_tokens",
]

Tree = Any


@dataclasses.dataclass(frozen=True)
class Ending:
    """Where a text ends.

    Attributes:
      new_tokens: most tokens that are generated.
      context: tokens of the model's context, which prompt and text share.
      stops: texts that end it; they are not part of it. Special tokens count by their text, though texts do not show them.
      tokens: those that end it.
    """

    new_tokens: int
    context: int
    stops: tuple[str, ...] = ()
    tokens: frozenset[int] = frozenset()


class Sample:
    """A prompt and the text that follows it.

    Attributes:
      number: in the run, which seeds its draws.
      prompt: int32 [tokens].
      is_message: whether the text is a message of a chat, which does not continue the prompt's text.
      tokens: the new ones that are part of the text.
      text: that they add to the prompt, without special tokens; see `decode_after`.
      finish: why it ended: "length" (new_tokens), "context" (the model's context is full), "stop" (one of the stops) or
        "end" (one of the tokens that end a text); "" while it has not.
    """

    def __init__(
        self, number: int, prompt: np.ndarray, ending: Ending, tokenizer: Tokenizer, *, is_message: bool = False
    ):
        """A sample without new tokens."""
        self.number, self.prompt, self.ending, self.tokenizer = number, prompt, ending, tokenizer
        self.is_message = is_message
        self._before = () if is_message else tuple(map(int, prompt))
        self.tokens: list[int] = []
        self.finish = ""
        self._cut_text: str | None = None

    @property
    def text(self) -> str:
        """See above; decoded when it is asked for."""
        return self._shown(len(self.tokens)) if self._cut_text is None else self._cut_text

    def extend(self, tokens: Sequence[int]) -> int:
        """Adds the tokens up to the text's end; returns how many."""
        if self.finish:
            return 0
        before, ending = len(self.tokens), self.ending
        for token in map(int, tokens):
            if self.finish:
                break
            if token in ending.tokens:
                self.finish = "end"
                shown = decode_after(self.tokenizer.text, [*self._before, *self.tokens], [token])
                if token != self.tokenizer.end_of_document and shown:
                    self.tokens.append(token)  # as transformers shows it
                break
            self.tokens.append(token)
            if len(self.tokens) == ending.new_tokens:
                self.finish = "length"
            elif len(self.prompt) + len(self.tokens) == ending.context:
                self.finish = "context"
        if ending.stops and self._stop(len(self.tokens)) is not None:
            self._cut(before)
        return len(self.tokens) - before

    def _shown(self, count: int) -> str:
        return decode_after(self.tokenizer.text, self._before, self.tokens[:count])

    def _raw(self, count: int) -> str:
        """The text of the first `count` tokens with special tokens."""
        return decode_after(_raw_decode(self.tokenizer), self._before, self.tokens[:count])

    def _stop(self, count: int) -> int | None:
        """The place of the first stop in the raw text of `count` tokens, 0 if it begins in the prompt; None: there is none.

        As transformers' StopStringCriteria, this also finds one that begins in the prompt and ends in a new token.
        """
        decode = _raw_decode(self.tokenizer)
        whole, prompt = decode([*self._before, *self.tokens[:count]]), len(decode(self._before)) if self._before else 0
        found = [
            place
            for stop in self.ending.stops
            if (place := whole.find(stop, max(0, prompt - len(stop) + 1))) >= 0 and place + len(stop) > prompt
        ]
        return max(0, min(found) - prompt) if found else None

    def _cut(self, before: int) -> None:
        """Ends the text before the first stop, which has appeared after `before` tokens."""
        count, place = next(
            (count, place)
            for count in range(before + 1, len(self.tokens) + 1)
            if (place := self._stop(count)) is not None
        )
        raw = self._raw(count)
        self.tokens, self.finish = self.tokens[:count], "stop"
        if self._shown(count) == raw:
            self._cut_text = raw[:place]
            return
        whole = max(part for part in range(count) if len(self._raw(part)) <= place)  # tokens before the stop
        before, cut = [*self._before, *self.tokens[:whole]], self.tokens[whole : whole + 1]
        is_shown = decode_after(_raw_decode(self.tokenizer), before, cut) == decode_after(
            self.tokenizer.text, before, cut
        )
        self._cut_text = self._shown(whole) + (raw[len(self._raw(whole)) : place] if is_shown else "")


def decode_after(decode: Callable[[Sequence[int]], str], before: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that tokens add to that of the tokens before them.

    It is that of all tokens without that of the first ones: some tokenizers drop the space before the first word of what
    they decode.
    """
    return decode([*before, *tokens])[len(decode(before)) if before else 0 :]


def _raw_decode(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """Decodes tokens with the special ones."""
    return tokenizer.hugging_face.decode if tokenizer.hugging_face is not None else tokenizer.decode


@dataclasses.dataclass
class Speed:
    """Tokens and seconds of prefill and decode, without padding and tokens after a text's end.

    The first new token of each sample is part of the prefill's time, and of neither count.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    def describe(self) -> str:
        """One line with tokens per second."""
        parts = [("prefill", self.prefill_tokens, self.prefill_seconds)]
        parts.append(("decode", self.decode_tokens, self.decode_seconds))
        return ", ".join(
            f"{name} {tokens:,} tokens in {seconds:.2f} s ({tokens / seconds:,.0f} tokens/s)"
            for name, tokens, seconds in parts
            if tokens
        )


def encode_prompt(text: str, tokenizer: Tokenizer, context: int, place: str) -> np.ndarray:
    """The prompt's tokens, int32 [tokens], with those that the tokenizer puts around a text.

    Args:
      text: the prompt.
      tokenizer: the model's.
      context: tokens of the model's context.
      place: where the prompt was given, for errors: "--prompt" or "line 3 of FILE".

    Raises:
      ConfigError: it is empty, or leaves no room for a new token.
    """
    tokens = tokenizer.encode_prompt(text)
    if len(tokens) == 0:
        raise ConfigError(f"{place}: the prompt is empty: give at least one token to continue.")
    check_length(len(tokens), context, place)
    return tokens


def check_length(tokens: int, context: int, place: str) -> None:
    """Raises ConfigError if a prompt of `tokens` tokens leaves no room for a new one."""
    if tokens >= context:
        raise ConfigError(
            f"{place}: the prompt has {tokens:,} tokens, but the model's context is {context:,} tokens, new ones "
            f"included: give at most {context - 1:,}."
        )


def most_new_tokens(prompt: int, sampling: SampleConfig, rules: LogitsRules, place: str) -> int:
    """Most new tokens after a prompt of `prompt` tokens, without regard to the model's context.

    Raises:
      ConfigError: the prompt is as long as the max_length of the model's settings.
    """
    if rules.max_length is None:
        return sampling.new_tokens
    if prompt >= rules.max_length:
        raise ConfigError(
            f"{place}: the prompt has {prompt:,} tokens, and max_length of the model's generation settings is "
            f"{rules.max_length:,} tokens, new ones included: pass --new-tokens."
        )
    return rules.max_length - prompt


def continue_prompts(
    decoder: Decoder,
    weights: Tree,
    samples: Sequence[Sample],
    speed: Speed,
    progress: Callable[[Sequence[Sample]], None] = lambda samples: None,
) -> None:
    """Extends all samples to their ends, in batches of prompts of similar length.

    Args:
      decoder: whose sizes hold any of the samples.
      weights: of `Decoder.weights`.
      samples: without new tokens.
      speed: is increased.
      progress: called with a batch after each of its blocks of tokens.
    """
    ordered = sorted(samples, key=lambda sample: len(sample.prompt))
    size = decoder.sizes.samples
    for first in range(0, len(ordered), size):
        batch = ordered[first : first + size]
        for _ in _blocks(decoder, weights, batch, speed):
            progress(batch)


def _blocks(decoder: Decoder, weights: Tree, batch: Sequence[Sample], speed: Speed) -> Iterator[None]:
    """Extends a batch; stops in between after each block of tokens."""
    start = time.perf_counter()
    state = decoder.prefill(weights, [sample.prompt for sample in batch], [sample.number for sample in batch])
    for sample, token in zip(batch, decoder.first_tokens(state), strict=False):  # a batch may be filled up
        sample.extend([token])
    speed.prefill_tokens += sum(len(sample.prompt) for sample in batch)
    speed.prefill_seconds += time.perf_counter() - start
    yield
    for _ in range(decoder.sizes.blocks):
        if all(sample.finish for sample in batch):
            break
        start = time.perf_counter()
        state, tokens = decoder.decode(weights, state)
        speed.decode_seconds += time.perf_counter() - start
        speed.decode_tokens += sum(sample.extend(row) for sample, row in zip(batch, tokens, strict=False))
        yield
    jax.tree.map(lambda leaf: leaf.delete(), state.cache)  # before the next batch's is allocated
