"""Tokenizes text into a .bin/.idx pair for megajax and Megatron-LM.

python -m megajax.data.preprocess --input a.jsonl b.txt.gz --out corpus --tokenizer gpt2
python -m megajax.data.preprocess ... --shard 3/64                             one of 64 parts, each for a process or host
python -m megajax.data.preprocess merge --input corpus more --out all         two pairs into one
python -m megajax.data.preprocess merge --shards corpus                       the 64 parts
python -m megajax.data.preprocess inspect corpus --tokenizer gpt2            counts, and the first documents as text
python -m megajax.data.preprocess verify corpus --tokenizer gpt2             checks every offset and every token id

A .jsonl file has one object per line, whose "text" is a document. CSV, TSV, Parquet, Arrow, folders of save_to_disk, shards
of WebDataset and hub:ORG/NAME have rows, with --keys as columns. Any other file is plain text: one document, or several
with --text-documents. .gz and .zst are decompressed, and URLs are read. Memory grows with the longest document only.
"""

import argparse
import os
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megajax.config import ConfigError
from megajax.config.options import Parser
from megajax.data.indexed import IndexedDataset, IndexedWriter, dtype_for
from megajax.data.pair_sums import verify_known
from megajax.data.ray_shards import run_shards
from megajax.data.recipe import Recipe
from megajax.data.remote import expanded
from megajax.data.shards import Shard, merge_shards, parse_shard
from megajax.data.sources import LONGEST, Wanted, check_options, source_kind
from megajax.data.spans import Span
from megajax.data.stored_pairs import PairPlaces
from megajax.data.text import TEXT_DOCUMENTS, check_source, read_blocks
from megajax.data.tokenize_blocks import Result, Workers
from megajax.data.tokenizers import load_tokenizer, tokenizer_hash
from megajax.schedules.arguments import plain_text, whole
from megajax.schedules.errors import counted, exit_code
from megajax.schedules.paths import is_store, local_path, source_path, store_path

BAD_LINES_SHOWN = 10
SHOWN = 300  # characters of a document that are printed


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code: 0, or 2 for an error in the options or files."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    commands = {"merge": _merge, "inspect": _inspect, "verify": _verify}
    command = commands.get(arguments[0] if arguments else "", _preprocess)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # SystemExit removes unfinished files
    words = arguments if command is _preprocess else arguments[1:]
    return exit_code(lambda: command(words), stopped="stopped; nothing was written")


