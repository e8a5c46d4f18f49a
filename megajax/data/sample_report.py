"""A sample of a run in words, for `megajax inspect --sample`: where it is from, its tokens, and what is learnt of it."""

import json
import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np

from megajax.config import ConfigError, RunConfig
from megajax.data.loader import PADDING
from megajax.data.source import make_loaders
from megajax.data.tokenizers import Tokenizer
from megajax.schedules.errors import one_line

__all__ = ["report_sample"]

WIDTH = 120


def report_sample(run: RunConfig, tokenizer: Tokenizer, number: int) -> list[str]:
    """The lines about a training sample of a run.

    Args:
      run: its data is opened.
      tokenizer: the run's.
      number: of the sample in the run, as messages name it.

    Raises:
      ConfigError: the run has no such sample, or its data cannot be read.
    """
    total = run.total_samples
    if not 0 <= number < min(total, PADDING):
        raise ConfigError(f"--sample {number}: the run has samples 0 to {total - 1}")
    loader, _ = make_loaders(run, tokenizer)
    row = {name: array[0] for name, array in loader.rows(np.array([number])).items()}
    lines = [f"sample {number} of the run{_step(run, number)}"]
    sources = getattr(loader.samples, "sources", None)
    lines += [f"  from     {one_line(source)}" for source in (sources(number) if sources else [_name(loader.samples)])]
    lines.append(f"  counts   {_counts(row)}")
    for name, array in sorted(row.items()):
        if array.ndim == 0 and name != "sample":
            lines.append(f"  {name:8} {array}")
    ids = row["tokens"].tolist()
    lines += textwrap.wrap(" ".join(map(str, ids)), WIDTH, initial_indent="  tokens   ", subsequent_indent=" " * 11)
    for begin, end in _parts(row):
        text = json.dumps(tokenizer.decode(ids[begin:end]), ensure_ascii=False)
        lines.append(f"  text     tokens {begin} to {end - 1}: {_printable(text)}")
    return lines


def _step(run: RunConfig, number: int) -> str:
    """The step that trains on the sample, and its microbatch; "" with a batch ramp, where sizes differ."""
    size = run.train.global_batch_size
    if run.train.batch_ramp:
        return ""
    each = run.parallel.microbatch_size * run.parallel.data
    return f": step {number // size + 1}, microbatch {number % size // each + 1} of {run.microbatches}"


def _counts(row: Mapping[str, np.ndarray]) -> str:
    """How many tokens there are, and how many labels count."""
    tokens, weights = len(row["tokens"]), row["weights"]
    text = f"{tokens} tokens"
    padding = int(row["padding_mask"].sum()) if "padding_mask" in row else int(row.get("padding", 0))
    text += f", {padding} of them padding" if padding else ""
    if weights.ndim:
        return f"{text}, {int((weights != 0).sum())} labels count"
    return f"{text}, loss weight {float(weights):g}"


def _parts(row: Mapping[str, np.ndarray]) -> list[tuple[int, int]]:
    """The parts of the tokens that are of one document; without padding."""
    real = len(row["tokens"])
    if "padding_mask" in row:
        real -= int(row["padding_mask"].sum())
    elif "padding" in row:
        real -= int(row["padding"])
    document = row.get("document", np.zeros(real))[:real]
    starts = [0, *(np.flatnonzero(np.diff(document)) + 1).tolist()] if real else []
    return list(zip(starts, [*starts[1:], real], strict=True))


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else f"\\u{ord(letter):04x}" for letter in text)


def _name(samples: Any) -> str:
    return getattr(samples, "name", type(samples).__name__)
