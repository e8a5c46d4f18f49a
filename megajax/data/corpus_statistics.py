"""Statistics of each source of a run: documents, tokens, the lengths of documents, and tokens for each word and byte."""

import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from megajax.config import ConfigError, RunConfig
from megajax.data.blending import Blend
from megajax.data.indexed import IndexedDataset
from megajax.data.sft import load_answers
from megajax.data.source import tokenizer_of_model
from megajax.data.text import load_documents
from megajax.data.tokenizers import Tokenizer
from megajax.schedules.pictures import COLOURS, picture

__all__ = ["HEAD", "Statistics", "corpus_statistics", "draw", "lines", "table_rows"]

SAMPLED = 500  # documents that are decoded, spread over the source
LONGEST = 4096  # tokens of one that are
HEAD = ("source", "documents", "tokens", "mean", "median", "95%", "longest", "tokens a word", "bytes a token")
BINS = 40


class Statistics(NamedTuple):
    """Statistics of a source.

    Attributes:
      name: its prefix or files.
      lengths: tokens of each document or sample, int64 [documents].
      tokens, words, size: of SAMPLED documents' beginnings: tokens, words between spaces, and bytes of UTF-8.
    """

    name: str
    lengths: np.ndarray
    tokens: int
    words: int
    size: int


def corpus_statistics(run: RunConfig, tokenizer: Tokenizer) -> list[Statistics]:
    """The statistics of each source of a run's training data.

    Raises:
      ConfigError: it cannot be read, or is a stream or a task's, of which nothing is known before it is read.
    """
    data = run.data
    tokenizer = tokenizer_of_model(run, tokenizer)
    for name in ("stream", "task_data"):
        if getattr(data, name):
            raise ConfigError(
                f"--statistics are not for --{name.replace('_', '-')}: preprocess the texts, and pass the pair"
            )
    if words := data.train_data_path or data.data_path:
        return [_of_pair(prefix, tokenizer) for prefix in Blend.parse(words).prefixes]
    if data.sft_data:
        length = run.model.sequence_length + 1
        found = load_answers(data.sft_data, tokenizer, data.chat_template, length, data.long_samples == "drop")
        at = found.offsets
        return [_statistics(found.name, np.diff(at), lambda number: found.ids[at[number] : at[number + 1]], tokenizer)]
    texts = [tokenizer.encode(text) for text in load_documents(data.text)]
    lengths = np.array([len(ids) + 1 for ids in texts], np.int64)
    return [_statistics(data.text or "the bundled text", lengths, texts.__getitem__, tokenizer)]


def table_rows(found: Sequence[Statistics]) -> list[list[str]]:
    """The rows of the table below HEAD; "-" where there is nothing to divide by."""
    rows = []
    for one in found:
        lengths = one.lengths if len(one.lengths) else np.zeros(1)
        median, most = np.percentile(lengths, (50, 95))
        numbers = [f"{lengths.mean():,.1f}", f"{median:,.0f}", f"{most:,.0f}", f"{lengths.max():,.0f}"]
        rates = [_rate(one.tokens, one.words), _rate(one.size, one.tokens)]
        rows.append([one.name, f"{len(one.lengths):,}", f"{one.lengths.sum():,}", *numbers, *rates])
    return rows


def lines(found: Sequence[Statistics]) -> list[str]:
    """The table as text."""
    rows = [list(HEAD), *table_rows(found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]


def draw(found: Sequence[Statistics], path: str | pathlib.Path) -> None:
    """Writes a picture: the distribution of the documents' lengths, and each source's share and tokens for each word.

    Raises:
      UserError: see `picture`.
    """
    longest = max((int(one.lengths.max()) for one in found if len(one.lengths)), default=1)
    shortest = min((int(one.lengths.min()) for one in found if len(one.lengths)), default=1)
    edges = np.geomspace(max(1, shortest), max(2, shortest + 1, longest), BINS + 1)
    names = [pathlib.PurePath(one.name).name for one in found]
    with picture(path, 760, 220 + 44 * len(found)) as figure:
        grid = figure.add_gridspec(2, 2, height_ratios=(170, 50 + 44 * len(found)))
        above = figure.add_subplot(grid[0, :])
        for name, one in zip(names, found, strict=True):
            tokens, _ = np.histogram(np.clip(one.lengths, edges[0], edges[-1]), edges, weights=one.lengths)
            above.stairs(tokens / max(1, tokens.sum()), edges, label=name, fill=len(found) == 1)
        above.set(xscale="log", xlabel="tokens of a document", ylabel="share of the tokens")
        above.legend(loc="upper left") if len(found) > 1 else None
        below = [figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1])]
        values = [
            ([one.lengths.sum() / 1e6 for one in found], "million tokens"),
            ([one.tokens / one.words if one.words else 0 for one in found], "tokens a word"),
        ]
        for axes, (numbers, label) in zip(below, values, strict=True):
            bars = axes.barh(names, numbers, height=0.6, color=[COLOURS[at % len(COLOURS)] for at in range(len(found))])
            axes.bar_label(bars, [f" {number:,.3g}" for number in numbers])
            axes.set(xlabel=label, xlim=(0, 1.2 * max(*numbers, 1e-9)))
            axes.invert_yaxis()
        below[1].set_yticklabels([])


def _of_pair(prefix: str, tokenizer: Tokenizer) -> Statistics:
    dataset = IndexedDataset(prefix)
    dataset.check_type()
    ends = np.concatenate([[0], np.cumsum(dataset.lengths, dtype=np.int64)])
    return _statistics(prefix, np.diff(ends[dataset.documents]), dataset.document, tokenizer)


def _statistics(
    name: str, lengths: np.ndarray, document: Callable[[int], np.ndarray], tokenizer: Tokenizer
) -> Statistics:
    tokens = words = size = 0
    for number in np.unique(np.linspace(0, len(lengths) - 1, SAMPLED).astype(np.int64)) if len(lengths) else []:
        ids = np.asarray(document(int(number))[:LONGEST])
        if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocabulary:
            raise ConfigError(
                f"{name}, document {number} has an id that tokenizer {tokenizer.name} does not have: pass the --tokenizer "
                "that wrote it"
            )
        ids = ids[ids != tokenizer.end_of_document]
        text = tokenizer.decode(ids)
        tokens, words, size = tokens + len(ids), words + len(text.split()), size + len(text.encode())
    return Statistics(name, np.asarray(lengths, np.int64), tokens, words, size)


def _rate(above: int, below: int) -> str:
    return f"{above / below:.3f}" if below else "-"
