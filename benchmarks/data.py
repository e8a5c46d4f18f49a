"""Throughput of data: preprocessing, the sample index, loading and streams, compared with the tokenizer and megatron-core.

python -m benchmarks.data                                     all parts; writes benchmarks/results/data.json
python -m benchmarks.data --only index --documents 1 10       some parts
python -m benchmarks.data --megatron-python VENV/bin/python   with megatron-core, from a venv that has it and torch

Preprocessing is measured in processor seconds of all its processes (start-up, reading, JSON, encoding, passing arrays
between processes, writing): MB of text per second and core, compared with `encode_batch_fast` of the `tokenizers` library on
the same texts, with one single-threaded process on each core. The two are measured in turn; the median of the rounds is
printed. Writers take one document at a time; MB of ids. Times of the index are wall clock, including storing the arrays on
disk.
"""

import gzip
import importlib.resources
import json
import multiprocessing
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.tables import print_table
from megajax.config.options import Parser
from megajax.data.blending import Blend, blend_order
from megajax.data.indexed import HEADER, MAGIC, IndexedDataset, IndexedWriter, pair_paths
from megajax.schedules.arguments import number, whole
from megajax.schedules.errors import command
from megajax.schedules.paths import local_path

SEQUENCE_LENGTH = 2048
PARTS = ("preprocess", "index", "blend", "loader", "stream", "step", "waits")
STREAMED = 2048  # samples


