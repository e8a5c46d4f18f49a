"""The training data of a run, for `megajax inspect`: samples, batches and statistics, as text, in colour and as HTML."""

import argparse
import pathlib
from collections.abc import Sequence

from rich.console import Console

from megajax.checkpoint.mirror import local_files
from megajax.checkpoint.object_store import place
from megajax.config import ConfigError, RunConfig
from megajax.config.cli import parse
from megajax.data import corpus_statistics, sample_pages
from megajax.data.sample_reader import SampleReader
from megajax.data.sample_report import report_sample
from megajax.data.tokenizers import load_tokenizer
from megajax.schedules.errors import counted

__all__ = ["show_data"]

PREFERENCES = "preference.json"  # which `megajax dpo` keeps in its run's directory


def show_data(options: argparse.Namespace, training: Sequence[str] | None) -> None:
    """Prints what the options ask for.

    Args:
      options: of `megajax inspect`.
      training: options of a training in place of a run's directory.

    Raises:
      ConfigError: the data cannot be read, or has no such sample.
    """
    directory = local_files(place(options.directory)) if options.directory else None
    run = _run(directory, training, options.trust)
    tokenizer = load_tokenizer(run.data.tokenizer, run.data.end_of_document)
    heading = options.directory or "the training data"
    if options.statistics:
        if directory and (directory / PREFERENCES).exists():
            raise ConfigError("--statistics are not for preferences: pass --sample N")
        found = corpus_statistics.corpus_statistics(run, tokenizer)
        for line in corpus_statistics.lines(found):
            print(line)
        if options.picture:
            corpus_statistics.draw(found, options.picture)
        table = sample_pages.table(corpus_statistics.HEAD, corpus_statistics.table_rows(found))
        _write(options.html, sample_pages.page([], heading, table))
        return
    reader = SampleReader(run, tokenizer, directory and directory / PREFERENCES)
    try:
        numbers = [options.sample] if options.sample is not None else reader.numbers(options.batch)
        console = Console()
        if console.is_terminal:
            sample_pages.print_samples(list(sample_pages.shown(reader, numbers)), console)
        else:
            for number in numbers:
                for line in report_sample(reader, number):
                    print(line)
        if options.html:
            what = f"sample {options.sample}" if options.sample is not None else f"the batch of step {options.batch}"
            heading = f"{heading}: {what}, {counted(len(numbers), 'sample')} of {run.model.sequence_length} tokens"
            _write(options.html, sample_pages.page(list(sample_pages.shown(reader, numbers)), heading))
    finally:
        reader.close()


def _run(directory: pathlib.Path | None, training: Sequence[str] | None, trust: bool) -> RunConfig:
    """The configuration of a run's directory, or of options."""
    if directory is not None:
        config = directory / "config.toml"
        if not config.is_file():
            raise ConfigError(f"{directory} has no config.toml: give the directory of a training run for --sample")
        training = ["--config", str(config), *(["--trust"] if trust else [])]
    # The file has all fields. Without a validation, its data is not opened.
    request = parse(list(training or ()), "", {"model": "tiny", "validation_batches": 0})
    run = request.run(request.devices_needed or 1, "fp32")
    run.data.validate()
    return run


def _write(path: str | None, page: str) -> None:
    if path is None:
        return
    try:
        pathlib.Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}; pass another --html") from None
