"""The hand-over from datatrove in docs/data.md: its lines run, and preprocess reads what they write."""

import gzip
import json
import pathlib
import re
import subprocess
import sys

import pytest

from megajax.data.indexed import IndexedDataset
from megajax.data.preprocess import main
from megajax.data.tokenizers import load_tokenizer

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_the_lines_of_the_page(tmp_path, monkeypatch):
    pytest.importorskip("datatrove")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    good = [
        f"Text number {number} is about {number} things, none of which is said twice.\nIt ends." for number in range(20)
    ]
    with gzip.open("raw/a.jsonl.gz", "wt") as file:
        for text in [*good, "the same line\n" * 50]:
            file.write(json.dumps({"text": text}) + "\n")
    (tmp_path / "raw" / "b.jsonl").write_text(json.dumps({"text": "Another file has this text alone."}) + "\n")
    page = (ROOT / "docs/data.md").read_text()
    [code] = re.findall(r"<!-- datatrove: .*? -->\n\n```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "clean.py").write_text(
        f"if __name__ == '__main__':\n    {code.strip().replace(chr(10), chr(10) + '    ')}\n"
    )

    subprocess.run([sys.executable, "clean.py"], check=True, capture_output=True)
    assert main("--input clean/*.jsonl.gz --out corpus --tokenizer byte --workers 1".split()) == 0
    dataset, tokenizer = IndexedDataset("corpus"), load_tokenizer("byte")
    texts = [tokenizer.decode(dataset.document(number)) for number in range(dataset.document_count)]
    assert sorted(texts) == sorted([*good, "Another file has this text alone."])
