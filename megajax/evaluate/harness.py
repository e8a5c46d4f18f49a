"""A model for lm-evaluation-harness on any layout: `python -m megajax.evaluate --harness TASKS`.

`HarnessModel` is an `lm_eval.api.model.LM`. Log-likelihoods are scored as the papers' tasks are (`scorer.py`), texts are
generated as by megajax.generate, both on the same mesh. It follows lm-eval's own model of type `hf`: in what is tokenized
together, in what precedes an empty context, and in what is cut from a text that is too long.

This file imports lm-eval (extra `eval`), so only the command's --harness imports it.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from megajax.config import ConfigError
from megajax.config.sample import LogitsRules, SampleConfig
from megajax.data.tokenizers import Tokenizer
from megajax.evaluate.harness_tokens import HarnessTokens
from megajax.evaluate.scorer import Request, Score, Scorer
from megajax.generate.decoder import Decoder, DecodeSizes, decoding_rules, decoding_run
from megajax.generate.options import MOST_TOGETHER
from megajax.generate.text import Ending, Sample, Speed, continue_prompts
from megajax.interop.hugging_face.generation import GenerationSettings
from megajax.interop.hugging_face.generation import read_generation as read_settings
from megajax.schedules.errors import one_line, shown

__all__ = ["HarnessModel", "Generation", "read_generation"]

Tree = Any
USUAL_NEW_TOKENS = 256  # lm-eval's
# Other generation_kwargs than the temperature and top_k.
DRAWS = {
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "no_repeat_ngram_size": int,
    "min_new_tokens": int,
}
NAMES_OF_LENGTH = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first one counts


@dataclasses.dataclass(frozen=True)
class Generation:
    """How a text is generated.

    Attributes:
      stops: texts that end it.
      sampling, rules: new tokens and how they are drawn.
    """

    stops: tuple[str, ...]
    sampling: SampleConfig
    rules: LogitsRules


def read_generation(options: Mapping[str, Any], settings: GenerationSettings) -> Generation:
    """The meaning of a request's generation_kwargs, before which the model's own settings are, as in lm-eval's `hf`.

    Raises:
      ConfigError: one of them is unknown, or has an illegal value.
    """
    given = dict(options)
    stops = given.pop("until", None) or ()
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    lengths = [given.pop(name, None) for name in NAMES_OF_LENGTH]
    new_tokens = next((int(length) for length in lengths if length is not None), USUAL_NEW_TOKENS)
    samples = given.pop("do_sample", None)
    temperature = float(given.pop("temperature", None) or (1.0 if samples else 0.0))
    draws = {"new_tokens": new_tokens, "temperature": 0.0 if samples is False else temperature}
    if (top_k := given.pop("top_k", None)) is not None:
        draws["top_k"] = top_k or None
    for name, kind in DRAWS.items():
        if (value := given.pop(name, None)) is not None:
            draws[name] = kind(value)
    if given:
        name = next(iter(given))
        raise ConfigError(
            f"generation_kwargs has {name} = {shown(given[name])}, which megajax does not have: remove it from the task."
        )
    sampling, rules = settings.sampling(draws)
    if new_tokens < 1:
        raise ConfigError(f"generation_kwargs has {new_tokens} new tokens: set max_gen_toks of the task to 1 or more.")
    return Generation(tuple(filter(None, [*stops, *settings.stops])), sampling, rules)


class HarnessModel(TemplateLM):
    """Scores and continues texts.

    Attributes:
      scorer: its programs and mesh.
      truncated: requests that were longer than the model's context, so far; they keep their last tokens.
    """

    def __init__(
        self,
        scorer: Scorer,
        weights: Tree,
        tokens: Tokenizer,
        folder: pathlib.Path | None = None,
        template: str | None = None,
        generation_config: str = "auto",
    ):
        """Compiles nothing.

        Args:
          scorer: the programs of log-likelihoods.
          weights: of `Scorer.weights`.
          tokens: the model's tokenizer.
          folder: with the model's generation settings; None: it has none.
          template: the name of one of the tokenizer's chat templates; None: its default.
          generation_config: "none": of these settings the end tokens alone are used.
        """
        super().__init__()
        self.scorer, self._weights, self._tokens = scorer, weights, HarnessTokens(tokens)
        self.tokenizer = tokens.hugging_face  # of `TemplateLM.chat_template`
        self.truncated = 0
        self._folder, self._template, self._own = folder, template, generation_config == "auto"

    @functools.cached_property
    def _settings(self) -> GenerationSettings:
        """Those of the model; a task of log-likelihoods needs none."""
        found = read_settings(self._folder, self.eot_token_id)
        return found if self._own else found.without_draws()

    @property
    def eot_token_id(self) -> int:
        """The token that ends documents."""
        return self._tokens.end

    @property
    def prefix_token_id(self) -> int:
        """The token before an empty context, and before the first token of a document."""
        return self._tokens.prefix

    @property
    def max_length(self) -> int:
        """Tokens of the model's context."""
        return self.scorer.run.model.sequence_length

    @property
    def tokenizer_name(self) -> str:
        """Of the request cache."""
        name = self._tokens.tokenizer.name if self.tokenizer is None else self.tokenizer.name_or_path
        return name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids, after the tokens that the tokenizer itself puts in front unless the text has them already."""
        return self._tokens.encode(string, add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a chat; without its system messages if the template refuses these, as lm-eval's `hf` does.

        Raises:
          ConfigError: the template refuses the chat.
        """
        import jinja2

        def render(messages: list[dict[str, str]]) -> str:
            return self.tokenizer.apply_chat_template(
                messages,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )

        try:
            try:
                return render(chat_history)
            except jinja2.TemplateError:
                return render([one for one in chat_history if one["role"] != "system"])
        except Exception as error:  # whatever a template raises
            reason = one_line(str(error)) or type(error).__name__
            raise ConfigError(f"the chat template refuses a document of the task: {reason}") from None

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether greedy decoding returns it.

        Raises:
          ConfigError: a continuation is without tokens, or longer than the model's context.
        """
        pairs = [(request.args, *self._tokens.encode_pair(*request.args)) for request in requests]
        return self._loglikelihood_tokens(pairs)

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
            groups.setdefault(read_generation(request.args[1], self._settings), []).append(number)
        texts: dict[int, str] = {}
        for generation, numbers in groups.items():
            samples = [self._sample(number, requests[number].args[0], generation) for number in numbers]
            self._continue(samples, generation)
            stops = self._stops(generation)
            texts |= {sample.number: self._tokens.text(sample.tokens, stops) for sample in samples}
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
        tokens = self._tokens.encode_context(context)
        self.truncated += len(tokens) > self.max_length - new
        prompt = np.array(tokens[new - self.max_length :], np.int32)
        ends = frozenset({self.eot_token_id, *self._settings.ends})
        ending = Ending(new, self.max_length, self._stops(generation), ends)
        return Sample(number, prompt, ending, self._tokens.tokenizer, is_message=True)  # decoded alone, as lm-eval does

    def _stops(self, generation: Generation) -> tuple[str, ...]:
        return tuple(filter(None, dict.fromkeys([*generation.stops, self._tokens.end_text])))

    def _continue(self, samples: Sequence[Sample], generation: Generation) -> None:
        training = self.scorer.training
        longest = max(len(sample.prompt) for sample in samples)
        decoder = Decoder(
            decoding_run(self.scorer.run),
            training.mesh,
            DecodeSizes(min(MOST_TOGETHER, len(samples)), longest, generation.sampling.new_tokens),
            generation.sampling,
            logits_rules=generation.rules,
            model=training.model_class,
            rules=decoding_rules(training.rules),
        )
        continue_prompts(decoder, decoder.weights(self._weights, training.where), samples, Speed())
