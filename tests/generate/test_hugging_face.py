"""Greedy texts of Hugging Face directories against the goldens of transformers (tests/interop/make_golden.py)."""

import json

import numpy as np
import pytest

from megajax.config import ParallelConfig
from megajax.config.sample import SampleConfig
from megajax.generate.__main__ import main
from megajax.generate.decoder import Decoder, DecodeSizes, decoding_run
from megajax.interop.weight_source import HuggingFaceSource
from megajax.runtime.mesh import make_mesh
from tests.generate.test_decoder import tokens_of
from tests.interop.hugging_face import FAMILIES, golden
from tests.interop.make_golden import NEW, PROMPT, tokens

MESHES = [(1, 1, 1), (1, 1, 2), (1, 2, 2), (1, 3, 1)]  # the last one with 1, 2 and 1 layers on its stages
QUICK = (("llama", (1, 2, 2)),)
CASES = [(family, mesh) for family in FAMILIES for mesh in MESHES]


@pytest.mark.parametrize(
    ("family", "mesh"),
    [pytest.param(*case, id=str(case), marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_greedy_tokens_equal_those_of_transformers(family, mesh):
    source = HuggingFaceSource(str(golden(family)))
    data, pipe, tensor = mesh
    run = decoding_run(source.run("fp32"), ParallelConfig(data=data, pipe=pipe, tensor=tensor))
    sizes = DecodeSizes(samples=2, prompt=PROMPT, new=NEW, chunk=5)
    decoder = Decoder(run, make_mesh(run.parallel), sizes, SampleConfig(temperature=0))
    found = tokens_of(decoder, source.load(decoder), list(tokens()[:, :PROMPT].astype(np.int32)))
    np.testing.assert_array_equal(found, np.load(golden(family) / "greedy.npy"))


@pytest.mark.slow
def test_the_command_continues_words(tmp_path, capsys):
    """The golden tokenizer's words are w0, w1, ...; token 2 is w0. (Of a Qwen transformers makes a tokenizer of bytes.)"""
    out = tmp_path / "texts.jsonl"
    prompt = " ".join(f"w{token - 2}" for token in tokens()[0, :PROMPT])
    words = ["--init-from", golden("llama"), "--prompt", prompt, "--temperature", 0, "--new-tokens", 6, "--out", out]
    assert main([str(word) for word in words]) == 0, capsys.readouterr().err
    expected = [f"w{token - 2}" for token in np.load(golden("llama") / "greedy.npy")[0, :6]]
    assert json.loads(out.read_text())["text"].split() == expected
