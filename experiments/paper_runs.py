"""The runs of the tables and figures of 1909.08053, 2104.04473 and 2205.05198, with what the papers print of them.

Figures 11 to 18 of 2104.04473 are runs of its artifact (Megatron-LM's examples/sc21/run_figure_*.sh). The papers draw their
curves without numbers, so those points have no published value, only what the text says of them.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from benchmarks.published.rows import ROWS, equation_3_flops
from megajax.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate.flops import flops_per_step
from megajax.estimate.gpus import GIGA, Gpu, find_gpu

A100 = find_gpu("a100-80gb")
# DGX-2H: 16 GPUs on NVSwitch, 150 GB/s each way, and eight 100 Gb/s adapters (1909.08053 section 5, NVIDIA's datasheets).
# The program of 2019 reached a third of the peak; only ratios are compared.
V100 = Gpu("v100-32gb", "Tesla V100-SXM3-32GB", 34_089_730_048, 900 * GIGA, 16, 150 * GIGA, 6.25 * GIGA, 0.8,
           16 * GIGA, (7, 0), 80, 1.6, 6 << 20, 96 << 10, 450)  # fmt: skip
OLD = {"recompute": "full", "sequence_parallel": False, "vocab_parallel": "tensor"}


@dataclasses.dataclass(frozen=True)
class Point:
    """A run of a table or figure.

    Attributes:
      line: the row of a table, or the curve of a figure.
      x: the place on the curve; the number of GPUs in a table.
      runs: the run, or several if the paper does not say which.
      gpu: the paper's.
      published: as printed, in TFLOP/s per GPU or seconds; None if it is only drawn.
      relative: the published throughput relative to the exhibit's first point, in %; None if it is not printed.
      equation_3: the TFLOP/s include full recomputation, as 2104.04473 counts them.
    """

    line: str
    x: int
    runs: tuple[RunConfig, ...]
    gpu: Gpu = A100
    published: float | None = None
    equation_3: bool = False
    relative: int | None = None

    def flops(self) -> float:
        """FLOPs of a step, as the paper counts them."""
        run = self.runs[0]
        return equation_3_flops(run.model, run.train.global_batch_size) if self.equation_3 else flops_per_step(run)


@dataclasses.dataclass(frozen=True)
class Exhibit:
    """A table or figure: its points, its horizontal axis, what the paper says of it, and the unit of its values."""

    name: str
    title: str
    points: Sequence[Point]
    axis: str = "GPUs"
    says: str = ""
    unit: str = "TFLOP/s per GPU"


def exhibits() -> list[Exhibit]:
    """All of them, in the order of the papers."""
    return [_weak_scaling_1909(), *_tables_2104(), *_meshes_2104(), *_options_2104(), _table_5_2205()]


def _run(model: ModelConfig, batch: int, precision: str = "fp16", **parallel) -> RunConfig:
    run = RunConfig(model, ParallelConfig(**parallel), TrainConfig(global_batch_size=batch, precision=precision))
    run.validate()
    return run


def _weak_scaling_1909() -> Exhibit:
    """Figure 5: 8 samples for each group of model-parallel GPUs; with data parallelism 64 groups, 512 samples."""
    points = []
    models = ((1, "1.2b"), (2, "2.5b"), (4, "4.2b"), (8, "8.3b"))
    for line, data, ratios in (
        ("model parallel", 1, (100, 95, 82, 77)),
        ("model and data parallel", 64, (96, 83, 79, 74)),
    ):
        for (tensor, size), ratio in zip(models, ratios, strict=True):
            options = {"tensor": tensor, "data": data, "microbatch_size": 8, "chunks": 1, "schedule": "1f1b", **OLD}
            run = _run(preset(f"megatron-{size}-2019"), 8 * data, **options)
            points.append(Point(line, tensor * data, (run,), V100, relative=ratio))
    says = "relative to one GPU: 95%, 82% and 77% on 2, 4 and 8 GPUs; 96%, 83%, 79% and 74% on 64 to 512"
    return Exhibit("1909 figure 5", "weak scaling, 1.2B to 8.3B", points, says=says)


def _tables_2104() -> Iterator[Exhibit]:
    """Tables 1 and 2, with the rows that the time model is validated on."""
    for name, title in (
        ("2104 table 1", "weak scaling, 1.7B to 1T"),
        ("2104 table 2", "175B and 530B with PTD-P"),
        ("2104 table 2, ZeRO-3", "175B and 530B with ZeRO-3"),
    ):
        points = []
        for row in ROWS:
            if row.table == name:
                changes = {"zero": row.sharding.zero, "vocab_parallel": "tensor"}
                runs = tuple(_with(run, **changes) for run in row.runs)
                model, gpus = runs[0].model.name, runs[0].parallel.devices
                points.append(Point(model, gpus, runs, A100, row.teraflops, row.equation_3))
        yield Exhibit(name, title, points)


def _with(run: RunConfig, **parallel) -> RunConfig:
    train = dataclasses.replace(run.train, precision="fp16")
    return dataclasses.replace(run, train=train, parallel=dataclasses.replace(run.parallel, **parallel))


def _gpt(layers: int, hidden: int, heads: int) -> ModelConfig:
    return dataclasses.replace(
        preset("gpt3-175b"), name=f"GPT, {layers} x {hidden}", layers=layers, hidden=hidden, heads=heads
    )


def _point(line: str, x: int, model: ModelConfig, batch: int, microbatch: int = 1, **parallel) -> Point:
    """A point of 2104.04473's figures; `parallel` has the sizes and what differs from `OLD`."""
    interleaved = parallel.get("chunks", 1) > 1 or parallel.get("pipe", 1) == 1
    schedule = "interleaved_1f1b" if interleaved else "1f1b"
    options = {**OLD, "microbatch_size": microbatch, "schedule": schedule, "chunks": 1, **parallel}
    return Point(line, x, (_run(model, batch, **options),), A100, None, True)


