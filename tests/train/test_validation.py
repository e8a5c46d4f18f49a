"""The loss of validation sets: the mean over the tokens that count, by a softmax in fp64 without any batches."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from megajax.config import ParallelConfig, RunConfig, TrainConfig
from megajax.data.bert import BertLoader
from megajax.data.bert_text import BertTextSamples
from megajax.data.loader import Boundaries, Loader, RowLoader, TokenSamples
from megajax.data.packing import PackedSamples
from megajax.data.sft import load_answers
from megajax.data.tokenizers import load_tokenizer
from megajax.train.validation import Validation, validation_loss
from tests import small
from tests.train import runs

BATCH = 4
LENGTH = 24


def loader_of_documents(tmp_path):
    """A text whose documents end at every seventh token on average: 9 windows of an epoch, of which two batches are 8."""
    tokens = np.where(runs.TOKENS % 7 == 0, 5, runs.TOKENS)[: 9 * LENGTH + 1]
    return Loader(TokenSamples(tokens, LENGTH, None), BATCH, 2, Boundaries(5, mask_loss=True)), 8


def loader_of_answers(tmp_path):
    """Rows with other numbers of answers' tokens, the last batch only half full."""
    path = tmp_path / "answers.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": "a" * n, "completion": "bc" * (n % 6 + 1)}) + "\n" for n in range(1, 17))
    )
    answers = load_answers((str(path),), load_tokenizer("byte"), None, LENGTH + 1, True)
    samples = PackedSamples(answers, LENGTH, None, 0)
    assert samples.count % BATCH and samples.count > BATCH
    return RowLoader(samples, BATCH, 2), samples.count


def loader_of_masked_words(tmp_path):
    texts = [" ".join(["To be, or not to be. That is the question! Whether it is nobler?"] * n) for n in range(1, 9)]
    samples = BertTextSamples(texts, load_tokenizer("wordpiece"), LENGTH, 3)
    return BertLoader(samples, BATCH, 2), samples.count // BATCH * BATCH


CASES = {
    "--eod-mask-loss": (small.LLAMA, loader_of_documents),
    "packed answers": (small.LLAMA, loader_of_answers),
    "masked words": (dataclasses.replace(small.BERT, output_heads="masked_lm"), loader_of_masked_words),
}


def sums(model_config, rows) -> tuple[float, float]:
    """Loss of all rows, each token's times its weight, and the weights' sum."""
    model, params = small.build_model(model_config, training=False), small.busy_params(model_config)
    batch = {name: array for name, array in rows.items() if name != "sample"}

    @jax.jit
    def logits(params):
        x = model.embed(params["shared"], batch)
        for layer in range(model_config.layers):
            x = model.block(jax.tree.map(lambda a: a[layer], params["blocks"]), x, batch, layer)  # noqa: B023
        return model.logits(params["shared"], x)[..., : model_config.vocabulary]

    scores = np.asarray(logits(params), np.float64)
    likely = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    losses = -np.take_along_axis(likely, batch["labels"][..., None], -1)[..., 0]
    return float((losses * batch["weights"]).sum()), float(batch["weights"].sum(dtype=np.float64))


@pytest.mark.parametrize(
    "name", [name if name == "packed answers" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_the_mean_is_over_the_tokens_that_count(name, tmp_path):
    """Of all the rows of the set's whole batches; batches have other numbers of such tokens."""
    base, make = CASES[name]
    loader, count = make(tmp_path)
    vocabulary = {"packed answers": 257, "masked words": load_tokenizer("wordpiece").vocabulary}.get(
        name, base.vocabulary
    )
    config = dataclasses.replace(base, layers=1, sequence_length=LENGTH, vocabulary=vocabulary)
    train = TrainConfig(global_batch_size=BATCH, validation_batches=99, precision="fp32")
    run = RunConfig(config, ParallelConfig(microbatch_size=2, schedule="1f1b"), train)
    training = small.training_of(run)
    weights = [training.loss_weight(loader.batch(first)) for first in range(0, count, BATCH)]
    assert len(set(weights)) > 1
    loss, weight = sums(config, loader.rows(np.arange(count)))
    state = runs.TrainState(small.place(training, small.busy_params(config)), (), None)
    assert validation_loss(training, state, loader) == pytest.approx(loss / weight, rel=2e-6)


def test_each_set_has_a_line_and_two_values():
    class Fixed:
        run = type("Run", (), {"train": TrainConfig(validation_batches=3, validation_every=5)})
        loss_weight = staticmethod(lambda batch: 1.0)
        evaluate = staticmethod(lambda params, batch: batch)

    class Constant:
        global_batch_size = 2

        def __init__(self, loss):
            self.loss = loss

        def batch(self, start):
            return self.loss + start  # at 0, 2 and 4

    validation = Validation(Fixed, {"books": Constant(1.0), "validation": Constant(0.0)})
    assert [step for step in range(1, 12) if validation.due(step)] == [5, 10]
    scores = validation.run(runs.TrainState({}, (), None), 5)
    assert scores.lines == [
        "validation loss of books 3.0000 per token, perplexity 20.09",
        "validation loss 2.0000 per token, perplexity 7.389",
    ]
    expected = {"validation/books/loss": 3.0, "validation/books/perplexity": np.exp(3), "validation/loss": 2.0}
    assert scores.values == pytest.approx(expected | {"validation/perplexity": np.exp(2)})
