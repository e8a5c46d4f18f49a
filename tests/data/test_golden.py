"""Files, indices, samples and blends, compared with megatron-core 0.16.1's (see make_golden.py)."""

import itertools
import json
import pathlib

import numpy as np
import pytest

from megajax.config import TrainConfig
from megajax.config.batch_ramp import batch_size, remaining_steps
from megajax.data.blending import Blend, BlendedSamples, blend_order, exhaustive_order, normalised, split_bounds
from megajax.data.gpt_samples import GPTSamples
from megajax.data.indexed import IndexedDataset, IndexedWriter
from megajax.data.loader import Boundaries
from tests.data import make_golden as made

GOLDEN = json.loads(made.GOLDEN.read_text())


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("corpora")
    for name in made.CORPORA:
        with IndexedWriter(folder / name, np.uint16) as writer:
            for sequence in made.corpus(name):
                writer.add_document(sequence, [len(sequence)])
    return folder


def digests(samples) -> list:
    if samples is None:
        return None
    if isinstance(samples, BlendedSamples):
        return [made.digest(samples.dataset), made.digest(samples.place), *map(digests, samples.parts)]
    return [made.digest(array) for array in samples.index]


@pytest.mark.parametrize("dtype", made.DTYPES)
def test_files_of_every_type_are_read_and_written_identically(tmp_path, dtype):
    with IndexedWriter(tmp_path / "ours", dtype) as writer:
        for sequences in made.documents_of(dtype):
            writer.add_document(list(itertools.chain.from_iterable(sequences)), [len(part) for part in sequences])
    assert made.pair_bytes(tmp_path / "ours") == GOLDEN["pairs"][dtype]
    for ending, content in zip(("bin", "idx"), GOLDEN["pairs"][dtype], strict=True):
        (tmp_path / f"theirs.{ending}").write_bytes(bytes.fromhex(content))
    theirs = IndexedDataset(tmp_path / "theirs")
    theirs.check()
    assert theirs.dtype == dtype
    expected = made.documents_of(dtype)
    assert [theirs.document(i).tolist() for i in range(theirs.document_count)] == [sum(part, []) for part in expected]
    assert [theirs.sequence(i).tolist() for i in range(len(theirs))] == sum(expected, [])


def test_modes_and_merged_files_equal_megatrons(tmp_path):
    with IndexedWriter(tmp_path / "modes", np.int32, multimodal=True) as writer:
        for sequences in made.documents_of("int32"):
            lengths = [len(part) for part in sequences]
            writer.add_document(sum(sequences, []), lengths, [length % 2 for length in lengths])
    assert made.pair_bytes(tmp_path / "modes") == GOLDEN["pairs"]["modes"]
    assert IndexedDataset(tmp_path / "modes", multimodal=True).modes.tolist() == [1, 0, 1, 0, 1, 1]
    with IndexedWriter(tmp_path / "one", np.int32) as writer:
        for sequences in made.documents_of("int32"):
            writer.add_document(sum(sequences, []), [len(part) for part in sequences])
    with IndexedWriter(tmp_path / "merged", np.int32) as writer:
        for _ in range(2):
            writer.add_pair(IndexedDataset(tmp_path / "one"))
    assert made.pair_bytes(tmp_path / "merged") == GOLDEN["pairs"]["merged"]


def test_corpora_are_written_as_the_same_files(corpora):
    for name, golden in GOLDEN["corpora"].items():
        raw = [np.frombuffer(bytes.fromhex(part), np.uint8) for part in made.pair_bytes(corpora / name)]
        assert [made.digest(part) for part in raw] == golden


@pytest.mark.parametrize("name", made.CORPORA)
def test_indices_equal_megatrons(corpora, name):
    dataset = IndexedDataset(corpora / name)
    for length, samples, seed in itertools.product(made.SEQUENCE_LENGTHS, made.SAMPLES, made.SEEDS):
        ours = GPTSamples(dataset, (0, len(dataset)), samples, length, seed)
        assert digests(ours) == GOLDEN["indices"][f"{name} {length} {samples} {seed}"], (length, samples, seed)


@pytest.mark.parametrize(("split", "samples"), list(itertools.product(made.SPLITS, (None, 150))))
def test_splits_equal_megatrons(corpora, split, samples):
    blend = Blend.parse([str(corpora / "many")])
    parts = [bounds and blend.samples(bounds, samples, 16, 1234) for bounds in split_bounds(split)]
    assert [digests(part) for part in parts] == GOLDEN["indices"][f"split {split} {samples}"]


