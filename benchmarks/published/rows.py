"""Published throughputs, as runs that the time model of published programs can predict.

Where a table does not print the microbatch size or the chunks, the row lists the possible values. The fastest of them by
the time model that fits the GPU's memory is used, as its authors would have tuned the run.
"""

import dataclasses
from collections.abc import Iterable

from benchmarks.published.software import (
    DEEPSPEED_2021,
    MEGATRON_2021,
    MEGATRON_2021_DDP,
    MEGATRON_2022,
    MEGATRON_2024,
    Software,
)
from megajax.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate.error_bars import kind_of
from megajax.estimate.flops import flops_per_step
from megajax.estimate.gpus import Gpu, find_gpu
from megajax.estimate.memory import USABLE_SHARE, Sharding

ZERO_3 = "2104 table 2, ZeRO-3"
A100, H100 = find_gpu("a100-80gb"), find_gpu("h100-80gb")
MODEL_22B = ModelConfig(name="22b", layers=48, hidden=6144, heads=64, vocabulary=51200, sequence_length=2048)


@dataclasses.dataclass(frozen=True)
class Row:
    """A measured throughput.

    Attributes:
      table: where it is printed.
      runs: the run, or several candidates if the table does not say.
      gpu: the GPU and its network.
      software: the training program.
      teraflops: TFLOP/s per GPU, as printed or from the printed seconds.
      equation_3: whether that includes full recomputation (2104.04473) or not.
      sharding: what was sharded.
      fitted: whether the time model's constants were fitted to this row.
    """

    table: str
    runs: tuple[RunConfig, ...]
    gpu: Gpu
    software: Software
    teraflops: float
    equation_3: bool = False
    sharding: Sharding = Sharding()
    fitted: bool = False

    @property
    def source(self) -> str:
        """The publication: the first word of `table`."""
        return self.table.split()[0]

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return kind_of(self.runs[0].parallel.context, self.sharding.zero, experts=self.runs[0].model.experts > 0)

    def flops(self) -> float:
        """FLOPs of a step, counted as in the table."""
        run = self.runs[0]
        return equation_3_flops(run.model, run.train.global_batch_size) if self.equation_3 else flops_per_step(run)


def equation_3_flops(model: ModelConfig, batch: int) -> float:
    """FLOPs of a step by 2104.04473 equation 3, which counts a second forward of the blocks (full recomputation).

    96 B s l h^2 (1 + s/(6h) + V/(16lh)). The paper's TFLOP/s and its table 2's days are this over time.
    """
    layers, hidden, tokens = model.layers, model.hidden, model.sequence_length
    relative = 1 + tokens / (6 * hidden) + model.vocabulary / (16 * layers * hidden)
    return 96 * batch * tokens * layers * hidden**2 * relative


def make_run(model: ModelConfig, mesh: tuple[int, int, int], batch: int, microbatch: int, chunks: int, **options):
    """A run on (tensor, pipe, data) = mesh."""
    tensor, pipe, data = mesh
    options = {"schedule": "interleaved_1f1b" if chunks > 1 or pipe == 1 else "1f1b"} | options
    parallel = ParallelConfig(data=data, pipe=pipe, tensor=tensor, chunks=chunks, microbatch_size=microbatch, **options)
    return RunConfig(model, parallel, TrainConfig(global_batch_size=batch))


def _tables_2104() -> Iterable[Row]:
    """2104.04473 table 1 with the microbatch sizes and chunks of its artifact, examples/sc21/run_table_1.sh; and table 2.

    Full recomputation, no sequence parallelism. Table 2 prints microbatches of 1; the 530B's chunks are those of table 1.
    """
    old = {"recompute": "full", "sequence_parallel": False}
    for name, tensor, pipe, data, batch, microbatch, chunks, teraflops in (
        ("megatron-1.7b", 1, 1, 32, 512, 16, 1, 137),
        ("megatron-3.6b", 2, 1, 32, 512, 16, 1, 138),
        ("megatron-7.5b", 4, 1, 32, 512, 16, 1, 142),
        ("megatron-18.4b", 8, 1, 32, 1024, 8, 1, 135),
        ("megatron-39.1b", 8, 2, 32, 1536, 4, 1, 138),
        ("megatron-76.1b", 8, 4, 32, 1792, 2, 3, 140),
        ("megatron-145.6b", 8, 8, 24, 2304, 2, 2, 148),
        ("megatron-310.1b", 8, 16, 15, 2160, 1, 2, 155),
        ("megatron-529.6b", 8, 35, 9, 2520, 1, 3, 163),
        ("megatron-1008b", 8, 64, 6, 3072, 1, 1, 163),
    ):
        run = make_run(preset(name), (tensor, pipe, data), batch, microbatch, chunks, **old)
        software = MEGATRON_2021_DDP if pipe == 1 else MEGATRON_2021
        yield Row("2104 table 1", (run,), A100, software, teraflops, True)
    for name, pipe, batch, choices, rows in (
        ("gpt3-175b", 12, 1536, (1, 2, 4, 8), ((4, 153), (8, 149), (16, 141))),
        ("megatron-529.6b", 35, 2240, (3,), ((2, 171), (4, 167), (8, 159))),
    ):
        for data, teraflops in rows:
            runs = tuple(make_run(preset(name), (8, pipe, data), batch, 1, chunks, **old) for chunks in choices)
            yield Row("2104 table 2", runs, A100, MEGATRON_2021, teraflops, True)


