"""The samples and batches of a run, from its DataConfig: the bundled text, a text file, indexed datasets, or answers."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megajax.config import BertConfig, ConfigError, DataConfig, RunConfig, option
from megajax.config.data import DEFAULT_SPLIT
from megajax.config.validation_sets import DEFAULT_SET, validation_sets
from megajax.data.bert import BertLoader, BertSamples, Masking, WordPieces
from megajax.data.bert_text import BertTextSamples
from megajax.data.blending import Blend, BlendedSamples, gpt_samples, split_bounds
from megajax.data.gpt_samples import GPTSamples, Samples, check_number
from megajax.data.loader import Boundaries, Loader, RowLoader, TokenSamples
from megajax.data.packing import PackedSamples
from megajax.data.pair_sums import verify_pairs
from megajax.data.ramp import RampedLoader
from megajax.data.recipe import Recipe
from megajax.data.sft import load_answers
from megajax.data.sources import Wanted
from megajax.data.stream import StreamLoader, StreamSamples, parse_stream, parse_weights
from megajax.data.task_samples import TaskSamples, task_loader
from megajax.data.text import load_documents, split_documents, tokenise
from megajax.data.tokenizers import HuggingFaceTokenizer, Tokenizer, load_tokenizer, with_vocabulary


@dataclasses.dataclass(frozen=True)
class RunData:
    """The data of a run.

    Attributes:
      batches: of the training, as `Prefetch` reads them.
      validation: the batches of each validation set, by its name.
      description: lines of the log.
      loaders: of the configuration's data, by name, which `train.same_run` compares; none if the batches are the user's.
      tokenizer: of the configuration's text; None if the batches are the user's.
    """

    batches: Any
    validation: Mapping[str, Any]
    description: Sequence[str]
    loaders: Mapping[str, Loader] = dataclasses.field(default_factory=dict)
    tokenizer: Tokenizer | None = None


def open_data(run: RunConfig) -> RunData:
    """The data of a run's configuration.

    Raises:
      ConfigError: see `make_loaders`; or the tokenizer has ids beyond the model's vocabulary.
    """
    tokenizer = tokenizer_of_model(run, load_tokenizer(run.data.tokenizer, run.data.end_of_document))
    training, validation = make_loaders(run, tokenizer)
    lines = describe(training.samples, run.total_samples)
    if isinstance(training.samples, StreamSamples):  # not read twice: its fingerprint is that of its options
        return RunData(StreamLoader(training, run), validation, lines, validation, tokenizer)
    return RunData(RampedLoader(training, run), validation, lines, {"training": training, **validation}, tokenizer)


def tokenizer_of_model(run: RunConfig, tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer for a run's model; added tokens that the model has no row for are refused in texts.

    Raises:
      ConfigError: others are beyond the model's vocabulary.
    """
    known = getattr(run.model, "vocabulary", None)
    if known is None or tokenizer.vocabulary <= known:
        return tokenizer
    if isinstance(tokenizer, HuggingFaceTokenizer) and (found := with_vocabulary(tokenizer, known)):
        return found
    raise ConfigError(
        f"tokenizer {tokenizer.name} has {tokenizer.vocabulary} tokens, but model {run.model.name} knows "
        f"{known}: pass --vocabulary {tokenizer.vocabulary} or another --tokenizer"
    )


