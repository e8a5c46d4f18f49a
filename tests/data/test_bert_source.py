"""The batches of a BERT's run from its configuration: a text, datasets, blends, and options that BERT does not have."""

import dataclasses

import numpy as np
import pytest

from megajax.config import ConfigError, DataConfig, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.data import preprocess
from megajax.data.bert import BertSamples, WordPieces
from megajax.data.indexed import IndexedDataset
from megajax.data.loader import PADDING
from megajax.data.source import describe, make_loaders
from megajax.data.tokenizers import load_tokenizer
from megajax.models.context import model_shapes

TEXTS = [
    "To be, or not to be. That is the question. Whether it is nobler in the mind to suffer the slings? No.",
    "Once more unto the breach, dear friends! Or close the wall up with our dead. In peace there is nothing.",
    "Now is the winter of our discontent. Made glorious summer by this sun. And all the clouds are buried.",
] * 3


def run_of(batch=8, **data) -> RunConfig:
    model = dataclasses.replace(preset("bert-tiny"), sequence_length=96)
    train = TrainConfig(global_batch_size=batch, steps=3, warmup_steps=0, precision="fp32", validation_batches=1)
    parallel = ParallelConfig(microbatch_size=2, schedule="1f1b")
    return RunConfig(model, parallel, train, DataConfig(**{"tokenizer": "wordpiece"} | data))


def loaders_of(run: RunConfig):
    return make_loaders(run, load_tokenizer(run.data.tokenizer))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    (folder / "text.txt").write_text("\n\n".join(TEXTS))
    for name, texts in {"a": TEXTS, "b": TEXTS[::-1][:6]}.items():
        (folder / f"{name}.txt").write_text("\n".join(texts))
        words = f"--input {folder / name}.txt --out {folder / name} --tokenizer wordpiece --text-documents line"
        assert preprocess.main([*words.split(), "--split-sentences", "--no-end-of-document"]) == 0
    return folder


def test_a_text_gives_batches_of_the_models_shapes(folder):
    run = run_of(text=str(folder / "text.txt"))
    training, validation = loaders_of(run)[0], loaders_of(run)[1]["validation"]
    pieces = WordPieces.from_tokenizer(load_tokenizer("wordpiece"))
    for batch in (training.batch(0), training.batch(16), validation.batch(0)):
        found = {name: (array.shape[2:], array.dtype) for name, array in batch.items()}
        assert found == {name: (one.shape, one.dtype) for name, one in model_shapes(run).batch_shapes().items()}
        lengths = 96 - batch["padding"]
        assert (batch["tokens"][..., 0] == pieces.begin).all() and 10 < lengths.min() < 96
        last = np.take_along_axis(batch["tokens"], lengths[..., None] - 1, -1)
        assert (last == pieces.separator).all()
        assert (batch["weights"].sum(-1) > 0).all() and set(np.unique(batch["types"])) == {0, 1}
    assert describe(training.samples, 24)[0].startswith("the text: ")


def test_a_text_is_repeated_in_another_order_with_other_masks(folder):
    samples = loaders_of(run_of(text=str(folder / "text.txt")))[0].samples
    count = samples.count

    epochs = [[samples.place(epoch * count + i) for i in range(count)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(count)) and epochs[0] != epochs[1]
    again = count + epochs[1].index(epochs[0][0])
    assert (samples.sample(0)["labels"] != samples.sample(again)["labels"]).any()


def test_datasets_are_read_and_blended(folder):
    """One prefix gives `BertSamples` of its share of documents; a blend draws from both by weight."""
    path = str(folder / "a")
    training = loaders_of(run_of(data_path=(path,), split="6,3"))[0]
    pieces = WordPieces.from_tokenizer(load_tokenizer("wordpiece"))
    expected = BertSamples(IndexedDataset(path), (0, 6), 24, 96, 1234, pieces)
    np.testing.assert_array_equal(training.samples.sentences, expected.sentences)
    np.testing.assert_array_equal(training.batch(8)["tokens"][1, 1], expected.sample(11)["tokens"])
    blend = loaders_of(run_of(data_path=("3", path, "1", str(folder / "b")), split="1,1"))[0].samples
    assert blend.drawn.tolist()[0] == pytest.approx(3 * blend.drawn[1], abs=2)
    np.testing.assert_array_equal(blend.sample(0)["tokens"], blend.parts[0].sample(0)["tokens"])
    assert len(describe(blend, 24)) == 2


def test_padding_of_a_smaller_batch_has_no_weight(folder):
    loader = loaders_of(run_of(text=str(folder / "text.txt")))[0].resized(4, 2, 4)
    batch = loader.batch(0)
    assert batch["tokens"].shape == (4, 2, 96) and (batch["sample"][2:] == PADDING).all()
    assert not batch["weights"][2:].any() and batch["weights"][:2].any(-1).all()


def test_without_the_order_head_a_sample_is_one_segment(folder):
    run = run_of(text=str(folder / "text.txt"))
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, output_heads="masked_lm"))
    assert not loaders_of(run)[0].batch(0)["types"].any()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"tokenizer": "byte"}, r"tokenizer byte has no \[CLS\]: BERT needs a vocab.txt"),
        ({"tokenizer": "gpt2"}, r"tokenizer gpt2 has no \[CLS\]"),
        ({"sft_data": ("a.jsonl",)}, "--sft-data is not an option of BERT's samples"),
        ({"reset_attention_mask": True}, "--reset-attention-mask is not an option"),
    ],
)
def test_what_bert_does_not_read_is_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        loaders_of(run_of(**data))


def test_a_seed_of_0_is_refused(folder):
    run = run_of(text=str(folder / "text.txt"))
    with pytest.raises(ConfigError, match="seed = 0, but samples of BERT need a seed of 1"):
        loaders_of(dataclasses.replace(run, train=dataclasses.replace(run.train, seed=0)))