def corpus(path: pathlib.Path, megabytes: int) -> list[str]:
    """Writes about this much of the bundled text as .jsonl, in documents of 500 to 6000 characters; returns them."""
    packaged = importlib.resources.files("megajax.data") / "text" / "corpus.jsonl.gz"
    books = [json.loads(line)["text"] for line in gzip.decompress(packaged.read_bytes()).splitlines()]
    random, texts, size = np.random.RandomState(0), [], 0
    while size < megabytes * 1e6:
        for book in books:
            place = 0
            while place < len(book):
                length = random.randint(500, 6000)
                texts.append(book[place : place + length])
                place += length
        size = sum(len(text.encode()) for text in texts)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def preprocess_rows(folder: pathlib.Path, options) -> list[dict]:
    texts = corpus(folder / "corpus.jsonl", options.megabytes)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    rates: dict[str, list[float]] = {"tokenizers alone": [], "megajax.data.preprocess": []}
    for _ in range(options.rounds):
        rates["tokenizers alone"].append(megabytes / _alone(texts))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = ["--input", folder / "corpus.jsonl", "--out", folder / "out", "--tokenizer", "gpt2", "--overwrite"]
        subprocess.run([sys.executable, "-m", "megajax.data.preprocess", *command], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        rates["megajax.data.preprocess"].append(megabytes / spent)
    median = {name: statistics.median(values) for name, values in rates.items()}
    rows = [
        {"what": name, "MB/s of a core": rate, "share of tokenizers alone": rate / median["tokenizers alone"]}
        for name, rate in median.items()
    ]
    rows.append({"what": "megajax writer", "MB/s of a core": _writer_rate(folder)})
    if options.megatron_python:
        rate = _peer(options, "writer", str(folder / "out"), str(folder / "peer"))["seconds"]
        rows.append({"what": "megatron-core's writer", "MB/s of a core": _ids(folder) / rate})
    return rows


def _alone(texts: list[str]) -> float:
    """Processor seconds of the tokenizer alone: a single-threaded process on each core, in batches of about a block."""
    cores = os.cpu_count() or 1
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        return sum(pool.map(_encode_part, [texts[core::cores] for core in range(cores)]))


def _encode_part(texts: list[str]) -> float:
    from megajax.data.tokenizers import load_tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    inner = load_tokenizer("gpt2").inner
    start = time.process_time()
    for place in range(0, len(texts), 300):
        inner.encode_batch_fast(texts[place : place + 300], add_special_tokens=False)
    return time.process_time() - start


def _ids(folder: pathlib.Path) -> float:
    """MB of ids in the .bin file that preprocessing wrote."""
    return pair_paths(folder / "out")[0].stat().st_size / 1e6


def _writer_rate(folder: pathlib.Path) -> float:
    """MB of ids per second through IndexedWriter, one document at a time, as for megatron-core's builder."""
    source = IndexedDataset(folder / "out")
    start = time.perf_counter()
    with IndexedWriter(folder / "again", source.dtype, overwrite=True) as writer:
        for number in range(source.document_count):
            writer.add_document(source.document(number))
    return _ids(folder) / (time.perf_counter() - start)


def sparse_pair(prefix: pathlib.Path, documents: int) -> None:
    """A .bin and .idx of this number of documents of 1 to 1200 tokens, all 0: the sparse .bin uses no disk space."""
    lengths = np.random.RandomState(0).randint(1, 1200, documents).astype("<i4")
    ends = np.cumsum(lengths, dtype="<i8") * 2
    data, index = pair_paths(prefix)
    with open(index, "wb") as stream:
        stream.write(HEADER.pack(MAGIC, 1, 8, documents, documents + 1))
        for array in (lengths, np.append(0, ends[:-1]).astype("<i8"), np.arange(documents + 1, dtype="<i8")):
            stream.write(array.data)
    with open(data, "wb") as stream:
        stream.truncate(int(ends[-1]))


def _samples(prefix: pathlib.Path, length: int = SEQUENCE_LENGTH):
    """The samples of a pair, whose indices are built and stored, or found again."""
    return Blend.parse([str(prefix)]).samples((0.0, 1.0), None, length, 1234)


def _build_twice(prefix: pathlib.Path) -> dict:
    """Seconds of building the indices, and of finding them again; called in a process of its own."""
    row = {}
    for names in (("seconds", "processor"), ("found again", "found processor")):
        start, begun = time.perf_counter(), time.process_time()
        row["samples"] = _samples(prefix).count
        row |= zip(names, (time.perf_counter() - start, time.process_time() - begun), strict=True)
    return row


def index_rows(folder: pathlib.Path, options) -> list[dict]:
    """Building the three indices; with --megatron-python they are compared with megatron-core's."""
    rows = []
    for millions in options.documents:
        prefix = folder / f"{millions}m"
        sparse_pair(prefix, round(millions * 1e6))
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            row = {"M documents": millions} | pool.apply(_build_twice, (prefix,))
        if options.megatron_python:
            theirs = _peer(options, "index", str(prefix), str(SEQUENCE_LENGTH))
            row |= {f"megatron-core {name}": theirs[name] for name in ("seconds", "processor")}
            row["equal"] = _same_index(folder, prefix)
        rows.append(row)
        for path in [*pair_paths(prefix), *folder.glob("index_cache/*/*"), *prefix.glob("cache/*/*")]:
            path.unlink()
    return rows


def _same_index(folder: pathlib.Path, prefix: pathlib.Path) -> bool:
    theirs = {name: next(prefix.glob(f"cache/*/*{name}_index.npy")) for name in ("document", "sample", "shuffle")}
    ours = {name: next(folder.glob(f"index_cache/*/{name}.npy")) for name in theirs}
    return all(ours[name].read_bytes() == theirs[name].read_bytes() for name in theirs)


def blend_rows(folder: pathlib.Path, options) -> list[dict]:
    """The order of 10 M samples."""
    rows = []
    for datasets in (2, 10, 100):
        weights = np.random.RandomState(0).dirichlet(np.ones(datasets))
        start = time.perf_counter()
        order = blend_order(weights, 10_000_000)
        row = {"datasets": datasets, "seconds for 10 M": time.perf_counter() - start}
        if options.megatron_python:
            np.savez(folder / "order.npz", weights=weights, dataset=order[0], sample=order[1])
            theirs = _peer(options, "blend", str(folder / "order.npz"))
            row |= {"megatron-core": theirs["seconds"], "equal": theirs["equal"]}
        rows.append(row)
    return rows


def loader_rows(folder: pathlib.Path, options) -> list[dict]:
    """Batches of 64 samples of 2048 tokens, from documents of 600 tokens on average, files in memory."""
    from megajax.data.loader import Loader

    prefix = folder / "loaded"
    sparse_pair(prefix, 200_000)
    samples = _samples(prefix)
    loader, batches = Loader(samples, 64, 8, vocabulary=50257), 800
    rates = {"megajax Loader, one thread": _rate(loader.batch, batches)}
    try:
        import grain

        class Source:
            def __len__(self):
                return samples.count

            def __getitem__(self, index):
                return samples.window(index)

        # The time starts with a new iterator: its buffer of 500 elements would distort a short measurement.
        found = iter(grain.MapDataset.source(Source()).batch(64).to_iter_dataset())
        rates["the same windows through grain, its 16 threads"] = _rate(lambda _: next(found), batches)
    except ImportError:
        pass
    if options.megatron_python:
        peer = _peer(options, "loader", str(prefix), str(SEQUENCE_LENGTH), str(batches))
        rates["megatron-core GPTDataset"] = peer["rate"]
    tokens = SEQUENCE_LENGTH / 1e6
    return [{"what": name, "samples/s": rate, "M tokens/s": rate * tokens} for name, rate in rates.items()]


def _rate(batch, count: int) -> float:
    """Samples per second, over `count` batches."""
    start = time.perf_counter()
    for step in range(count):
        batch(64 * step)
    return count * 64 / (time.perf_counter() - start)


def stream_rows(folder: pathlib.Path, options) -> list[dict]:
    """Batches of 64 samples of 2048 tokens of GPT-2's: tokenized as they are read, and from a pair; the first group apart.

    "M tokens of a core" are those per second of processor time, of all processes; "first batch" is a time of the clock.
    """
    from megajax.data.loader import Loader
    from megajax.data.recipe import Recipe
    from megajax.data.sources import TEXTS
    from megajax.data.stream import StreamSamples, parse_stream

    path = folder / "corpus.jsonl"
    corpus(path, options.megabytes)
    words = ["--input", path, "--out", folder / "out", "--tokenizer", "gpt2", "--workers", "2"]
    subprocess.run([sys.executable, "-m", "megajax.data.preprocess", *words], check=True, capture_output=True)
    rows = []
    for workers in (None, 0, 1, 2):
        if workers is None:
            samples = _samples(folder / "out")
        else:
            sources, weights = parse_stream([str(path)], TEXTS, 1)
            samples = StreamSamples(sources, [(0, weights)], SEQUENCE_LENGTH, 1, Recipe("gpt2"), workers, 256)
        loader, begun, start = Loader(samples, 64, 8, vocabulary=50257), _processor(), time.perf_counter()
        loader.batch(0)
        first, start = time.perf_counter() - start, time.perf_counter()
        for consumed in range(64, STREAMED, 64):
            loader.batch(consumed)
        seconds = time.perf_counter() - start
        if workers is not None:
            samples.close()  # its processes' time counts when they have ended
        tokens = STREAMED * SEQUENCE_LENGTH / 1e6
        name = "preprocessed .bin" if workers is None else f"--stream-workers {workers}"
        row = {"what": name, "first batch, s": first, "M tokens/s": tokens * (1 - 64 / STREAMED) / seconds}
        rows.append(row | {"M tokens of a core": tokens / (_processor() - begun)})
    return rows


def _processor() -> float:
    """Processor seconds of this process, and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def step_rows(folder: pathlib.Path, options) -> list[dict]:
    """Time that training steps wait for their batches, with and without prefetching."""
    from megajax.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
    from megajax.data.loader import Loader
    from megajax.data.prefetch import Prefetch, place_batch
    from megajax.runtime.mesh import make_mesh, start_devices

    devices = start_devices("cpu:2")
    import jax

    from megajax.train.step import make_training

    prefix = folder / "stepped"
    sparse_pair(prefix, 200_000)
    model = ModelConfig(layers=4, hidden=256, heads=4, vocabulary=512, sequence_length=256)
    run = RunConfig(
        model, ParallelConfig(data=2, microbatch_size=4), TrainConfig(global_batch_size=16, steps=options.steps)
    )
    samples = _samples(prefix, model.sequence_length)
    training = make_training(run, make_mesh(run.parallel, devices))
    loader, size, rows = Loader(samples, 16, run.microbatches), 16, []
    state = training.init_state()
    with Prefetch(loader, training.batch_sharding) as ahead:
        for name, batch in {
            "prefetched": ahead.batch,
            "read on demand": lambda consumed: place_batch(loader, consumed, training.batch_sharding),
        }.items():
            state, metrics = training.train_step(state, batch(0))  # compiles, and fills the prefetch
            jax.block_until_ready(metrics)
            waits, start = [], time.perf_counter()
            for step in range(1, options.steps + 1):
                requested = time.perf_counter()
                arrays = batch(step * size)
                waits.append(time.perf_counter() - requested)
                state, metrics = training.train_step(state, arrays)
                jax.block_until_ready(metrics)
            total = time.perf_counter() - start
            rows.append({"what": name, "seconds a step": total / options.steps, "waiting": f"{sum(waits) / total:.3%}"})
    return rows


def waits_rows(folder: pathlib.Path, options) -> list[dict]:
    """Time that the steps of the first command's model wait for a stream, and for a pair; the first batch apart."""
    from megajax.config import PRESETS, DataConfig, ParallelConfig, RunConfig, TrainConfig
    from megajax.data.prefetch import Prefetch
    from megajax.data.source import open_data
    from megajax.runtime.mesh import make_mesh, start_devices

    devices = start_devices("cpu:1")
    import jax

    from megajax.train.step import make_training

    path = folder / "corpus.jsonl"
    corpus(path, options.megabytes)
    words = ["--input", path, "--out", folder / "out", "--tokenizer", "byte", "--workers", "2"]
    subprocess.run([sys.executable, "-m", "megajax.data.preprocess", *words], check=True, capture_output=True)
    train = TrainConfig(global_batch_size=16, steps=options.steps + 2, warmup_steps=1, validation_batches=0)
    rows, training = [], None
    for workers in (None, 1, 2):
        source = {"data_path": (str(folder / "out"),), "split": "1,0,0"}
        if workers is not None:
            source = {"stream": (str(path),), "stream_workers": workers}
        run = RunConfig(
            PRESETS["tiny"], ParallelConfig(microbatch_size=4), train, DataConfig(tokenizer="byte", **source)
        )
        training = training or make_training(run, make_mesh(run.parallel, devices))
        data, state, waits, start = open_data(run), training.init_state(), [], time.perf_counter()
        with Prefetch(data.batches, training.batch_sharding) as ahead:
            for step in range(options.steps + 1):
                requested = time.perf_counter()
                batch = ahead.batch(step * train.global_batch_size)
                waits.append(time.perf_counter() - requested)
                state, metrics = training.train_step(state, batch)
                jax.block_until_ready(metrics)
                start = time.perf_counter() if not step else start  # after the compilation
        total = time.perf_counter() - start
        getattr(data.batches, "close", lambda: None)()
        name = "preprocessed .bin" if workers is None else f"--stream-workers {workers}"
        row = {"what": name, "first batch, s": waits[0], "seconds a step": total / options.steps}
        rows.append(row | {"longest wait, s": max(waits[1:]), "waiting": f"{sum(waits[1:]) / total:.3%}"})
    return rows


def _peer(options, *words: str) -> dict:
    """What megatron-core's part of the benchmark answers."""
    script = pathlib.Path(__file__).with_name("data_peer.py")
    command = [options.megatron_python, "-W", "ignore", str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[:4]} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@command
def main(arguments: Sequence[str] | None) -> None:
    """Measures."""
    parser = Parser(description=__doc__)
    parser.renamed = {"--folder": "--directory"}
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run (all)")
    parser.add_argument("--megabytes", type=whole(), default=60, help="of text to preprocess (%(default)s)")
    parser.add_argument("--rounds", type=whole(), default=2, help="of preprocessing (%(default)s)")
    parser.add_argument(
        "--documents", nargs="+", type=number(), default=[1, 10, 100], help="millions to index (1 10 100)"
    )
    parser.add_argument("--steps", type=whole(), default=30, help="of training (%(default)s)")
    parser.add_argument("--megatron-python", help="the Python of a venv with megatron-core and torch")
    parser.add_argument(
        "--directory", type=local_path, help="where files go, 6 GB for 100 M documents (the temporary directory)"
    )
    parser.add_argument("--out", type=local_path, default="benchmarks/results/data.json", help="(%(default)s)")
    options = parser.parse_args(arguments)
    out = pathlib.Path(options.out)
    results = json.loads(out.read_text()) if out.exists() else {}
    for part in options.only:
        with tempfile.TemporaryDirectory(dir=options.directory) as folder:
            results[part] = globals()[f"{part}_rows"](pathlib.Path(folder), options)
        print(f"\n{part}")
        print_table(results[part], ".3g")
        results |= {"command": "python -m benchmarks.data"}
        results |= {"versions": {"numpy": np.__version__, "cores": os.cpu_count()}}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
