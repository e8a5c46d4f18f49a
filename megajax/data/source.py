"""What a run reads: the bundled text, a text of the user's, or indexed datasets; and what happens where documents end."""

import dataclasses

from megajax.config import ConfigError, RunConfig
from megajax.data.blending import Blend, BlendedSamples, split_bounds
from megajax.data.gpt_samples import GPTSamples, Samples, check_number
from megajax.data.loader import Boundaries, Loader, TokenSamples
from megajax.data.text import load_documents, split_documents, tokenise
from megajax.data.tokenizers import Tokenizer

DEFAULT_SPLIT = "969,30,1"  # Megatron's


@dataclasses.dataclass(frozen=True)
class DataSource:
    """The data options as they were typed; None where they were not.

    Attributes:
      text: a file of text; None and no path is the bundled one.
      data_path: the words of --data-path: datasets for training and validation both, cut by `split`.
      train_data_path: of --train-data-path: datasets for training alone.
      valid_data_path: of --valid-data-path: datasets for validation alone.
      split: shares of training, validation and test.
      data_cache: folder of stored sample indices.
      reset_position_ids: positions begin at 0 in every document.
      reset_attention_mask: tokens attend to their own document only.
      eod_mask_loss: the token after an end of document is no label.
    """

    text: str | None = None
    data_path: tuple[str, ...] | None = None
    train_data_path: tuple[str, ...] | None = None
    valid_data_path: tuple[str, ...] | None = None
    split: str | None = None
    data_cache: str | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def check(self) -> None:
        """Raises ConfigError for options that exclude one another."""
        apart = {"--train-data-path": self.train_data_path, "--valid-data-path": self.valid_data_path}
        given = [
            name for name, words in ({"--text": self.text, "--data-path": self.data_path} | apart).items() if words
        ]
        if len(given) > 1 and not set(given) <= set(apart):
            raise ConfigError(f"{' and '.join(given)} exclude one another: pass one of them")
        if given == ["--valid-data-path"]:
            raise ConfigError("--valid-data-path needs --train-data-path beside it")
        if self.split is not None and not self.data_path:
            raise ConfigError("--split cuts what --data-path names, which is not given: leave it out")

    def samples(
        self, tokenizer: Tokenizer, sequence_length: int, seed: int, training: int, validation: int
    ) -> tuple[Samples, Samples | None]:
        """Samples to train on and to validate on; the second is None where `validation` is 0.

        Args:
          tokenizer: of a text; datasets have ids already.
          sequence_length: inputs of a sample.
          seed: of the order.
          training: samples that the run takes.
          validation: samples of one validation.

        Raises:
          ConfigError: what is named cannot be read, or does not suffice.
        """
        self.check()
        if not (self.data_path or self.train_data_path):
            parts = [tokenise(documents, tokenizer) for documents in split_documents(load_documents(self.text))]
            valid = TokenSamples(parts[1], sequence_length, None) if validation else None
            return TokenSamples(parts[0], sequence_length, seed), valid
        settings = (sequence_length, seed, self.data_cache)
        if self.train_data_path:
            if validation and not self.valid_data_path:
                raise ConfigError(
                    "--train-data-path leaves nothing to validate on: pass --valid-data-path PREFIX, or "
                    "--validation-batches 0"
                )
            valid = Blend.parse(self.valid_data_path).whole(validation, *settings) if validation else None
            return Blend.parse(self.train_data_path).whole(max(1, training), *settings), valid
        split = self.split or DEFAULT_SPLIT
        bounds = split_bounds(split)
        for name, part, needed in (("training", bounds[0], 1), ("validation", bounds[1], validation)):
            if part is None and needed:
                remedy = " or --validation-batches 0" * (name == "validation")
                raise ConfigError(f"--split {split} leaves nothing for {name}: pass another split{remedy}")
        blend = Blend.parse(self.data_path)
        valid = blend.samples(bounds[1], validation, *settings) if validation else None
        return blend.samples(bounds[0], max(1, training), *settings), valid

    def loaders(self, run: RunConfig, tokenizer: Tokenizer, needed: int) -> tuple[Loader, Loader]:
        """(training, validation) of a run that takes `needed` samples.

        Raises:
          ConfigError: see `samples`; or a blend by size, that is not repeated, has fewer.
        """
        train = run.train
        counts = (needed, train.validation_batches * train.global_batch_size)
        training, validation = self.samples(tokenizer, run.model.sequence_length, train.seed, *counts)
        if not isinstance(training, TokenSamples):
            check_number(max(0, needed - 1), training.count)
        if isinstance(validation, BlendedSamples) and validation.count < train.global_batch_size:
            raise ConfigError(
                f"validation has {validation.count} samples and a batch takes {train.global_batch_size}: give it more "
                "data, or weights, or lower --global-batch-size"
            )
        switches = (self.reset_position_ids, self.reset_attention_mask, self.eod_mask_loss)
        boundaries = Boundaries(tokenizer.end_of_document, *switches) if any(switches) else None
        rest = (train.global_batch_size, run.microbatches, boundaries, run.model.vocabulary)
        return Loader(training, *rest), Loader(validation or training, *rest)  # no validation batches: nothing reads it


def describe(samples: Samples, needed: int) -> list[str]:
    """What a run of `needed` samples reads, a line for each dataset: tokens, and how often the run goes through them."""
    if isinstance(samples, TokenSamples):
        return [_reading(len(samples.tokens), needed, samples)]
    if isinstance(samples, GPTSamples):
        return [f"{samples.dataset.prefix}: {_reading(samples.tokens, needed, samples)}"]
    assert isinstance(samples, BlendedSamples)
    drawn = zip(samples.parts, samples.drawn.tolist(), strict=True)
    return [
        f"{part.dataset.prefix}: {count / samples.count:.1%}, {_reading(part.tokens, count, part)}"
        for part, count in drawn
    ]


def _reading(tokens: int, needed: int, samples: Samples) -> str:
    return f"{tokens:,} tokens, {needed * samples.sequence_length / tokens:.3g} epochs of them"