@pytest.mark.parametrize("name", [name for name in GOLDEN["short"] if name != "blend"])
def test_splits_shorter_than_a_sample_repeat_their_documents_as_megatrons(corpora, name):
    corpus, split, length, samples, seed = name.split()
    blend = Blend.parse([str(corpora / corpus)])
    parts = [blend.samples(bounds, int(samples), int(length), int(seed)) for bounds in split_bounds(split) if bounds]
    tokens = [np.stack([part.window(i)[:-1] for i in range(int(samples))]).astype(np.int64) for part in parts]
    assert [[digests(part) for part in parts], [made.digest(array) for array in tokens]] == GOLDEN["short"][name]


def test_a_blend_repeats_a_dataset_shorter_than_a_sample_as_megatrons(corpora):
    words = [str(corpora / word) if word in made.CORPORA else word for word in made.BLENDS["weights"]]
    assert digests(Blend.parse(words).samples((0.0, 1.0), 100, 100, 1234)) == GOLDEN["short"]["blend"]


@pytest.mark.parametrize("name", list(GOLDEN["ramps"]))
def test_batch_ramps_equal_megatrons(name):
    """Sizes, number of steps and samples of a run that ends with the first step that reaches its samples."""
    start, increment, samples, batch, steps = map(int, name.split())
    train = TrainConfig(global_batch_size=batch, steps=steps, batch_ramp=(start, increment, samples))
    sizes, consumed = [], 0
    while consumed < steps * batch:
        if len(sizes) % 997 == 0:
            done = len(sizes), consumed
            assert np.add(remaining_steps(train, consumed), (len(sizes), 0)).tolist() == GOLDEN["ramps"][name][:2], done
        sizes.append(batch_size(train, consumed))
        consumed += sizes[-1]
    assert [len(sizes), consumed, made.digest(np.array(sizes, np.int64))] == GOLDEN["ramps"][name]
    assert remaining_steps(train, consumed) == (0, consumed)


@pytest.mark.parametrize("name", made.CORPORA)
def test_samples_and_document_masks_equal_megatrons(corpora, name):
    samples = Blend.parse([str(corpora / name)]).samples((0.0, 1.0), 50, 16, 1234)
    windows = np.stack([samples.window(i) for i in range(50)])
    tokens = windows[:, :-1]
    batch = Boundaries(made.END, reset_positions=True, reset_attention=True, mask_loss=True).arrays(tokens)
    causal = np.tril(np.ones((16, 16), bool))
    seen = causal & (batch["document"][:, :, None] == batch["document"][:, None, :])
    ours = {
        "tokens": tokens.astype(np.int64),
        "labels": windows[:, 1:].astype(np.int64),
        "position_ids": batch["positions"].astype(np.int64),
        "loss_mask": batch["weights"],
        "attention_mask": ~seen[:, None],
    }
    assert {key: made.digest(array) for key, array in ours.items()} == GOLDEN["samples"][name]


@pytest.mark.parametrize("name", list(GOLDEN["orders"]))
def test_orders_of_blends_equal_megatrons(name):
    if name.startswith("all of "):
        ours = exhaustive_order(np.array(json.loads(name.removeprefix("all of "))))
    else:
        weights, size = name.split()
        ours = blend_order(normalised(made.WEIGHTS[weights]), int(size))
    assert [made.digest(array) for array in ours] == GOLDEN["orders"][name]


@pytest.mark.parametrize("name", list(GOLDEN["blends"]))
def test_blends_equal_megatrons(corpora, name):
    words = made.BLENDS[name.split()[0]]
    sizes = json.loads(name[name.index("[") : name.index("]") + 1].replace("None", "null"))
    blend = Blend.parse([str(corpora / word) if word in made.CORPORA else word for word in words])
    if name.endswith("per split"):
        few = Blend.parse([str(corpora / "few")])
        parts = [blend.whole(sizes[0], 16, 1234), few.whole(sizes[1], 16, 1234), None]
    else:
        bounds = split_bounds("1" if "one" in words else "80,10,10")
        parts = [part and blend.samples(part, size, 16, 1234) for part, size in zip(bounds, sizes, strict=True)]
    assert [digests(part) for part in parts] == GOLDEN["blends"][name]
