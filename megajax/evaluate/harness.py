"""A model for lm-evaluation-harness on any layout: `python -m megajax.evaluate --harness TASKS`.

`HarnessModel` is an `lm_eval.api.model.LM`. Log-likelihoods are scored as the papers' tasks are (`scorer.py`), texts are
generated as by megajax.generate, both on the same mesh. It follows lm-eval's own model of type `hf`: in what is tokenized
together, in what precedes an empty context, and in what is cut from a text that is too long.

This file imports lm-eval (extra `eval`), so only the command's --harness imports it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from megajax.config import ConfigError
from megajax.config.sample import SampleConfig
from megajax.data.tokenizers import Tokenizer
from megajax.evaluate.scorer import Request, Score, Scorer
from megajax.evaluate.special_tokens import read_special_tokens
from megajax.generate.decoder import Decoder, DecodeSizes, decoding_run
from megajax.generate.options import MOST_TOGETHER
from megajax.generate.text import Ending, Sample, Speed, continue_prompts
from megajax.schedules.errors import shown

__all__ = ["HarnessModel", "Generation", "read_generation"]

Tree = Any
USUAL_NEW_TOKENS = 256  # lm-eval's
NAMES_OF_LENGTH = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first one counts


@dataclasses.dataclass(frozen=True)
class Generation:
    """How a text is generated.

    Attributes:
      stops: texts that end it.
      sampling: new tokens and how they are drawn.
    """

    stops: tuple[str, ...]
    sampling: SampleConfig


def read_generation(options: Mapping[str, Any]) -> Generation:
    """The meaning of a request's generation_kwargs.

    Raises:
      ConfigError: one of them is unknown, or has an illegal value.
    """
    given = dict(options)
    stops = given.pop("until", None) or ()
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    lengths = [given.pop(name, None) for name in NAMES_OF_LENGTH]
    new_tokens = next((int(length) for length in lengths if length is not None), USUAL_NEW_TOKENS)
    draws = given.pop("do_sample", None)
    temperature = float(given.pop("temperature", None) or (1.0 if draws else 0.0))
    top_k, top_p = given.pop("top_k", None), float(given.pop("top_p", None) or 1.0)
    if given:
        name = next(iter(given))
        raise ConfigError(
            f"generation_kwargs has {name} = {shown(given[name])}, which megajax does not have: remove it from the task."
        )
    sampling = SampleConfig("", new_tokens, 0.0 if draws is False else temperature, top_k or None, top_p)
    sampling.validate()
    if new_tokens < 1:
        raise ConfigError(f"generation_kwargs has {new_tokens} new tokens: set max_gen_toks of the task to 1 or more.")
    return Generation(tuple(stop for stop in stops if stop), sampling)


class HarnessModel(TemplateLM):
    """Scores and continues texts.

    Attributes:
      scorer: its programs and mesh.
      truncated: requests that were longer than the model's context, so far; they keep their last tokens.
    """

    def __init__(self, scorer: Scorer, weights: Tree, tokens: Tokenizer):
        """Compiles nothing.

        Args:
          scorer: the programs of log-likelihoods.
          weights: of `Scorer.weights`.
          tokens: the model's tokenizer.
        """
        super().__init__()
        self.scorer, self._weights, self._tokens = scorer, weights, tokens
        self.truncated = 0
        self._special = read_special_tokens(tokens)

    @property
    def eot_token_id(self) -> int:
        """The token that ends documents."""
        return self._tokens.end_of_document

    @property
    def prefix_token_id(self) -> int:
        """The token before an empty context, and before the first token of a document."""
        return self._special.prefix

    @property
    def max_length(self) -> int:
        """Tokens of the model's context."""
        return self.scorer.run.model.sequence_length

    @property
    def tokenizer_name(self) -> str:
        """Of the request cache."""
        return self._tokens.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids, after the tokens that the tokenizer itself puts in front unless the text has them already."""
        tokens = self._tokens.encode(string).tolist()
        prefix = self._special.prefix_text
        add = not (prefix and string.startswith(prefix)) if add_special_tokens is None else add_special_tokens
        return [*self._special.start, *tokens] if add else tokens

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether greedy decoding returns it.

        Args:
          requests: (texts, or None; tokens of the context; tokens of the continuation).

        Raises:
          ConfigError: a continuation is empty, or longer than the model's context.
        """
        found = [self._request(context, continuation) for _, context, continuation in requests]
        answers = [
            (-score.loss, score.right == one.scored) for one, score in zip(found, self._scores(found), strict=True)
        ]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _request(self, context: list[int], continuation: list[int]) -> Request:
        if not 0 < len(continuation) <= self.max_length:
            raise ConfigError(
                f"a continuation of the task has {len(continuation)} tokens, and the model's context is {self.max_length} "
                "tokens: it needs 1 token or more, and must fit."
            )
        tokens = context + continuation
        self.truncated += len(tokens) > self.max_length + 1
        return Request(np.array(tokens[-self.max_length - 1 :], np.int32), len(continuation))

    def _scores(self, requests: Sequence[Request]) -> list[Score]:
        scores: dict[int, Score] = {}
        batches = self.scorer.plan(requests) if requests else []
        for batch, found in self.scorer.score(self._weights, requests, batches):
            scores |= dict(zip(batch.numbers, found, strict=True))
        return [scores[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each document, each token with as much context as one pass of the model has."""
        windows: list[tuple[None, list[int], list[int]]] = []
        ends = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            rolling = utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            windows += [(None, *utils.make_disjoint_window(pair)) for pair in rolling]
            ends.append(len(windows))
        scores = [score for score, _ in self._loglikelihood_tokens(windows)]
        found = [float(sum(scores[start:end])) for start, end in zip([0, *ends], ends, strict=False)]
        for request, total in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return found

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continues each context up to the first of its stops, the end of a document, or its number of new tokens.

        Raises:
          ConfigError: generation_kwargs are illegal, or have as many new tokens as the model's context.
        """
        groups: dict[Generation, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(read_generation(request.args[1]), []).append(number)
        texts: dict[int, str] = {}
        for generation, numbers in groups.items():
            samples = [self._sample(number, requests[number].args[0], generation) for number in numbers]
            self._continue(samples, generation)
            texts |= {sample.number: self._shown(sample) for sample in samples}
        for number, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, texts[number])
        return [texts[number] for number in range(len(requests))]

    def _sample(self, number: int, context: str, generation: Generation) -> Sample:
        new = generation.sampling.new_tokens
        if new >= self.max_length:
            raise ConfigError(
                f"the task generates {new} tokens, and the model's context is {self.max_length} tokens: set max_gen_toks "
                f"of its generation_kwargs to at most {self.max_length - 1}."
            )
        tokens = self.tok_encode(context) or [self.prefix_token_id]
        self.truncated += len(tokens) > self.max_length - new
        prompt = np.array(tokens[new - self.max_length :], np.int32)
        return Sample(number, prompt, Ending(new, self.max_length, generation.stops, self.eot_token_id), self._tokens)

    def _shown(self, sample: Sample) -> str:
        """The text of a sample that has ended, without special tokens, up to the first of its stops."""
        text = self._tokens.decode([token for token in sample.tokens if token not in self._special.hidden])
        return text[: min((text.index(stop) for stop in sample.ending.stops if stop in text), default=len(text))]

    def _continue(self, samples: Sequence[Sample], generation: Generation) -> None:
        training = self.scorer.training
        longest = max(len(sample.prompt) for sample in samples)
        decoder = Decoder(
            decoding_run(self.scorer.run),
            training.mesh,
            DecodeSizes(min(MOST_TOGETHER, len(samples)), longest, generation.sampling.new_tokens),
            generation.sampling,
            model=training.model_class,
            rules=training.rules.replace(sequence=None),
        )
        continue_prompts(decoder, decoder.weights(self._weights, training.where), samples, Speed())
