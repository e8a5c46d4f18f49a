"""Samples from torch's, datasets' and grain's own classes: the batches of a list of them, and a resume from their states."""

import numpy as np
import pytest

from megajax.data.user_samples import Samples, UserSamples, gives_batches
from tests import small
from tests.data.test_user_samples import COUNT, LENGTH, SHAPES, assert_same, batches, make_run, samples

pytestmark = pytest.mark.slow


def rows(number):
    return {name: np.asarray(value) for name, value in samples()[number].items()}


def torch_source(kind):
    torch = pytest.importorskip("torch")

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return COUNT

        def __getitem__(self, number):
            if not 0 <= number < COUNT:
                raise IndexError
            return {name: torch.tensor(value) for name, value in rows(number).items()}

    if kind == "Dataset":
        return Rows()
    return torch.utils.data.DataLoader(Rows(), batch_size=5, num_workers=2 * (kind == "workers"))


def datasets_source(kind):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list([{name: row.tolist() for name, row in rows(n).items()} for n in range(COUNT)])
    return made if kind == "Dataset" else made.to_iterable_dataset(num_shards=4)


def grain_source(kind):
    grain = pytest.importorskip("grain")
    made = grain.MapDataset.range(COUNT).map(rows)
    if kind == "MapDataset":
        return made
    if kind == "batches":
        return made.to_iter_dataset().batch(7)
    sampler = grain.samplers.IndexSampler(COUNT, grain.sharding.NoSharding(), shuffle=False, num_epochs=1, seed=1)
    loader = grain.DataLoader(data_source=samples(), sampler=sampler, worker_count=0)
    return loader if kind == "DataLoader" else made.to_iter_dataset()


SOURCES = {  # with whether they have an index, and a state
    "torch Dataset": (torch_source, "index"),
    "torch DataLoader": (torch_source, ""),
    "torch workers": (torch_source, ""),
    "datasets Dataset": (datasets_source, "index"),
    "datasets IterableDataset": (datasets_source, "state"),
    "grain MapDataset": (grain_source, "index"),
    "grain IterDataset": (grain_source, "state"),
    "grain batches": (grain_source, "state"),
    "grain DataLoader": (grain_source, "state"),
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_librarys_source_is_that_of_a_list_and_continues(name, epochs):
    make, kind = SOURCES[name]
    run, word = make_run(6 * epochs), name.partition(" ")[2]
    assert not gives_batches(make(word))
    wanted = batches(samples(), run, epochs=epochs)
    source = UserSamples(Samples(make(word), epochs=epochs), run, SHAPES)
    assert (source.length == COUNT) == (kind == "index")
    assert_same(batches(source, run), wanted)
    for step in (1, 3, 6, 7, 11)[: 2 + 3 * (epochs > 1)]:
        first = UserSamples(Samples(make(word), epochs=epochs), run, SHAPES)
        for number in range(min(step + 2, 6 * epochs)):
            first.batch(number * small.BATCH)
        stored = first.state(step * small.BATCH)
        assert (stored is not None) == (kind == "state")
        second = UserSamples(Samples(make(word), epochs=epochs), run, SHAPES)
        lines = second.restore(step * small.BATCH, stored)
        assert any("continues" in line for line in lines) == (kind == "state")
        assert_same(batches(second, run, step * small.BATCH), wanted[step:])


def test_tensors_of_16_bits_and_with_gradients():
    torch = pytest.importorskip("torch")
    items = [
        {
            "tokens": torch.zeros(LENGTH, dtype=torch.int64),
            "mask": torch.ones(2, dtype=torch.bfloat16, requires_grad=True),
        }
    ] * COUNT
    assert batches(items)[0]["mask"].dtype == np.float32
