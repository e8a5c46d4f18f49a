"""`megajax inspect --sample, --batch, --statistics`: what is shown is what the training reads, of each kind of data."""

import dataclasses
import io
import json
import pathlib
import re

import numpy as np
import pytest
from rich.console import Console

from megajax.checkpoint.inspect import main
from megajax.config import PRESETS, DataConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.config.preference import PreferenceConfig
from megajax.data import corpus_statistics, sample_pages
from megajax.data.preferences import PreferenceBatches, load_preferences
from megajax.data.sample_reader import SampleReader, cells, real_tokens, token_texts
from megajax.data.source import make_loaders
from megajax.data.tokenizers import load_tokenizer
from tests.data.test_sample_report import BYTES, documents, make_run

TEXTS = [f"Document {number} \u00e9\u4e16, of some words. <b>&" + "\n" * (number % 2) for number in range(9)]
ROWS = [
    {"prompt": "ab", "completion": "cd"},
    {"prompt": "e", "completion": "f"},
    {"prompt": "ghijk", "completion": "l"},
]
PAIRS = [{"prompt": f"ask {n}", "chosen": " yes" * n, "rejected": " no"} for n in (1, 2, 3)]


def lines(path: pathlib.Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def kinds(tmp_path):
    """A reader, and the loader of the training, of each kind of data that GPT reads."""
    corpus = documents(tmp_path, *TEXTS)
    masked = dataclasses.replace(corpus, reset_attention_mask=True, eod_mask_loss=True)
    answers = DataConfig(tokenizer="byte", sft_data=(lines(tmp_path / "sft.jsonl", ROWS),))
    plain = DataConfig(tokenizer="byte", text=lines(tmp_path / "text.jsonl", [{"text": text} for text in TEXTS]))
    stream = DataConfig(tokenizer="byte", stream=(plain.text,), stream_workers=0, shuffle_samples=4)
    runs = {"plain": make_run(plain), "pair": make_run(corpus), "masked": make_run(masked), "packed": make_run(answers)}
    return {name: (SampleReader(run, BYTES), make_loaders(run, BYTES)[0]) for name, run in runs.items()} | {
        "stream": (SampleReader(make_run(stream), BYTES), make_loaders(make_run(stream), BYTES)[0])
    }


def test_the_tokens_labels_and_weights_are_those_of_the_training(kinds):
    for name, (reader, loader) in kinds.items():
        for number in range(6):
            row, wanted = reader.row(number), loader.rows(np.array([number]))
            assert {key: array.tolist() for key, array in row.items()} == {
                key: array[0].tolist() for key, array in wanted.items()
            }, name
            found, real = cells(row, BYTES), real_tokens(row)
            inputs = [place for place, cell in enumerate(found) if cell.is_input]
            assert [found[place].token for place in inputs] == row["tokens"][:real].tolist(), name
            labels = [found[place + 1] for place in inputs]  # the cell after an input is its label
            assert [cell.token for cell in labels] == row["labels"][:real].tolist(), name
            assert [cell.weight for cell in labels] == row["weights"][:real].tolist(), name
            if "document" in row:
                assert [found[place].document for place in inputs] == row["document"][:real].tolist()
            assert reader.sources(number)
        reader.close()
        loader.samples.close() if name == "stream" else None


def test_berts_labels_are_at_their_places(tmp_path):
    model = dataclasses.replace(PRESETS["bert-tiny"], sequence_length=64)
    train = TrainConfig(steps=2, warmup_steps=1, global_batch_size=2, validation_batches=0)
    pieces = load_tokenizer("wordpiece")
    text = [{"text": " ".join(f"The {word} of {word} was told. It is of the king." for word in "abcdefgh")}] * 4
    data = DataConfig(tokenizer="wordpiece", text=lines(tmp_path / "text.jsonl", text))
    run = RunConfig(model, ParallelConfig(), train, data)
    row = SampleReader(run, pieces).row(1)
    found, real = cells(row, pieces), real_tokens(row)
    assert [cell.token for cell in found] == row["tokens"][:real].tolist() and all(cell.is_input for cell in found)
    assert [cell.weight for cell in found] == row["weights"][:real].tolist()
    assert [cell.document for cell in found] == row["types"][:real].tolist()
    wanted = {place: cell.wanted for place, cell in enumerate(found) if cell.wanted is not None}
    assert list(wanted) == np.flatnonzero(row["weights"]).tolist() and wanted
    assert all(text == token_texts([row["labels"][place]], pieces)[0] for place, text in wanted.items())


def test_a_run_of_preferences_shows_its_completions(tmp_path):
    file = lines(tmp_path / "pairs.jsonl", PAIRS)
    (tmp_path / "preference.json").write_text(json.dumps(dataclasses.asdict(PreferenceConfig(pairs=(file,)))))
    run = make_run(DataConfig(tokenizer="byte"))
    pairs, _ = load_preferences((file,), BYTES, None, 16)
    batches = PreferenceBatches(pairs, (2, 2), 16, run.train.seed)
    reader = SampleReader(run, BYTES, tmp_path / "preference.json")
    for step in (1, 2):
        batch = batches.batch(4 * (step - 1))
        for place, number in enumerate(reader.numbers(step)):
            row = reader.row(number)
            assert all(
                (row[name] == batch[name].reshape(4, 16)[place]).all() for name in ("tokens", "labels", "weights")
            )
            assert reader.sources(number)[0].endswith(("chosen", "rejected")[number % 2])


@pytest.mark.parametrize("name", ["gpt2", "byte", "wordpiece"])
def test_texts_of_tokens_are_the_text(name):
    tokenizer = load_tokenizer(name)
    text = "a caf\u00e9, \u4e16\u754c \U0001f600 and  spaces\n\nx"
    ids = tokenizer.encode(text).tolist()
    assert "".join(token_texts(ids, tokenizer)) == tokenizer.decode(ids)
    ends = token_texts([*ids, tokenizer.end_of_document, *ids], tokenizer)
    assert (
        ends[len(ids)] in ("<|endoftext|>", "<end of document>", "[SEP]") and ends[: len(ids)] == ends[len(ids) + 1 :]
    )


def test_the_page_needs_nothing_else_and_the_terminal_has_the_same_text(kinds):
    reader, _ = kinds["masked"]
    samples = list(sample_pages.shown(reader, range(4)))
    page = sample_pages.page(samples, "a <run>")
    assert "a &lt;run&gt;" in page and not re.search(r"https?:|src=|@import|<script|<b>&<", page)
    spans = re.findall(r'<span class="([\w ]+)" title="token (\d+), document (\d+), [^"]*">', page)
    assert [int(token) for _, token, _ in spans] == [cell.token for sample in samples for cell in sample.cells]
    assert {kinds.split()[0] for kinds, _, _ in spans} == {"learnt", "masked", "input"}
    out = io.StringIO()
    sample_pages.print_samples(samples, Console(file=out, force_terminal=True, width=400, color_system="truecolor"))
    printed = out.getvalue()
    assert all(sample.title in printed for sample in samples) and "\x1b[1;32m" in printed


def test_statistics_by_hand(tmp_path):
    found = corpus_statistics.corpus_statistics(make_run(documents(tmp_path, *TEXTS)), BYTES)[0]
    sizes = [len(text.encode()) for text in TEXTS]
    assert found.lengths.tolist() == [size + 1 for size in sizes]
    assert (found.tokens, found.size, found.words) == (sum(sizes), sum(sizes), sum(len(one.split()) for one in TEXTS))
    row = corpus_statistics.table_rows([found])[0]
    assert row[1:3] == ["9", f"{sum(sizes) + 9:,}"] and row[-1] == "1.000"
    head, line = corpus_statistics.lines([found])
    assert head.split("  ")[0] == "source" and line.startswith(str(tmp_path / "corpus")) and len(head) == len(line)
    file = lines(tmp_path / "sft.jsonl", ROWS)
    answers = corpus_statistics.corpus_statistics(make_run(DataConfig(tokenizer="byte", sft_data=(file,))), BYTES)[0]
    assert answers.lengths.tolist() == [5, 3, 7]


@pytest.mark.slow
def test_statistics_are_drawn(tmp_path):
    found = corpus_statistics.corpus_statistics(make_run(documents(tmp_path, *TEXTS)), BYTES)
    corpus_statistics.draw(found, tmp_path / "a.svg")
    corpus_statistics.draw([*found, *found], tmp_path / "b.svg")
    assert "tokens a word" in (tmp_path / "a.svg").read_text()


def test_the_command_with_options_of_a_training(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    documents(tmp_path, *TEXTS)
    data = "-- --data-path corpus --tokenizer byte --sequence-length 16 --global-batch-size 2 --microbatch-size 1"
    assert main(["--batch", "2", "--html", "batch.html", *data.split()]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("sample")] == [
        f"sample {number} of the run: step 2, microbatch {number - 1} of 2" for number in (2, 3)
    ]
    assert pathlib.Path("batch.html").read_text().count("<section>") == 2
    assert main(["--statistics", "--html", "statistics.html", *data.split()]) == 0
    assert "tokens a word" in capsys.readouterr().out and "<table>" in pathlib.Path("statistics.html").read_text()


WRONG = {
    "": "give a run's directory, or `--` and the options of a training",
    "run --sample 1 -- --text a": "give a run's directory, or `--` and the options of a training - not both",
    "-- --text text.txt": "-- is of --sample N, --batch N or --statistics: pass one of them",
    "run --html a.html": "--html is of --sample N, --batch N or --statistics: pass one of them",
    "run --sample 1 --verify": "--verify is of checkpoints: omit it, or show no data",
    "run --batch 1 --arrays": "--arrays is of checkpoints",
    "run --picture a.svg": "--picture is of --statistics",
    "run --sample 1 --batch 1": "not allowed with argument --sample",
    "run --sample 1 --picture a.svg": "--picture is of --statistics: pass it, or --html for samples",
    "--statistics --picture a.txt -- --text text.txt": "is not the name of a picture: end it in .svg, .png or .pdf",
    "--statistics --picture none/a.svg -- --text text.txt": "there is no folder none",
    "--batch 0 -- --text text.txt": "--batch",
    "--batch 9999 -- --text text.txt": "--batch 9999: the run has the steps 1 to",
    "--batch 1 -- --text text.txt --batch-ramp 2,2,100": "--batch-ramp",
    "--sample 1 --html none/a.html -- --text text.txt": "cannot write none/a.html: No such file or directory; pass another",
    "--statistics -- --stream text.txt": "--statistics are not for --stream: preprocess the texts, and pass the pair",
    "--sample 1 -- --text none.txt": "cannot read none.txt: No such file or directory",
    "--sample 1 -- --data-path none": "cannot read none.idx: No such file or directory",
    "--sample 1 -- --nonsense 4": "there is no option --nonsense",
    "--statistics -- --data-path wrong": "document 0 has an id that tokenizer byte does not have: pass the --tokenizer",
    "run --statistics": "run has no config.toml: give the directory of a training run",
    "--sample 99999999 -- --text text.txt": "--sample 99999999: the run has samples 0 to",
}


def test_wrong_options_are_one_line(tmp_path, monkeypatch, capsys):
    from megajax.data.indexed import IndexedWriter

    monkeypatch.chdir(tmp_path)
    pathlib.Path("text.txt").write_text("some words " * 400)
    pathlib.Path("run").mkdir()
    with IndexedWriter("wrong", np.uint16) as writer:
        writer.add_document([5000, 1])
    small = "--tokenizer byte --sequence-length 16 --vocabulary 257".split()
    for words, message in WRONG.items():
        code = main([*words.split(), *(small if "--" in words.split() else [])])
        out, error = capsys.readouterr()
        assert code == 2 and error.startswith("error: ") and error.count("\n") == 1 and message in error, (words, error)
