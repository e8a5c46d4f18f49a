"""Writes golden.json, the results of megatron-core 0.16.1 that test_golden.py compares with. In a separate venv:

    pip install --no-deps megatron-core==0.16.1; pip install torch==2.13.0 numpy packaging   (torch for CPU)
    python -m tests.data.make_golden

Only `main` needs them. Long arrays are stored as their type, shape and SHA-256.
"""

import hashlib
import itertools
import json
import pathlib
import tempfile

import numpy as np

HERE = pathlib.Path(__file__).parent
GOLDEN = HERE / "golden.json"
END, VOCABULARY = 0, 1000
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")
# name: (number of sequences, longest); zeros included. "one" is shorter than most samples: many epochs.
CORPORA = {"many": (500, 40), "few": (30, 90), "one": (1, 70)}
SEQUENCE_LENGTHS = (7, 16, 64)
SAMPLES = (None, 1, 40, 333, 1000)
SEEDS = (1234, 1, 0)
# No split may be empty: megatron-core then counts epochs in an infinite loop.
SPLITS = ("950,30,20", "90,5,5", "100,0,0", "0.7,0.2,0.1", "1,1,1")
# Splits shorter than a sample, whose documents are repeated: corpus, split, sequence length.
SHORT = (("one", "1", 70), ("one", "1", 100), ("one", "1", 1000), ("few", "1", 3000), ("few", "90,5,5", 333))
SHORT_SAMPLES = (1, 2, 3, 7, 40)
WEIGHTS = {
    "paper": [0.5, 0.25, 0.25],
    "equal": [1.0] * 7,
    "uneven": [30.0, 70.0, 1e-3, 5.5],
    "two": [0.3, 0.7],
    "many": [1 / (i + 1) for i in range(40)],
    "tenths": [0.1, 0.2, 0.3, 0.4],
}
BLENDS = {
    "weights": ["0.3", "many", "0.6", "few", "0.1", "one"],
    "alone": ["2", "few"],
    "sizes": ["many", "few", "one"],
}
BLEND_SIZES = ((100, 20, 5), (1000, 33, 1))
# Batch ramps: start, increment, samples, global batch size, steps of it. The first is GPT-3 175B's.
RAMPS = (
    (16, 16, 5_859_375, 1536, 95_367),
    (16, 16, 1_953_125, 256, 10_000),
    (4, 4, 60, 16, 10),
    (1, 1, 37, 7, 11),
    (2, 2, 7, 24, 14),
    (3, 5, 1000, 33, 100),
    (8, 8, 12, 16, 2),
)


def digest(array) -> str:
    array = np.ascontiguousarray(array)
    return f"{array.dtype.name}{list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()[:24]}"


def corpus(name: str) -> list[np.ndarray]:
    """The sequences of a corpus: ids below VOCABULARY, END last, every ninth empty."""
    count, longest = CORPORA[name]
    random = np.random.RandomState(len(name) + count)
    lengths = random.randint(0, longest, count) * (np.arange(count) % 9 != 3) if count > 1 else [longest]
    return [np.append(random.randint(1, VOCABULARY, length - 1), END) if length else [] for length in lengths]


def documents_of(dtype: str):
    """Documents as lists of sequences, for a file of this type: one with two sequences, an empty one, and others."""
    top = 127 if dtype == "int8" else 255
    return [[[1, 2, 3], [4, 5]], [[6]], [], [[7, 8, 9, top]], [[0], [1]]]


def pair_bytes(prefix: str) -> list[str]:
    return [pathlib.Path(f"{prefix}.{end}").read_bytes().hex() for end in ("bin", "idx")]


