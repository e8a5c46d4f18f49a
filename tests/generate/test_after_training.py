"""The text after a training: on the training's own mesh and layout, equal to that of the model without a pipeline."""

import dataclasses
import types

import numpy as np
import pytest

from megajax.config import ConfigError
from megajax.config.sample import SampleConfig
from megajax.generate.after_training import TextSample
from tests import small
from tests.generate.test_decoder import LLAMA, PROMPTS, expected, lively
from tests.train.runs import Letters

ROW = 2  # the prompt that is continued


class Numbers(Letters):
    """A tokenizer of texts like "3 15 7"."""

    def encode(self, text: str) -> np.ndarray:
        return np.array([int(word) for word in text.split()], np.int32)

    encode_prompt = encode

    def decode(self, ids) -> str:
        return " ".join(str(int(token)) for token in ids)

    text = decode


def trainer_of(mesh=(2, 2, 2), model=LLAMA, **layout):
    """What `TextSample` uses of a trainer."""
    run = small.make_run(mesh, model=model, microbatches=2, **layout)
    training = small.training_of(run)
    return types.SimpleNamespace(run=run, mesh=training.mesh, training=training, tokenizer=Numbers())


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"schedule": "zb_v", "chunks": 2, "zero": 3},
        {"chunks": 2, "recompute": "full", "recompute_blocks": 1, "zero": 1},
    ],
    ids=["zb_v zero 3", "interleaved zero 1"],
)
def test_the_text_of_a_training_state(layout):
    trainer = trainer_of(**layout)
    state = types.SimpleNamespace(params=small.place(trainer.training, lively(LLAMA)))
    prompt = Numbers().decode(PROMPTS[ROW])
    text = TextSample(trainer, SampleConfig(prompt, 20, temperature=0))(state)
    assert text == prompt + " " + Numbers().decode(expected(LLAMA, 20)[ROW])


@pytest.mark.slow
def test_a_text_ends_at_the_context_and_says_so():
    model = dataclasses.replace(LLAMA, layers=2)
    trainer = trainer_of((1, 1, 1), model)
    state = types.SimpleNamespace(params=small.place(trainer.training, lively(model)))
    text = TextSample(trainer, SampleConfig(" ".join(["5"] * 90), 20, temperature=0))(state)
    assert text.endswith("\n(stopped after 6 tokens: the context of 96 tokens is full)") and len(text.split()) > 96
    with pytest.raises(ConfigError, match="--prompt: the prompt has 96 tokens, but the model's context is 96"):
        TextSample(trainer, SampleConfig(" ".join(["5"] * 96), 20))