def make_samples(
    data: DataConfig,
    tokenizer: Tokenizer,
    sequence_length: int,
    seed: int,
    training: int,
    validation: int,
    masking: Masking | None = None,
) -> tuple[Any, dict[str, Any]]:
    """The training samples, and those of each validation set by its name: none if `validation` is 0.

    Args:
      data: validated options.
      tokenizer: tokenizer of a text; datasets contain ids.
      sequence_length: input tokens of a sample.
      seed: seed of the order of the samples.
      training: number of samples of the run.
      validation: number of samples of one validation, of each set.
      masking: of BERT's samples; None: the samples are GPT's.

    Raises:
      ConfigError: a file cannot be read, or has too few samples.
    """
    make = gpt_samples if masking is None else _bert_samples(WordPieces.from_tokenizer(tokenizer), masking)
    if not (data.data_path or data.train_data_path):
        texts = split_documents(load_documents(data.text))
        if masking is not None:
            settings = (tokenizer, sequence_length, seed, masking)
            valid = {DEFAULT_SET: BertTextSamples(texts[1], *settings)} if validation else {}
            return BertTextSamples(texts[0], *settings), valid
        parts = [tokenise(documents, tokenizer) for documents in texts]
        valid = {DEFAULT_SET: TokenSamples(parts[1], sequence_length, None)} if validation else {}
        return TokenSamples(parts[0], sequence_length, seed), valid
    if data.verify_data:
        from megajax.runtime.compat import coordination_service  # imports jax, which not every caller needs

        joined = coordination_service()  # each process reads a part
        verify_pairs(_prefixes(data), (joined.process_id or 0, joined.num_processes or 1))
    settings = (sequence_length, seed, data.data_cache, make)
    if data.train_data_path:
        valid = _validation_sets(data, "--train-data-path", validation, settings)
        return Blend.parse(data.train_data_path).whole(max(1, training), *settings), valid
    split = data.split or DEFAULT_SPLIT
    bounds = split_bounds(split)
    for name, part, needed in (("training", bounds[0], 1), ("validation", bounds[1], validation)):
        if part is None and needed:
            remedy = " or --validation-batches 0" * (name == "validation")
            raise ConfigError(f"--split {split} has no share for {name}: pass another split{remedy}")
    blend = Blend.parse(data.data_path)
    valid = {DEFAULT_SET: blend.samples(bounds[1], validation, *settings)} if validation else {}
    return blend.samples(bounds[0], max(1, training), *settings), valid


def _validation_sets(data: DataConfig, option: str, validation: int, settings: tuple) -> dict[str, Any]:
    """The samples of --valid-data-path."""
    if validation and not data.valid_data_path:
        raise ConfigError(f"{option} has no validation data: pass --valid-data-path PREFIX, or --validation-batches 0")
    sets = validation_sets(data.valid_data_path or (), "--valid-data-path") if validation else {}
    return {name: Blend.parse(words).whole(validation, *settings) for name, words in sets.items()}


def _stream_samples(run: RunConfig, tokenizer: Tokenizer) -> StreamSamples:
    """The samples of --stream."""
    data, train = run.data, run.train
    wanted = Wanted((data.text_key,), data.stream_split, data.stream_subset)
    sources, weights = parse_stream(data.stream or (), wanted, train.seed)
    later = parse_weights(data.stream_weights or (), len(sources))
    recipe = Recipe(data.tokenizer, data.end_of_document, (data.text_key,))
    return StreamSamples(
        sources,
        [(0, weights), *later],
        run.model.sequence_length,
        train.seed,
        recipe,
        data.stream_workers,
        data.shuffle_samples,
        kept=8 * train.global_batch_size,
    )


def _prefixes(data: DataConfig) -> list[str]:
    """Of all indexed datasets of a run."""
    sets = validation_sets(data.valid_data_path or (), "--valid-data-path").values()
    found = [words for words in (data.data_path, data.train_data_path, *sets) if words]
    return [prefix for words in found for prefix in Blend.parse(words).prefixes]


def make_loaders(run: RunConfig, tokenizer: Tokenizer) -> tuple[Loader, dict[str, Loader]]:
    """Loaders of a run's training batches, and of the validation batches of each set by its name.

    Raises:
      ConfigError: see `make_samples`; or a blend by size, which is not repeated, has too few samples.
    """
    train, data, needed = run.train, run.data, run.total_samples
    if data.task_data or getattr(run.model, "has_task", False):
        return task_loader(run, tokenizer), {}
    masking = _masking(run)
    if data.sft_data:
        return _packed_loaders(run, tokenizer)
    counts = (needed, train.validation_batches * train.global_batch_size)
    if data.stream:
        settings = (run.model.sequence_length, train.seed, data.data_cache, gpt_samples)
        training, validation = _stream_samples(run, tokenizer), _validation_sets(data, "--stream", counts[1], settings)
    else:
        training, validation = make_samples(data, tokenizer, run.model.sequence_length, train.seed, *counts, masking)
    if not isinstance(training, TokenSamples | BertTextSamples | StreamSamples):  # they are repeated
        check_number(max(0, needed - 1), training.count)
    for name, samples in validation.items():
        if isinstance(samples, BlendedSamples) and samples.count < train.global_batch_size:
            raise ConfigError(
                f"{name} has {samples.count} samples, fewer than a batch of {train.global_batch_size}: pass more "
                "validation data, weights in --data-path or --valid-data-path, or a smaller --global-batch-size"
            )
    switches = (data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)
    boundaries = Boundaries(tokenizer.end_of_document, *switches) if any(switches) else None
    rest = (train.global_batch_size, run.microbatches, boundaries, run.model.vocabulary)
    kind = Loader if masking is None else BertLoader
    return kind(training, *rest), {name: kind(samples, *rest) for name, samples in validation.items()}