def write_pairs(folder: str) -> dict:
    """Files of every type, two merged, and one with modes."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    def write(name, dtype, multimodal=False, merge=()):
        prefix = f"{folder}/{name}"
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=getattr(np, dtype), multimodal=multimodal)
        for sequences in [] if merge else documents_of(dtype):
            flat = list(itertools.chain.from_iterable(sequences))
            lengths = [len(sequence) for sequence in sequences]
            modes = [length % 2 for length in lengths] if multimodal else None
            builder.add_document(torch.tensor(flat, dtype=torch.int64), lengths, modes)
        for other in merge:
            builder.add_index(f"{folder}/{other}")
        builder.finalize(f"{prefix}.idx")
        return pair_bytes(prefix)

    pairs = {dtype: write(dtype, dtype) for dtype in DTYPES}
    return pairs | {"modes": write("modes", "int32", True), "merged": write("merged", "int32", False, ("int32",) * 2)}


def write_corpora(folder: str) -> dict:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for name in CORPORA:
        builder = IndexedDatasetBuilder(f"{folder}/{name}.bin", dtype=np.uint16)
        for sequence in corpus(name):
            builder.add_document(torch.tensor(np.array(sequence, np.int64)), [len(sequence)])
        builder.finalize(f"{folder}/{name}.idx")
    return {
        name: [digest(np.frombuffer(bytes.fromhex(part), np.uint8)) for part in pair_bytes(f"{folder}/{name}")]
        for name in CORPORA
    }


PIECES = {"cls": 1, "sep": 2, "mask": 3, "pad": 0}
BERT = {"pairs": (True, 64, 200, 0.1), "one": (False, 24, 60, 0.5), "long": (True, 40, 300, 0.0)}


def continues(token: int) -> bool:
    """Whether a token of the BERT corpus continues a word."""
    return token > 9 and token % 3 == 0


def bert_documents() -> list[list[list[int]]]:
    """Documents of sentences of ids from 4 to 199; some are empty, one has a sentence that is too long."""
    random = np.random.RandomState(5)
    documents = [
        [random.randint(4, 200, random.randint(1, 15)).tolist() for _ in range(random.randint(0, 9))] for _ in range(40)
    ]
    documents[7].append(random.randint(4, 200, 513).tolist())
    return documents


class Tokenizer:
    """The attributes that GPTDataset uses."""

    vocab_size, eod, pad = VOCABULARY, END, -1
    unique_identifiers = {"class": "Tokenizer"}


def config(folder: str, **changes):
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    settings = {
        "random_seed": 1234,
        "sequence_length": 16,
        "tokenizer": Tokenizer(),
        "reset_position_ids": True,
        "reset_attention_mask": True,
        "eod_mask_loss": True,
    }
    return GPTDatasetConfig(**settings | changes)


def build(settings, sizes):
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset

    return BlendedMegatronDatasetBuilder(GPTDataset, list(sizes), lambda: True, settings).build()


def indices(dataset) -> list[str]:
    return [digest(array) for array in (dataset.document_index, dataset.sample_index, dataset.shuffle_index)]


def gpt_indices(folder: str) -> dict:
    """The three indices of every corpus over lengths, samples (so epochs) and seeds; and over splits."""
    golden = {}
    grid = itertools.product(CORPORA, SEQUENCE_LENGTHS, SAMPLES, SEEDS)
    for name, length, samples, seed in grid:
        settings = config(
            folder, blend=([f"{folder}/{name}"], None), split="1", random_seed=seed, sequence_length=length
        )
        golden[f"{name} {length} {samples} {seed}"] = indices(build(settings, (samples, 0, 0))[0])
    for split, samples in itertools.product(SPLITS, (None, 150)):
        settings = config(folder, blend=([f"{folder}/many"], None), split=split)
        built = build(settings, (samples,) * 3)
        golden[f"split {split} {samples}"] = [None if part is None else indices(part) for part in built]
    return golden


def gpt_samples(folder: str) -> dict:
    """Tokens, labels, positions, loss weights and attention mask of the first samples."""
    golden = {}
    for name in CORPORA:
        built = build(config(folder, blend=([f"{folder}/{name}"], None), split="1"), (50, 0, 0))[0]
        samples = [built[i] for i in range(50)]
        keys = ("tokens", "labels", "position_ids", "loss_mask", "attention_mask")
        golden[name] = {key: digest(np.stack([sample[key].numpy() for sample in samples])) for key in keys}
    return golden


def blend_indices() -> dict:
    from megatron.core.datasets.helpers import build_blending_indices, build_exhaustive_blending_indices

    golden = {}
    for name, weights in WEIGHTS.items():
        for size in (1, 10, 3000, 20000):
            dataset, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
            shares = np.array(weights) / np.sum(weights)
            build_blending_indices(dataset, sample, shares, len(weights), size, False)
            golden[f"{name} {size}"] = [digest(dataset), digest(sample)]
    for sizes in ([5, 3, 2], [1, 1000], [10000, 1, 700, 33], [7] * 9, [1] * 20 + [5000]):
        dataset, sample = np.zeros(sum(sizes), np.int16), np.zeros(sum(sizes), np.int64)
        build_exhaustive_blending_indices(dataset, sample, np.array(sizes, np.int64), len(sizes))
        golden[f"all of {sizes}"] = [digest(dataset), digest(sample)]
    return golden


def described(part):
    """The order and every part's indices of a blend, the indices of one dataset, or None."""
    if part is None or not hasattr(part, "datasets"):
        return None if part is None else indices(part)
    return [digest(part.dataset_index), digest(part.dataset_sample_index), *map(indices, part.datasets)]


def located(folder: str, words: list[str]):
    """Prefixes and weights of a blend."""
    prefixes = [f"{folder}/{word}" for word in words if word in CORPORA]
    weights = [float(word) for word in words if word not in CORPORA]
    return prefixes, weights or None