def _zero_3_2104() -> Iterable[Row]:
    """The ZeRO-3 half of 2104.04473 table 2: no model parallelism, full recomputation. The 175B's rows are fitted."""
    for name, batch, rows in (
        ("gpt3-175b", 1536, ((384, 4, 144), (768, 2, 88), (1536, 1, 44))),
        ("megatron-529.6b", 2560, ((640, 4, 138),)),
        ("megatron-529.6b", 2240, ((1120, 2, 98), (2240, 1, 48))),
    ):
        for gpus, microbatch, teraflops in rows:
            run = make_run(preset(name), (1, 1, gpus), batch, microbatch, 1, recompute="full", sequence_parallel=False)
            fitted = name == "gpt3-175b"
            yield Row(ZERO_3, (run,), A100, DEEPSPEED_2021, teraflops, True, Sharding(zero=3), fitted)


def _table_2205() -> Iterable[Row]:
    """2205.05198 table 5, in model FLOPs: selective recomputation and sequence parallelism; and the 530B on 2,240 GPUs."""
    for model, pipe, data, batch, microbatch, chunks, seconds in (
        (MODEL_22B, 1, 1, 4, 4, 1, 1.10),
        (preset("gpt3-175b"), 8, 1, 64, 1, 3, 13.75),
        (preset("megatron-529.6b"), 35, 1, 280, 1, 3, 37.83),
        (preset("megatron-1008b"), 64, 1, 512, 1, 1, 71.49),
        (preset("megatron-529.6b"), 35, 8, 2240, 1, 3, 39.15),
    ):
        run = make_run(model, (8, pipe, data), batch, microbatch, chunks)
        teraflops = flops_per_step(run) / seconds / run.parallel.devices / 1e12
        table = "2205 table 5" if data == 1 else "2205 section 6.3"
        yield Row(table, (run,), A100, MEGATRON_2022, teraflops)


def _table_h100() -> Iterable[Row]:
    """Megatron-LM's README, H100: 48 replicas, 4,096 tokens, a vocabulary of 131,072, distributed optimizer."""
    for name, heads, hidden, layers, tensor, pipe, batch, teraflops in (
        ("1.7b", 16, 2048, 24, 1, 1, 192, 408.8),
        ("7.1b", 32, 4096, 30, 2, 1, 192, 465.9),
        ("16b", 48, 6144, 32, 4, 1, 192, 489.1),
        ("32b", 56, 7168, 48, 8, 1, 192, 459.6),
        ("70b", 64, 8192, 84, 8, 2, 384, 419.7),
        ("119b", 80, 10240, 92, 8, 4, 768, 420.5),
        ("177b", 96, 12288, 96, 8, 6, 1152, 432.8),
        ("314b", 128, 16384, 96, 8, 8, 1536, 474.4),
        ("462b", 144, 18432, 112, 8, 16, 3072, 459.9),
    ):
        model = ModelConfig(
            name=name, layers=layers, hidden=hidden, heads=heads, vocabulary=131072, sequence_length=4096
        )
        runs = tuple(
            make_run(model, (tensor, pipe, 48), batch, microbatch, chunks, schedule="interleaved_1f1b")
            for microbatch in (1, 2, 4)
            for chunks in range(1, layers // pipe + 1)
            if layers % (pipe * chunks) == 0 and (pipe > 1 or chunks == 1) and batch // 48 // microbatch % pipe == 0
        )
        fitting = tuple(run for run in runs if megatron_bytes(run) < USABLE_SHARE * 85e9)
        yield Row(
            "Megatron-LM, H100",
            fitting,
            H100,
            MEGATRON_2024,
            teraflops,
            sharding=Sharding(zero=1),
        )


def megatron_bytes(run: RunConfig) -> float:
    """Memory of Megatron-LM's program on a device.

    2205.05198 table 2 without the scores, with interleaving, and the distributed optimizer's 6 + 12/d bytes a parameter;
    on one stage the fp32 logits too.
    """
    model, parallel = run.model, run.parallel
    rows = parallel.microbatch_size * model.sequence_length
    more = 1 + (parallel.pipe - 1) / (parallel.pipe * parallel.chunks)
    activations = 34 * rows * model.hidden / parallel.tensor * model.layers * more
    logits = 6 * rows * model.vocabulary / parallel.tensor if parallel.pipe == 1 else 0
    table = model.vocabulary * model.hidden
    parameters = ((model.parameters - table) / parallel.pipe + table) / parallel.tensor
    return activations + logits + parameters * (6 + 12 / parallel.data)


ROWS_TO_2024: tuple[Row, ...] = (*_tables_2104(), *_zero_3_2104(), *_table_2205(), *_table_h100())
