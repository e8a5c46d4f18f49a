"""Labelled samples: the columns of each task's files, samples by hand, and mistakes in one line."""

import json

import numpy as np
import pytest

from megajax.config import ConfigError
from megajax.config.tasks import GLUE
from megajax.data.classification import ClassificationSamples, Labelled, read_labelled
from megajax.data.loader import PADDING, RowLoader
from megajax.data.tokenizers import load_tokenizer

# GLUE's headers (gluebenchmark.com), and a row of each file.
TSV = {
    "mnli": (
        "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
        "\tsentence1\tsentence2\tlabel1\tgold_label\n0\t1\t1n\tx\t(\t(\t(\t(\tOne.\tTwo.\tneutral\tneutral\n",
        (["One."], ["Two."], 1),
    ),
    "qqp": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n7\t1\t2\tWhy?\tHow?\t1\n", (["Why?"], ["How?"], 1)),
    "sst2": ("sentence\tlabel\nit 's \"fine \t0\n", (["it 's \"fine "], None, 0)),
    "mrpc": (
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t70\t71\tHe ran .\tHe fled .\r\n",
        (["He ran ."], ["He fled ."], 1),
    ),
    "rte": ("index\tsentence1\tsentence2\tlabel\n0\tNo.\tYes.\tnot_entailment\n", (["No."], ["Yes."], 1)),
}


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("task", GLUE)
def test_the_public_files_of_a_task(task, tmp_path):
    """GLUE's TSV, and the same sample as a row of Hugging Face's dataset."""
    text, (first, second, label) = TSV[task]
    texts = (first,) if second is None else (first, second)
    columns = GLUE[task].columns[0]
    row = dict(zip(columns, (*(one[0] for one in texts), label), strict=True)) | {"idx": 3}
    for path in (written(tmp_path, "a.tsv", text), written(tmp_path, "a.jsonl", json.dumps(row) + "\n")):
        found = read_labelled(task, [path])
        assert found.texts == texts and found.classes.tolist() == [label] and found.undecided == 0


def test_labels_by_name_and_samples_without_one(tmp_path):
    rows = [{"premise": "A", "hypothesis": "B", "label": label} for label in ("contradiction", "-", 2, "0")]
    path = written(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)))
    found = read_labelled("mnli", [path, path])
    assert found.classes.tolist() == [2, 2, 0] * 2 and found.undecided == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "has no samples"),
        ("a.tsv", "sentence\tlabel\n", "has no samples"),
        (
            "a.jsonl",
            '{"text": "A", "label": 1}',
            "has the columns text, label, and --task sst2 needs sentence, label",
        ),
        (
            "a.jsonl",
            '{"sentence": "A", "label": "good"}',
            "has the label 'good', and --task sst2 has 0 or negative, 1 or",
        ),
        ("a.jsonl", '{"sentence": "A", "label": -1}', "has the label -1 (of a test set, whose labels are not public)"),
        ("a.jsonl", '{"sentence": "A", "label": true}', "has the label True"),
        ("a.jsonl", '{"sentence": 7, "label": 1}', "line 1: sentence is no text"),
        ("a.jsonl", '\n["A", 1]', "a.jsonl is one JSON array"),
        ("a.jsonl", '{"sentence": "A", "label": "-"}', "has no sample with a label"),
        ("a.tsv", "sentence\tlabel\nA\t1\t2\n", "line 2 has 3 columns, and the header 2"),
    ],
)
def test_a_mistake_names_the_line(name, text, message, tmp_path):
    with pytest.raises(ConfigError) as error:
        read_labelled("sst2", [written(tmp_path, name, text)])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_samples_by_hand():
    """[CLS] A [SEP] B [SEP], types, padding, and the longest sentence cut."""
    tokenizer = load_tokenizer("wordpiece")
    words = lambda text: tokenizer.encode(text).tolist()  # noqa: E731
    begin, end, padding = (tokenizer.inner.token_to_id(name) for name in ("[CLS]", "[SEP]", "[PAD]"))
    a, b, long = "to be", "or not", "to be or not to be to be or not"
    found = Labelled(([a, long], [b, b]), np.array([1, 0], np.int32), 0)
    samples = ClassificationSamples(found, tokenizer, 12, None, "a file")
    first = samples.row(0)
    tokens = [begin, *words(a), end, *words(b), end]
    assert first["tokens"].tolist() == tokens + [padding] * (12 - len(tokens))
    types = [0] * (2 + len(words(a))) + [1] * (1 + len(words(b)))
    assert first["types"].tolist() == types + [0] * (12 - len(types))
    assert (first["padding"], first["class"], first["weights"]) == (12 - len(tokens), 1, 1)
    second = samples.row(1)
    assert second["tokens"].tolist() == [begin, *words(long)[: 9 - len(words(b))], end, *words(b), end]
    assert second["padding"] == 0 and samples.cut == 1 and "1 of them cut to 12 tokens" in samples.describe(4)
    assert samples.row(2)["weights"] == 0  # after the last one
    rows = RowLoader(samples, 2, 1).rows(np.array([1, PADDING]))
    assert rows["weights"].tolist() == [1, 0] and rows["class"].tolist() == [0, 1]
    with pytest.raises(ConfigError, match="sequence_length = 4 has no room"):
        ClassificationSamples(found, tokenizer, 4, None, "a file")


def test_each_epoch_has_all_samples_in_its_own_order():
    texts = [f"word {number}" for number in range(30)]
    found = Labelled((texts,), np.arange(30, dtype=np.int32), 0)
    samples = ClassificationSamples(found, load_tokenizer("wordpiece"), 16, 1, "a file")
    epochs = [[int(samples.row(30 * epoch + index)["class"]) for index in range(30)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(30)) and epochs[0] != epochs[1]