def blends(folder: str) -> dict:
    """Whole blends, by weight and by size, over splits."""
    golden = {}

    for (name, words), sizes in itertools.product(BLENDS.items(), (*BLEND_SIZES, (None,) * 3)):
        if None in sizes and name != "sizes":
            continue
        # The only sequence of "one" is in the training split; megatron-core cannot build an empty split.
        split = "1" if "one" in words else "80,10,10"
        built = build(config(folder, blend=located(folder, words), split=split), sizes)
        golden[f"{name} {list(sizes)}"] = [described(part) for part in built]
        if None not in sizes:
            per_split = [located(folder, words), located(folder, ["few"]), None]
            built = build(config(folder, blend_per_split=per_split), sizes)
            golden[f"{name} {list(sizes)} per split"] = [described(part) for part in built]
    return golden


def short_splits(folder: str) -> dict:
    """Indices and tokens of splits that are shorter than a sample, and a blend with such a dataset."""
    golden = {}
    for (name, split, length), samples, seed in itertools.product(SHORT, SHORT_SAMPLES, SEEDS):
        blend = ([f"{folder}/{name}"], None)
        without = {"reset_attention_mask": False, "create_attention_mask": False}  # the masks take most of the time
        settings = config(folder, blend=blend, split=split, sequence_length=length, random_seed=seed, **without)
        count = len(split.split(","))
        built = build(settings, (samples,) * count + (0,) * (3 - count))[:count]
        tokens = [digest(np.stack([part[i]["tokens"].numpy() for i in range(samples)])) for part in built]
        golden[f"{name} {split} {length} {samples} {seed}"] = [list(map(indices, built)), tokens]
    blend = located(folder, BLENDS["weights"])  # "one" is shorter than a sample of 100 tokens
    golden["blend"] = described(build(config(folder, blend=blend, split="1", sequence_length=100), (100, 0, 0))[0])
    return golden


def ramps() -> dict:
    """Steps and samples of runs with a batch ramp that end with the first step that reaches the samples asked for."""
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    golden = {}
    for start, increment, samples, batch, steps in RAMPS:
        calculator = RampupBatchsizeNumMicroBatchesCalculator(batch, 1, 1, False, 0, start, increment, samples)
        sizes, consumed = [], 0
        while consumed < steps * batch:
            calculator.update(consumed, False)
            sizes.append(calculator.current_global_batch_size)
            consumed += sizes[-1]
        key = " ".join(map(str, (start, increment, samples, batch, steps)))
        golden[key] = [len(sizes), consumed, digest(np.array(sizes, np.int64))]
    return golden


def bert(folder: str) -> dict:
    """The mapping of sentences, and the first samples."""
    import torch
    from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    prefix = f"{folder}/bert"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for sentences in bert_documents():
        flat = list(itertools.chain.from_iterable(sentences))
        builder.add_document(torch.tensor(flat, dtype=torch.int64), [len(sentence) for sentence in sentences])
    builder.finalize(f"{prefix}.idx")

    class WordPieces:
        inv_vocab = {token: f"##{token}" if continues(token) else f"w{token}" for token in range(200)}
        unique_identifiers = {"class": "WordPieces"}

    for name, token in PIECES.items():
        setattr(WordPieces, name, token)
    golden = {}
    for name, (pairs, length, samples, short) in BERT.items():
        settings = BERTMaskedWordPieceDatasetConfig(
            random_seed=1234,
            sequence_length=length,
            blend=([prefix], None),
            split="1",
            tokenizer=WordPieces(),
            masking_probability=0.15,
            short_sequence_probability=short,
            masking_max_ngram=3,
            masking_do_full_word=True,
            masking_do_permutation=False,
            masking_use_longer_ngrams=False,
            masking_use_geometric_distribution=False,
            classification_head=pairs,
        )
        build = BlendedMegatronDatasetBuilder(BERTMaskedWordPieceDataset, [samples, 0, 0], lambda: True, settings).build
        dataset = build()[0]
        drawn = [dataset[i] for i in range(samples)]
        keys = ("text", "types", "loss_mask", "padding_mask", "is_random")
        golden[name] = {key: digest(np.stack([sample[key] for sample in drawn]).astype(np.int64)) for key in keys}
        labels = np.stack([sample["labels"] * sample["loss_mask"] for sample in drawn])
        golden[name] |= {"labels": digest(labels.astype(np.int64)), "index": digest(dataset.sample_index)}
    return golden


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        golden = {"pairs": write_pairs(folder), "corpora": write_corpora(folder)}
        golden |= {"indices": gpt_indices(folder), "samples": gpt_samples(folder), "orders": blend_indices()}
        golden["blends"] = blends(folder)
        golden |= {"bert": bert(folder), "short": short_splits(folder), "ramps": ramps()}
    GOLDEN.write_text(json.dumps(golden, indent=0) + "\n")


if __name__ == "__main__":
    main()
