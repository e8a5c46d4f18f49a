"""The batches of a run from its configuration: the data lasts for every step."""

import dataclasses

import numpy as np
import pytest

from experiments import gpt3
from megajax.config import DataConfig, ParallelConfig, RunConfig, TrainConfig
from megajax.data.indexed import IndexedWriter
from megajax.data.ramp import RampedLoader
from megajax.data.source import make_loaders
from megajax.data.tokenizers import load_tokenizer
from tests import small


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    random = np.random.RandomState(0)
    for name in "ab":
        with IndexedWriter(folder / name, np.uint16) as writer:
            for length in random.randint(5, 60, 100):
                writer.add_document(random.randint(0, small.MODEL.vocabulary, length))
    return folder


# 2, 4, 6, ... samples; the last step begins before the run's steps * global_batch_size and ends after them.
RAMPS = [(6, 20, (2, 2, 10)), (8, 5, (2, 2, 9)), (10, 4, (2, 4, 39)), (12, 3, (2, 2, 30)), (8, 5, ())]


@pytest.mark.parametrize("words", [("0.7", "a", "0.3", "b"), ("a",), ("a", "b")], ids=["weights", "one", "sizes"])
@pytest.mark.parametrize(("batch", "steps", "ramp"), RAMPS)
def test_the_data_lasts_for_the_last_batch_of_a_ramp(pairs, words, batch, steps, ramp):
    path = tuple(str(pairs / word) if word in "ab" else word for word in words)
    train = TrainConfig(
        global_batch_size=batch, steps=steps, batch_ramp=ramp, validation_batches=0, precision="fp32", warmup_steps=0
    )
    model = dataclasses.replace(small.MODEL, vocabulary=257)
    parallel = ParallelConfig(microbatch_size=2, schedule="1f1b")
    run = RunConfig(model, parallel, train, DataConfig(data_path=path, split="1"))
    run.validate()
    loader = make_loaders(run, load_tokenizer("byte"))[0]
    loader = RampedLoader(loader, run) if ramp else loader
    consumed, numbers = 0, []
    while consumed < steps * batch:
        numbers += loader.batch(consumed)["sample"].ravel().tolist()
        consumed += loader.at(consumed).global_batch_size
    assert run.total_samples == consumed
    assert [number for number in numbers if number != 2**32 - 1] == list(range(consumed))


@pytest.mark.parametrize("model", [name for name, recipe in gpt3.RECIPES.items() if recipe.get("batch_ramp")])
def test_the_samples_of_a_recipe_are_those_of_its_steps(model):
    """Step by step, with the ramp's formula in Megatron-LM's form."""
    recipe = gpt3.RECIPES[model]
    batch, steps, (start, increment, samples) = (recipe[name] for name in ("global_batch_size", "steps", "batch_ramp"))
    train = TrainConfig(global_batch_size=batch, steps=steps, batch_ramp=(start, increment, samples))
    per_increment, consumed = samples / ((batch - start) // increment), 0
    while consumed <= samples:
        consumed += min(batch, start + int(consumed / per_increment) * increment)
    while consumed < steps * batch:
        consumed += batch
    assert RunConfig(small.MODEL, ParallelConfig(), train).total_samples == consumed
    assert steps * batch <= consumed < (steps + 1) * batch
