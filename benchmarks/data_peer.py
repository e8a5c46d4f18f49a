"""megatron-core's part of benchmarks/data.py, which runs it with the Python of a venv that has it; prints a JSON line."""

import json
import sys
import time

import numpy as np


class Tokenizer:
    """The attributes that GPTDataset needs."""

    vocab_size, eod, pad = 50257, 50256, -1
    unique_identifiers = {"class": "Tokenizer"}


def dataset(prefix: str, length: str):
    """The three indices of one epoch, built and stored as in a training run."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=int(length),
        blend=([prefix], None),
        split="1",
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    start, begun = time.perf_counter(), time.process_time()
    built = BlendedMegatronDatasetBuilder(GPTDataset, [None, 0, 0], lambda: True, config).build()[0]
    return built, {"seconds": time.perf_counter() - start, "processor": time.process_time() - begun}


def index(prefix: str, length: str) -> dict:
    return dataset(prefix, length)[1]


def loader(prefix: str, length: str, batches: str) -> dict:
    """Samples per second of one process, with tensors stacked to batches of 64."""
    import torch

    built = dataset(prefix, length)[0]
    start = time.perf_counter()
    for step in range(int(batches)):
        samples = [built[i] for i in range(64 * step, 64 * step + 64)]
        for name in samples[0]:
            torch.stack([sample[name] for sample in samples])
    return {"rate": int(batches) * 64 / (time.perf_counter() - start)}


def blend(path: str) -> dict:
    from megatron.core.datasets.helpers import build_blending_indices

    ours = np.load(path)
    size, weights = len(ours["dataset"]), ours["weights"]
    found, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
    start = time.perf_counter()
    build_blending_indices(found, sample, weights, len(weights), size, False)
    seconds = time.perf_counter() - start
    equal = np.array_equal(found, ours["dataset"]) and np.array_equal(sample, ours["sample"])
    return {"seconds": seconds, "equal": equal}


def writer(source: str, target: str) -> dict:
    """Seconds to write a dataset again, one document at a time."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    documents = IndexedDataset(source)
    start = time.perf_counter()
    builder = IndexedDatasetBuilder(f"{target}.bin", dtype=np.uint16)
    for number in range(len(documents)):
        builder.add_document(documents[number], [len(documents[number])])
    builder.finalize(f"{target}.idx")
    seconds = time.perf_counter() - start
    for ending in ("bin", "idx"):
        with open(f"{source}.{ending}", "rb") as ours, open(f"{target}.{ending}", "rb") as theirs:
            assert ours.read() == theirs.read(), "the pairs differ"
    return {"seconds": seconds}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