def _meshes_2104() -> Iterator[Exhibit]:
    """Figures 11 to 15: sizes of pipeline, tensor and data parallelism, and interleaving."""
    yield Exhibit(
        "2104 figure 11",
        "pipeline parallelism, weak scaling",
        [
            _point(f"batch {b}", 8 * p, _gpt(3 * p, 20480, 128), b, tensor=8, pipe=p)
            for b in (8, 128)
            for p in (1, 2, 4, 8)
        ],
        says="a higher batch size scales better, since the bubble is amortised over more microbatches",
    )
    yield Exhibit(
        "2104 figure 12",
        "interleaved and non-interleaved, 175B on 96 GPUs",
        [
            _point(line, b, preset("gpt3-175b"), b, tensor=8, pipe=12, chunks=v)
            for line, v in (("non-interleaved", 1), ("interleaved", 4))
            for b in (12, 24, 36, 48, 60)
        ],
        "batch size",
        "interleaving is faster, by less as the batch grows",
    )
    yield Exhibit(
        "2104 figure 13",
        "tensor against pipeline, 162B on 64 GPUs",
        [
            _point(f"batch {b}", p, _gpt(32, 20480, 128), b, tensor=64 // p, pipe=p)
            for b in (32, 128)
            for p in (2, 4, 8, 16, 32)
        ],
        "pipeline size, 64 / tensor size",
        "the peak is at (8, 8)",
    )
    yield Exhibit(
        "2104 figure 14",
        "data against pipeline, 5.9B on 64 GPUs",
        [
            _point(f"batch {b}", p, _gpt(32, 3840, 32), b, data=64 // p, pipe=p)
            for b in (32, 512)
            for p in (2, 4, 8, 16, 32)
        ],
        "pipeline size, 64 / data size",
        "throughput falls as the pipeline size grows",
    )
    yield Exhibit(
        "2104 figure 15",
        "data against tensor, 5.9B on 64 GPUs",
        [
            _point(f"batch {b}", t, _gpt(32, 3840, 32), b, data=64 // t, tensor=t)
            for b in (32, 128, 512)
            for t in (2, 4, 8, 16, 32)
        ],
        "tensor size, 64 / data size",
        "throughput falls as the tensor size grows, most across hosts",
    )


def _options_2104() -> Iterator[Exhibit]:
    """Figures 16 to 18: microbatch size, recomputation, and sends of each element once."""
    yield Exhibit(
        "2104 figure 16",
        "microbatch size, 91B on 64 GPUs",
        [
            _point(f"batch {b}", m, _gpt(32, 15360, 128), b, m, tensor=8, pipe=8)
            for b in (128, 512)
            for m in (1, 2, 4, 8)
        ],
        "microbatch size",
        "the best microbatch size is 2",
    )
    yield Exhibit(
        "2104 figure 17",
        "activation recomputation, 145B on 128 GPUs",
        [
            _point(line, b, _gpt(80, 12288, 96), b, tensor=8, pipe=16, recompute=mode)
            for line, mode in (("with", "full"), ("without", "none"))
            for b in (1, 2, 4, 8, 16, 32, 64, 128, 256)
        ],
        "batch size",
        "with it up to 33% slower at small batches; large ones fit only with it, up to 2x faster than any without",
        "sequences/s",
    )
    yield Exhibit(
        "2104 figure 18",
        "scatter/gather, interleaved 175B on 96 GPUs",
        [
            _point(line, b, preset("gpt3-175b"), b, tensor=8, pipe=12, chunks=4, sequence_parallel=once)
            for line, once in (("each element once", True), ("unoptimized", False))
            for b in (12, 24, 36, 48, 60)
        ],
        "batch size",
        "up to 11% faster with scatter/gather; megajax sends each element once with sequence parallelism",
    )


def _table_5_2205() -> Exhibit:
    """Seconds of an iteration with full recomputation, and with selective recomputation and sequence parallelism."""
    points = []
    for row in ROWS:
        if row.table == "2205 table 5":
            run = row.runs[0]
            full, present = SECONDS_2205[run.model.name]
            for line, seconds, changes in (
                ("full recomputation", full, {"recompute": "full", "sequence_parallel": False}),
                ("selective, sequence parallel", present, {}),
            ):
                one = _with(run, vocab_parallel="tensor", **changes)
                teraflops = flops_per_step(run) / seconds / run.parallel.devices / 1e12
                points.append(Point(f"{run.model.name}, {line}", run.parallel.devices, (one,), A100, teraflops))
    return Exhibit("2205 table 5", "end to end, in model FLOPs", points)


# 2205.05198 table 5: seconds with full recomputation, and of the present work.
SECONDS_2205 = {
    "22b": (1.42, 1.10),
    "gpt3-175b": (18.13, 13.75),
    "megatron-529.6b": (49.05, 37.83),
    "megatron-1008b": (94.42, 71.49),
}
# 2205.05198 table 4: a layer of the 22B model, milliseconds of forward and backward, by (recompute, sequence parallel).
LAYER_2205 = {
    ("none", False): (7.7, 11.9),
    ("none", True): (7.2, 11.8),
    ("full", False): (7.7, 19.5),
    ("selective", False): (7.7, 13.2),
    ("selective", True): (7.2, 13.1),
}
