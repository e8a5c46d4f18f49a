"""Random models in directories as the field's tools write them, against transformers: logits, and greedy texts.

They need torch, and are slow: each example compiles two programs.
"""

import contextlib
import dataclasses
import io
import json
import pathlib
import tempfile

import hypothesis
import numpy as np
import pytest

from megajax.config import ConfigError
from megajax.generate.__main__ import main
from megajax.interop.hugging_face.config import read_config
from megajax.interop.hugging_face.read_model import initial_params
from tests.differential.many import many
from tests.differential.random_models import may_be_refused, models, write_model, write_tokenizer
from tests.interop.hugging_face import logits_of, training_of
from tests.interop.make_golden import LENGTH, tokens

NEW = 8
PROMPTS = ("w20 w21 w22", "w5 w9 w5 w9 w5 w3")
TIE = 1e-4  # of logits: rounding decides between tokens that are nearer


def compare(model) -> None:
    """Raises AssertionError for a difference."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        try:
            write_model(folder, model)
        except Exception:  # a configuration that transformers does not have
            hypothesis.reject()
        write_tokenizer(folder)
        judge = judge_of(folder)
        try:
            logits = our_logits(folder)
        except ConfigError as error:
            assert "\n" not in str(error)
            assert judge is None or may_be_refused(model), error
            return
        assert judge is not None, "transformers does not read it"
        np.testing.assert_allclose(logits, judge_logits(judge), atol=5e-5, rtol=1e-4)
        compare_texts(folder, judge, model["changes"]["generation"] or {})


def judge_of(folder: pathlib.Path):
    """transformers' model; None if it refuses the directory, or if a tensor is missing and drawn at random."""
    import torch
    from transformers import AutoModelForCausalLM

    options = {"attn_implementation": "eager", "dtype": torch.float32, "output_loading_info": True}
    try:
        found, info = AutoModelForCausalLM.from_pretrained(folder, **options)
    except Exception:
        return None
    return None if info["missing_keys"] or info["mismatched_keys"] else found.eval()


def judge_logits(judge) -> np.ndarray:
    import torch

    with torch.no_grad():
        return judge(torch.from_numpy(tokens())).logits.float().numpy()


def our_logits(folder: pathlib.Path) -> np.ndarray:
    found = dataclasses.replace(read_config(folder)[1], sequence_length=LENGTH, dropout=0.0)
    training = training_of(found)
    return logits_of(training, initial_params(str(folder), training))


def compare_texts(folder: pathlib.Path, judge, settings) -> None:
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    words = [
        "--init-from",
        folder,
        "--prompts",
        folder / "prompts.jsonl",
        "--new-tokens",
        NEW,
        "--out",
        folder / "out.jsonl",
    ]
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        code = main([str(word) for word in (*words, "--devices", "cpu:1", "--precision", "fp32")])
    if code:
        assert code == 2 and told.getvalue().count("\n") == 1 and any(name in told.getvalue() for name in settings), (
            told.getvalue()
        )
        return
    found = [json.loads(line)["text"] for line in (folder / "out.jsonl").read_text().splitlines()]
    for text, ours in zip(PROMPTS, found, strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        options = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_scores": True}
        try:
            with torch.no_grad():
                made = judge.generate(**inputs, **options)
        except Exception:  # settings that transformers cannot compute either
            return
        shown = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)  # noqa: E731
        theirs = shown(made.sequences[0])[len(shown(inputs["input_ids"][0])) :]
        best = [score[0].topk(2).values for score in made.scores]
        if min(float(first - second) for first, second in best) > TIE:
            assert ours == theirs, (text, ours, theirs)


@pytest.mark.slow
def test_many_models(capsys):
    pytest.importorskip("torch")
    many(compare, 150, capsys, models())
