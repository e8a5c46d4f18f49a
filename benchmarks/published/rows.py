"""Published throughputs (rows.toml), as runs that the time model of published programs can predict.

Where a table does not print the microbatch size or the chunks, the row lists the possible values. The fastest of them by
the time model that fits the GPU's memory is used, as its authors would have tuned the run.
"""

import dataclasses
import itertools
import pathlib
import tomllib
from collections.abc import Iterator
from typing import Any

from benchmarks.published.software import SOFTWARE, Software
from megajax.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate.error_bars import kind_of
from megajax.estimate.flops import flops_per_step
from megajax.estimate.gpus import Gpu, find_gpu
from megajax.estimate.memory import USABLE_SHARE, bytes_per_device
from megajax.estimate.parameters import Sharding

__all__ = ["MODELS", "ROWS", "Row", "equation_3_flops"]

DATA = tomllib.loads(pathlib.Path(__file__).with_name("rows.toml").read_text())
MODELS = {name: ModelConfig(name=name, **fields) for name, fields in DATA["models"].items()}
VARIED = (
    "microbatch_size",
    "chunks",
    "attention",
    "recompute",
)  # fields of a layout of which a row may have several values


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
      fitted: whether constants of programs (`operations.Fitted`) were fitted to this row.
      source: the publication.
      held_out: whether no constant at all is chosen with the rows of its source in view.
    """

    table: str
    runs: tuple[RunConfig, ...]
    gpu: Gpu
    software: Software
    teraflops: float
    equation_3: bool = False
    sharding: Sharding = Sharding()
    fitted: bool = False
    source: str = ""
    held_out: bool = False

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


def _row(fields: dict[str, Any]) -> Row:
    """The row with these fields of a table and of one of its lines."""
    gpu = find_gpu(fields["gpu"])
    gpu = dataclasses.replace(gpu, network_bandwidth=fields.get("network_bandwidth", gpu.network_bandwidth))
    sharding = Sharding(zero=fields.get("sharding", 0), shards=fields.get("shards") or None)
    runs = tuple(_runs(fields, gpu))
    flops, devices = flops_per_step(runs[0]), runs[0].parallel.devices
    if "teraflops" in fields:
        teraflops = fields["teraflops"]
    elif "mfu" in fields:
        teraflops = fields["mfu"] * gpu.peak("bf16") / 1e12
    elif "tokens" in fields:
        teraflops = flops / (fields["batch"] * runs[0].model.sequence_length) * fields["tokens"] / 1e12
    else:
        seconds = fields["seconds"] if "seconds" in fields else fields["batch"] / fields["samples"]
        teraflops = flops / seconds / devices / 1e12
    source = fields.get("source", fields["table"].split()[0])
    flags = (
        fields.get("equation_3", False),
        sharding,
        fields.get("fitted", False),
        source,
        fields.get("held_out", False),
    )
    return Row(fields["table"], runs, gpu, SOFTWARE[fields["software"]], teraflops, *flags)


def _runs(fields: dict[str, Any], gpu: Gpu) -> Iterator[RunConfig]:
    """The candidates of a row that are legal and fit."""
    of = lambda config: {name: fields[name] for name in config.__dataclass_fields__ if name in fields}  # noqa: E731
    model = dataclasses.replace(MODELS.get(fields["model"]) or preset(fields["model"]), **of(ModelConfig))
    layout = {key: tuple(value) if key == "axis_order" else value for key, value in of(ParallelConfig).items()}
    pipe, train = layout.get("pipe", 1), TrainConfig(global_batch_size=fields["batch"])
    if layout.get("chunks") == "all":
        most = model.layers // pipe if pipe > 1 else 1
        layout["chunks"] = [count for count in range(1, most + 1) if model.layers % (pipe * count) == 0]
    listed = [name for name in VARIED if isinstance(layout.get(name), list)]
    for values in itertools.product(*(layout[name] for name in listed)):
        one = layout | dict(zip(listed, values, strict=True))
        one.setdefault("schedule", "interleaved_1f1b" if one.get("chunks", 1) > 1 or pipe == 1 else "1f1b")
        run = RunConfig(model, ParallelConfig(**one), train)
        peak = MEMORY[fields.get("memory")](run)
        legal = one["schedule"] == "1f1b" or run.microbatches % pipe == 0
        if legal and peak <= USABLE_SHARE * gpu.memory:
            yield run


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


# By the field `memory` of a table: bytes of a run on a device.
MEMORY = {None: lambda run: 0, "megatron": megatron_bytes, "megajax": lambda run: sum(bytes_per_device(run).values())}
ROWS = tuple(
    _row(table | dict(zip(table["columns"], line, strict=True))) for table in DATA["tables"] for line in table["rows"]
)