def _masking(run: RunConfig) -> Masking | None:
    """The masking of a BERT's samples; None for other models.

    Raises:
      ConfigError: an option that a BERT's data does not have.
    """
    if not isinstance(run.model, BertConfig):
        return None
    run.model.require_loss()  # before the program is compiled, which raises it too
    for name in ("sft_data", "stream", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if getattr(run.data, name):
            raise ConfigError(
                f"{option(name)} is not an option of BERT's samples, which are of one document each: omit it."
            )
    return Masking(pairs=run.model.has_order)


def _bert_samples(pieces: WordPieces, masking: Masking) -> Callable[..., BertSamples]:
    """The samples of a share of a dataset's documents, for `Blend.samples`."""

    def make(dataset, bounds, samples, sequence_length, seed, cache=None):
        first, last = (round(share * float(dataset.document_count)) for share in bounds)
        return BertSamples(dataset, (first, last), samples, sequence_length, seed, pieces, masking, cache)

    return make


def packed_samples(
    data: DataConfig, files: tuple[str, ...], tokenizer: Tokenizer, sequence_length: int, seed: int | None
) -> PackedSamples:
    """The samples of --sft-data or --valid-sft-data in rows of `sequence_length` tokens.

    Raises:
      ConfigError: see `load_answers`.
    """
    found = load_answers(files, tokenizer, data.chat_template, sequence_length + 1, data.long_samples == "drop")
    return PackedSamples(found, sequence_length, seed, tokenizer.end_of_document)


def _packed_loaders(run: RunConfig, tokenizer: Tokenizer) -> tuple[Loader, dict[str, Loader]]:
    train, data, length = run.train, run.data, run.model.sequence_length
    if train.validation_batches and not data.valid_sft_data:
        raise ConfigError("--sft-data has no validation data: pass --valid-sft-data FILE, or --validation-batches 0")
    rest = (train.global_batch_size, run.microbatches, None, run.model.vocabulary)
    training = RowLoader(packed_samples(data, data.sft_data or (), tokenizer, length, train.seed), *rest)
    sets = validation_sets(data.valid_sft_data or (), "--valid-sft-data") if train.validation_batches else {}
    loader = lambda files: RowLoader(packed_samples(data, files, tokenizer, length, None), *rest)  # noqa: E731
    return training, {name: loader(files) for name, files in sets.items()}


def describe(samples: Samples, needed: int) -> list[str]:
    """One line per dataset: its tokens, and the number of epochs in a run of `needed` samples."""
    if isinstance(samples, StreamSamples):
        return samples.describe()
    if isinstance(samples, PackedSamples | TaskSamples):
        return [samples.describe(needed)]
    if isinstance(samples, TokenSamples):
        return [_token_count(len(samples.tokens), needed, samples)]
    if isinstance(samples, GPTSamples | BertSamples):
        return [f"{samples.dataset.prefix}: {_token_count(samples.tokens, needed, samples)}"]
    assert isinstance(samples, BlendedSamples)
    drawn = zip(samples.parts, samples.drawn.tolist(), strict=True)
    return [
        f"{part.dataset.prefix}: {count / samples.count:.1%}, {_token_count(part.tokens, count, part)}"
        for part, count in drawn
    ]


def _token_count(tokens: int, needed: int, samples: Samples) -> str:
    return f"{tokens:,} tokens, {needed * samples.sequence_length / tokens:.3g} epochs of them"
