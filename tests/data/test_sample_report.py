"""`megajax inspect RUN_DIR --sample N`: the sample that a message names, as the training reads it."""

import dataclasses
import json

import numpy as np
import pytest

from megajax.checkpoint.inspect import main
from megajax.config import ConfigError, DataConfig, OutputConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.config.toml import config_tables, toml_text
from megajax.data.indexed import IndexedWriter
from megajax.data.sample_reader import SampleReader
from megajax.data.sample_report import report_sample
from megajax.data.tokenizers import load_tokenizer
from tests import small

MODEL = dataclasses.replace(small.LLAMA, sequence_length=16, vocabulary=257)
BYTES = load_tokenizer("byte")


def make_run(data: DataConfig, **train) -> RunConfig:
    settings = {"global_batch_size": 4, "steps": 20, "warmup_steps": 1, "validation_batches": 0} | train
    run = RunConfig(MODEL, ParallelConfig(microbatch_size=2), TrainConfig(**settings), data)
    run.validate()
    return run


def documents(tmp_path, *texts: str) -> DataConfig:
    with IndexedWriter(tmp_path / "corpus", np.uint16) as writer:
        for text in texts:
            writer.add_document([*BYTES.encode(text).tolist(), BYTES.end_of_document])
    return DataConfig(tokenizer="byte", data_path=(str(tmp_path / "corpus"),), split="1,0,0")


def test_a_sample_of_datasets_names_its_documents_and_their_tokens(tmp_path):
    texts = ["The first document is this one.", "A second.", "And here, \nthe third of them."]
    run = make_run(documents(tmp_path, *texts))
    for number in range(12):
        lines = report_sample(SampleReader(run, BYTES), number)
        step, microbatch = number // 4 + 1, number % 4 // 2 + 1
        assert lines[0] == f"sample {number} of the run: step {step}, microbatch {microbatch} of 2"
        joined = ""
        for line in [line for line in lines if line.startswith("  from ")]:
            where, _, span = line.removeprefix("  from     ").rpartition(", tokens ")
            assert where.startswith(f"{tmp_path / 'corpus'}: document ")
            first, last = map(int, span.split(" to "))
            ids = [*BYTES.encode(texts[int(where.split()[-1])]).tolist(), BYTES.end_of_document]
            joined += BYTES.decode(ids[first : last + 1])
        [text] = [line for line in lines if line.startswith("  text ")]
        shown = json.loads(text.partition(": ")[2])
        assert joined.startswith(shown)  # whose last token is a label only
        assert "  counts   16 tokens, 16 labels count" in lines
        tokens = [line[11:] for line in lines if line.startswith(("  tokens", " " * 11))]
        assert BYTES.decode([int(word) for word in " ".join(tokens).split()]) == shown


def test_a_packed_row_shows_each_of_its_samples_and_no_padding(tmp_path):
    rows = [
        {"prompt": "ab", "completion": "cd"},
        {"prompt": "e", "completion": "f"},
        {"prompt": "ghijk", "completion": "l"},
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = make_run(DataConfig(tokenizer="byte", sft_data=(str(file),)))
    lines = report_sample(SampleReader(run, BYTES), 0)
    assert [line for line in lines if line.startswith("  from")] == [
        f"  from     {file}: sample {number}" for number in (2, 0, 1)
    ]
    assert [line.partition(": ")[2] for line in lines if line.startswith("  text")] == ['"ghijkl"', '"abcd"', '"ef"']
    assert "  counts   16 tokens, 4 of them padding, 7 labels count" in lines


def test_the_command(tmp_path, capsys):
    file = tmp_path / "text.txt"
    file.write_text("What is this text about?\n" * 40)
    run = make_run(DataConfig(tokenizer="byte", text=str(file)))
    (tmp_path / "config.toml").write_text(toml_text(config_tables(run, OutputConfig(), {}), ""))
    assert main([str(tmp_path), "--sample", "5"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("sample 5 of the run: step 2, microbatch 1 of 2\n  from     the text's tokens ")
    assert out.splitlines() == report_sample(SampleReader(run, BYTES), 5)
    assert main([str(tmp_path), "--sample", "80"]) == 2
    assert capsys.readouterr().err == "error: --sample 80: the run has samples 0 to 79\n"
    assert main([str(tmp_path / "none"), "--sample", "1"]) == 2
    assert "has no config.toml: give the directory of a training run for --sample" in capsys.readouterr().err


def test_a_sample_that_the_run_does_not_have(tmp_path):
    with pytest.raises(ConfigError, match="the run has samples 0 to 79"):
        report_sample(SampleReader(make_run(documents(tmp_path, "abc" * 30)), BYTES), -1)
