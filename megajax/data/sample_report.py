"""A sample of a run in words, for `megajax inspect --sample`: where it is from, its tokens, and what is learnt of it."""

import json
import textwrap
from collections.abc import Mapping

import numpy as np

from megajax.config import RunConfig
from megajax.data.sample_reader import SampleReader, real_tokens
from megajax.schedules.errors import one_line

__all__ = ["facts", "report_sample", "title"]

WIDTH = 120


def report_sample(reader: SampleReader, number: int) -> list[str]:
    """The lines about a training sample of a run.

    Args:
      reader: of the run's samples.
      number: of the sample in the run, as messages name it.

    Raises:
      ConfigError: the run has no such sample, or its data cannot be read.
    """
    row = reader.row(number)
    lines = [title(reader.run, number), *(f"  {name:8} {value}" for name, value in facts(reader, number, row))]
    ids = row["tokens"].tolist()
    lines += textwrap.wrap(" ".join(map(str, ids)), WIDTH, initial_indent="  tokens   ", subsequent_indent=" " * 11)
    for begin, end in _parts(row):
        text = json.dumps(reader.tokenizer.decode(ids[begin:end]), ensure_ascii=False)
        lines.append(f"  text     tokens {begin} to {end - 1}: {_printable(text)}")
    return lines


def title(run: RunConfig, number: int) -> str:
    """The sample's number, step and microbatch."""
    return f"sample {number} of the run{_step(run, number)}"


def facts(reader: SampleReader, number: int, row: Mapping[str, np.ndarray]) -> list[tuple[str, str]]:
    """Names and values: where a sample is from, how many of its labels count, and its numbers, such as its class."""
    found = [("from", one_line(source)) for source in reader.sources(number)]
    found.append(("counts", _counts(row)))
    return found + [(name, str(array)) for name, array in sorted(row.items()) if array.ndim == 0 and name != "sample"]


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
    padding = tokens - real_tokens(row)
    text += f", {padding} of them padding" if padding else ""
    if weights.ndim:
        return f"{text}, {int((weights != 0).sum())} labels count"
    return f"{text}, loss weight {float(weights):g}"


def _parts(row: Mapping[str, np.ndarray]) -> list[tuple[int, int]]:
    """The parts of the tokens that are of one document; without padding."""
    real = real_tokens(row)
    document = row.get("document", np.zeros(real))[:real]
    starts = [0, *(np.flatnonzero(np.diff(document)) + 1).tolist()] if real else []
    return list(zip(starts, [*starts[1:], real], strict=True))


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else f"\\u{ord(letter):04x}" for letter in text)
