"""The text that a run generates after its training, on the training's mesh."""

from typing import Any

import numpy as np

from megajax.config.sample import SampleConfig
from megajax.generate.decoder import Decoder, DecodeSizes, decoding_rules, decoding_run
from megajax.generate.text import Ending, Sample, Speed, check_length, continue_prompts
from megajax.train.state import evaluated_params

__all__ = ["TextSample"]


class TextSample:
    """A prompt that a trained state continues. An empty prompt is the token that ends a document."""

    def __init__(self, trainer: Any, sample: SampleConfig):
        """Checks the prompt before the training.

        Args:
          trainer: a `megajax.train.trainer.Trainer` with a tokenizer.
          sample: the prompt and how it is continued.

        Raises:
          ConfigError: the prompt is as long as the model's context, or the model generates no text.
        """
        self.trainer, self.sample, training = trainer, sample, trainer.training
        tokens = trainer.tokenizer.encode_prompt(sample.prompt)
        self.prompt = tokens if len(tokens) else np.array([trainer.tokenizer.end_of_document], np.int32)
        self.context = trainer.run.model.sequence_length
        check_length(len(self.prompt), self.context, "--prompt")
        new = min(sample.new_tokens, self.context - len(self.prompt))
        self.decoder = Decoder(
            decoding_run(trainer.run),
            trainer.mesh,
            DecodeSizes(1, len(self.prompt), new),
            sample,
            seed=trainer.run.train.seed,
            model=training.model_class,
            rules=decoding_rules(training.rules),
        )

    def __call__(self, state: Any) -> str:
        """The prompt and its continuation by a `TrainState`'s parameters."""
        weights = self.decoder.weights(evaluated_params(self.trainer.run.train, state), self.trainer.training.where)
        ending = Ending(self.sample.new_tokens, self.context)
        sample = Sample(0, self.prompt, ending, self.trainer.tokenizer)
        continue_prompts(self.decoder, weights, [sample], Speed())
        text = self.trainer.tokenizer.text([*self.prompt, *sample.tokens])
        full = f"\n(stopped after {len(sample.tokens)} tokens: the context of {self.context} tokens is full)"
        return text + full * (sample.finish == "context")