def _parser(command: str = "") -> Parser:
    name = f"python -m megajax.data.preprocess {command}".strip()
    parser = Parser(name, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.renamed = {"--output": "--out"}
    return parser


def _tokenizer_options(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument(
        "--tokenizer",
        required=required,
        type=local_path,
        help="byte, gpt2, wordpiece, or a file: tokenizer.json (Hugging Face), .model (sentencepiece), vocab.txt (BERT)",
    )
    parser.add_argument(
        "--end-of-document",
        type=plain_text,
        metavar="TOKEN",
        help="token of a tokenizer's file that ends documents, if it has none of the usual names",
    )


def _preprocess(arguments: Sequence[str]) -> None:
    parser = _parser()
    parser.add_argument(
        "--input", nargs="+", required=True, type=source_path, metavar="FILE|URL|hub:ORG/NAME", help="texts, in order"
    )
    parser.add_argument("--split", type=plain_text, metavar="NAME", help="of a dataset with several (train)")
    parser.add_argument("--subset", type=plain_text, metavar="NAME", help="of a dataset on the Hub (its only one)")
    parser.add_argument(
        "--out",
        required=True,
        type=store_path,
        metavar="PREFIX",
        help="writes PREFIX.bin and PREFIX.idx; gs:// or s3:// too",
    )
    _tokenizer_options(parser, required=True)
    parser.add_argument(
        "--keys",
        nargs="+",
        type=plain_text,
        default=["text"],
        metavar="KEY",
        help="keys of JSON objects, or columns; several: writes PREFIX_KEY (text)",
    )
    parser.add_argument(
        "--text-documents", choices=TEXT_DOCUMENTS, default="file", help="one document of plain text (file)"
    )
    parser.add_argument("--no-end-of-document", action="store_true", help="append no token to documents")
    parser.add_argument("--split-sentences", action="store_true", help="one sequence per sentence, for BERT")
    parser.add_argument(
        "--bad-lines", choices=("skip", "fail"), default="skip", help="lines that are not a document (skip)"
    )
    parser.add_argument(
        "--longest-document",
        type=whole(below=1 << 20),
        default=LONGEST >> 20,
        metavar="MB",
        help="of a file of text or JSON lines; longer lines or documents are bad lines (%(default)s)",
    )
    parser.add_argument("--workers", type=whole(below=1025), default=_cores(), help="processes (one per core)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing pair")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument(
        "--shard",
        type=parse_shard,
        metavar="INDEX/COUNT",
        help="read this part of the sources, 0/64 to 63/64, and write PREFIX.INDEX-of-COUNT; not again if it is complete",
    )
    parts.add_argument(
        "--ray",
        type=whole(),
        metavar="COUNT",
        help="write COUNT shards, as tasks of a Ray cluster with --workers cores each",
    )
    options = parser.parse_args(arguments)
    if is_store(options.out) and (options.shard or options.ray):
        raise ConfigError(
            f"--out {options.out} is in an object store, to which one process writes: pass --shard and --ray a path of this "
            "machine, and copy the merged pair"
        )
    if options.ray:
        run_shards(arguments, options.ray, options.workers)
        return
    recipe = Recipe(
        options.tokenizer,
        options.end_of_document,
        tuple(options.keys),
        not options.no_end_of_document,
        options.split_sentences,
    )
    paths = expanded(options.input, "--input")
    spans, shard, kind_of = [Span(path) for path in paths], None, lambda path: source_kind(path, options.text_documents)
    if options.shard:
        shard = Shard(*options.shard, options.out, paths, _settings(options, recipe), kind_of)
        if shard.is_complete(options.overwrite):
            return
        spans, paths = shard.spans, [span.path for span in shard.spans]
    kinds = {path: kind_of(path) for path in paths}
    wanted = Wanted(recipe.keys, options.split, options.subset, options.longest_document << 20)
    check_options(kinds, wanted)
    keyed = len(recipe.keys) > 1
    prefixes = [f"{options.out}_{key}" if keyed else options.out for key in recipe.keys]
    report = _Report(kinds, wanted, options.bad_lines == "fail", spans)
    size = sum(report.sizes.values())
    places = PairPlaces(prefixes, options.overwrite)
    with places, tempfile.TemporaryDirectory() as folder, Workers(options.workers, size) as workers:
        shared, vocabulary = recipe.for_workers(folder)  # may import transformers, while the workers start
        blocks = (
            block for span in spans for block in read_blocks(span.path, kinds[span.path], "--input", wanted, span)
        )
        encoded = workers.encode(blocks, shared)
        _write(paths, encoded, recipe.keys, places, dtype_for(vocabulary), options.overwrite, report, shard)


def _settings(options: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    """All that decides on the ids of a text."""
    settings = {"--tokenizer": tokenizer_hash(recipe.load())}
    for name in (
        "keys",
        "text_documents",
        "no_end_of_document",
        "split_sentences",
        "split",
        "subset",
        "longest_document",
    ):
        settings[f"--{name.replace('_', '-')}"] = getattr(options, name)
    return settings


def _write(paths, results, keys, places: PairPlaces, dtype, overwrite, report: "_Report", shard: Shard | None) -> None:
    writers: list[IndexedWriter] = []
    suffix = shard.suffix if shard else ""
    try:
        for prefix in places.local:
            writers.append(IndexedWriter(prefix + suffix, dtype, overwrite=overwrite or shard is not None))
        with report:
            for result in results:
                for writer, encoded in zip(writers, result.encoded, strict=True):
                    writer.add_documents(*encoded)
                report.add(result)
        if not any(writer.tokens for writer in writers) and not shard:
            raise ConfigError(f"{report.why_nothing(paths, keys)} Nothing was written.")
        for writer in writers:
            writer.finish()
    finally:
        for writer in writers:
            writer.discard()
    places.copy()
    if shard:
        shard.finish(dict(zip(places.prefixes, writers, strict=True)), report.characters, report.bad)
    report.close([prefix + suffix for prefix in places.prefixes], writers)


def _written(writer: IndexedWriter) -> str:
    counts = f"{counted(writer.documents, 'document')}, {counted(writer.tokens, 'token')}"
    return f"{counts} of {writer.dtype.name}"


class _Report:
    """The progress bar, the bad lines and the final counts."""

    def __init__(self, kinds: Mapping[str, str], wanted: Wanted, fatal: bool, spans: Sequence[Span]):
        """`kinds`: of the sources; `wanted`: texts of rows; `fatal` makes the first bad line a ConfigError; `spans`: read.

        Raises:
          ConfigError: a file cannot be read or is of a format that is not read; all are opened, before any is tokenized.
        """
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.fatal, self.bad, self.characters, self.tokens = fatal, 0, 0, 0
        self.sizes = {path: check_source(path, kind, "--input", wanted) for path, kind in kinds.items()}
        self.sizes |= {span.path: span.stop - span.start for span in spans if span.stop is not None}
        self.read, self.held = dict.fromkeys(kinds, 0), []
        columns = (BarColumn(), TextColumn("{task.percentage:>3.0f}% {task.fields[rates]}"), TimeRemainingColumn())
        self.console = Console(stderr=True)
        # A bar only where it can move; the bad lines are printed in any case.
        self.progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.progress.add_task("", total=max(1, sum(self.sizes.values())), rates="starting")

    def __enter__(self):
        self.start = time.perf_counter()
        self.progress.start()

    def __exit__(self, *error):
        self.seconds = time.perf_counter() - self.start
        self.progress.stop()

    def add(self, result: Result) -> None:
        """Counts a block, and prints the first BAD_LINES_SHOWN bad lines, once there is a token."""
        if result.bad and self.fatal:
            raise ConfigError(f"{result.bad[0]}; correct it, or pass --bad-lines skip. Nothing was written.")
        self.held += result.bad[: max(0, BAD_LINES_SHOWN - self.bad)]
        self.bad += len(result.bad)
        self.characters += result.characters
        self.tokens += sum(len(encoded.tokens) for encoded in result.encoded)
        if self.tokens:
            for line in self.held:
                self.progress.print(f"skipped {line}", markup=False, highlight=False)
            self.held = []
        self.read[result.path] = result.read
        seconds = max(time.perf_counter() - self.start, 1e-9)
        rates = f"{self.characters / 1e6 / seconds:.1f} MB/s, {self.tokens / 1e6:.1f} M tokens"
        self.progress.update(self.task, completed=sum(self.read.values()), rates=rates)

    def why_nothing(self, paths: Sequence[str], keys: Sequence[str]) -> str:
        """The message of a run without a token: of its first bad line, if there is one."""
        if not self.held:
            more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
            return f"{', '.join(paths[:3])}{more}: there is no document with text in it."
        first = self.held[0]
        remedy = f"pass --keys {first.keys[0]}" if first.keys and len(keys) == 1 else "correct it"
        return f"there is no document in {counted(self.bad, 'line')}: {first}; {remedy}."

    def close(self, prefixes: Sequence[str], writers: Sequence[IndexedWriter]) -> None:
        """Prints the counts of every pair."""
        for prefix, writer in zip(prefixes, writers, strict=True):
            print(f"{prefix}: {_written(writer)}")
        rate = self.characters / 1e6 / self.seconds
        print(
            f"{self.characters / 1e6:.1f} MB of text in {self.seconds:.1f} s, {rate:.1f} MB/s; {self.bad} bad lines skipped"
        )


def _merge(arguments: Sequence[str]) -> None:
    parser = _parser("merge")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--input", nargs="+", type=local_path, metavar="PREFIX", help="pairs, in order")
    what.add_argument("--shards", type=local_path, metavar="PREFIX", help="--out of a preprocessing with --shard")
    parser.add_argument(
        "--out", type=local_path, metavar="PREFIX", help="writes PREFIX.bin and .idx (that of --shards)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing pair")
    options = parser.parse_args(arguments)
    if options.shards:
        _merge_shards(options.shards, options.out or options.shards, options.overwrite)
        return
    if options.out is None:
        parser.error("the following arguments are required: --out")
    sources = [IndexedDataset(prefix) for prefix in options.input]
    if pathlib.Path(options.out).absolute() in [pathlib.Path(prefix).absolute() for prefix in options.input]:
        raise ConfigError(f"--out {options.out} is one of the inputs; pass another")
    for source in sources:
        source.check()
    with IndexedWriter(options.out, sources[0].dtype, overwrite=options.overwrite) as writer:
        for source in sources:
            writer.add_pair(source)
    print(f"{options.out}: {_written(writer)}")


def _merge_shards(prefix: str, out: str, overwrite: bool) -> None:
    merged = merge_shards(prefix, out, overwrite)
    for name, writer in merged.writers.items():
        print(f"{name}: {_written(writer)}")
    print(
        f"{counted(merged.shards, 'shard')} of {counted(merged.sources, 'source')}, {merged.read / 1e6:,.1f} MB of text; "
        f"{merged.bad} bad lines skipped"
    )


def _inspect(arguments: Sequence[str]) -> None:
    parser = _parser("inspect")
    parser.add_argument("prefix", type=local_path, metavar="PREFIX")
    _tokenizer_options(parser, required=False)
    parser.add_argument("--documents", type=whole(low=0), default=3, metavar="COUNT", help="documents to print (3)")
    options = parser.parse_args(arguments)
    dataset = IndexedDataset(options.prefix)
    dataset.check()
    lengths = dataset.lengths
    print(f"{dataset.prefix}: {counted(dataset.document_count, 'document')}, {counted(len(dataset), 'sequence')}")
    print(f"{len(dataset.tokens):,} tokens of {dataset.dtype.name}, {dataset.bin_bytes:,} bytes")
    if len(lengths):
        empty = int((np.diff(dataset.documents) == 0).sum())
        print(f"a sequence has {lengths.min()} to {lengths.max():,} tokens, {lengths.mean():.1f} on average")
        print(f"{counted(empty, 'document')} without a token")
    tokenizer = load_tokenizer(options.tokenizer, options.end_of_document) if options.tokenizer else None
    for number in range(min(options.documents, dataset.document_count)):
        ids = dataset.document(number)
        shown = ids[:SHOWN]
        ends = bool(tokenizer and len(ids) and ids[-1] == tokenizer.end_of_document)
        if tokenizer and ((shown >= 0) & (shown < tokenizer.vocabulary)).all():
            text = repr(tokenizer.decode(shown)[:SHOWN])
        else:
            text = " ".join(map(str, shown[:20].tolist()))
            text += f" (ids outside the {tokenizer.vocabulary} of the tokenizer)" if tokenizer else ""
        print(f"\ndocument {number}: {counted(len(ids), 'token')}{', including the end of document' * ends}\n{text}")


def _verify(arguments: Sequence[str]) -> None:
    parser = _parser("verify")
    parser.add_argument("prefix", type=local_path, metavar="PREFIX")
    _tokenizer_options(parser, required=True)
    options = parser.parse_args(arguments)
    tokenizer = load_tokenizer(options.tokenizer, options.end_of_document)
    dataset = IndexedDataset(options.prefix)
    dataset.check()
    dataset.check_tokens(tokenizer.vocabulary)
    verify_known(options.prefix)
    ends = _documents_with_end(dataset, tokenizer.end_of_document)
    print(
        f"{dataset.prefix}: valid; {counted(dataset.document_count, 'document')}, "
        f"{counted(len(dataset.tokens), 'token id')} below {tokenizer.vocabulary}; "
        f"{ends:,} of the documents end with {tokenizer.name}'s end of document"
    )


def _documents_with_end(dataset: IndexedDataset, end: int) -> int:
    """The number of documents whose last id is `end`."""
    last = np.array(dataset.documents[1:][np.diff(dataset.documents) > 0]) - 1
    places = dataset.offsets[last] // dataset.dtype.itemsize + dataset.lengths[last] - 1
    return int((dataset.tokens[places[dataset.lengths[last] > 0]] == end).sum())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())
