"""The planner's output, printed, drawn and as data: the best layouts, with their memory and time part by part."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from megajax.config import ParallelConfig
from megajax.estimate import model_costs
from megajax.estimate.error_bars import PAIRS, ErrorBar, bar_of, comparison_bar
from megajax.plan.best import Found, on_mesh
from megajax.plan.cluster import Cluster
from megajax.plan.compiled import Compiled
from megajax.plan.explain import COMPARED, folded
from megajax.plan.search import (
    MEMORY_MARGIN,
    Candidate,
    Question,
    best_by,
    fitting,
    is_tie,
    order,
    usable_bytes,
)
from megajax.schedules.pictures import picture

# The memory bar's letter for each part of `estimate.memory.bytes_per_device`.
PARTS = {
    "weights": "w",
    "optimizer": "o",
    "gradients": "g",
    "16-bit weights": "h",
    "stash": "s",
    "copies": "c",
    "input to weight gradients": "k",
    "inboxes": "i",
    "workspace": "x",
}
LEGEND = (
    "memory: w weights, o optimizer, g gradients, h 16-bit weights, s stash, c copies, k kept for W, i inboxes, x work"
)
EXPERTS = (
    "experts: FLOPs and times are those of balanced routing; memory has room for all rows that can be on a GPU. A layout's "
    "degree of expert parallelism, if above 1, is at the end of its line, with expert-tensor 1 if it counts tensor ranks, "
    "its dispatch unless that is gather, and the mesh's axes unless they are in the usual order"
)
# The table's columns by name: the heading, and its place in a row.
COLUMNS = {
    "tensor": ("t", "{:>4}"),
    "pipe": ("p", "{:>4}"),
    "data": ("d", "{:>5}"),
    "chunks": ("v", "{:>3}"),
    "microbatch": ("b", "{:>3}"),
    "microbatches": ("m", "{:>5}  "),
    "schedule": ("schedule", "{:<12}"),
    "recompute": ("recompute", "{:<10}"),
    "ZeRO": ("zero", "{:>4}"),
    "step s": ("step s", "{:>9}"),
    "tokens/s": ("tokens/s", "{:>11}"),
    "TFLOP/s": ("TFLOP/s", "{:>8}"),
    "MFU": ("MFU", "{:>7}"),
    "days": ("days", "{:>7}"),
    "bubble": ("bubble", "{:>8}"),
    "comm": ("comm", "{:>6}"),
    "GB": ("GB", "{:>7}"),
}
# What to pass for a layout, as data.
LAYOUT = (
    *("data", "context", "pipe", "tensor", "chunks", "schedule", "microbatch_size", "recompute", "zero"),
    *("vocab_parallel", "attention", "sequence_parallel", "expert", "expert_tensor", "expert_dispatch"),
    *("context_exchange", "axis_order", "pipeline_layout"),
)
SHOWN = ("axis_order", "pipeline_layout")  # in a row where they are not the usual ones
SHORT = {"interleaved_1f1b": "interleaved", "zb_1p_interleaved": "zb_1p", "eager_1f1b": "eager"}


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a search found, of which the best layouts of `top` meshes are shown, for a training on so many tokens."""

    cluster: Cluster
    tokens: float
    found: Found
    top: int

    @property
    def candidates(self) -> Sequence[Candidate]:
        """The layouts that were looked for, those that fit first, the fastest first."""
        return self.found.candidates

    @property
    def question(self) -> Question:
        return self.candidates[0].question

    @functools.cached_property
    def fitting(self) -> list[Candidate]:
        """The layouts that fit, the fastest first."""
        return [one for one in self.candidates if one.fits]

    @property
    def shown(self) -> list[Candidate]:
        """The best layout of each mesh, as many as asked for, the fastest first."""
        return list(best_by(self.fitting, lambda one: one.mesh).values())[: self.top]

    @functools.cached_property
    def compared(self) -> list[Candidate]:
        """The layouts by which the choice is explained: also of the best one's mesh the best with each value of a choice."""
        own = on_mesh(self.question, self.fitting[0].mesh, COMPARED)
        return sorted([*own, *(one for one in self.candidates if one.mesh != own[0].mesh)], key=order)


def memory_bar(memory: dict[str, int], limit: float, width: int = 32) -> str:
    """Bytes by part as letters, `limit` being `width` of them; "." is free memory, and | marks the limit if exceeded."""
    text, reached = "", 0.0
    for part, letter in PARTS.items():
        reached += memory.get(part, 0)
        text += letter * (round(reached / limit * width) - len(text))
    return text.ljust(width, ".") if len(text) <= width else f"{text[:width]}|{text[width:][:width]}"


def table(found: Answer) -> str:
    """The layouts that are shown, as rows with `_marks`."""
    head = "   " + "".join(template.format(short) for short, template in COLUMNS.values()) + "  memory"
    return "\n".join([head, *(_row(number, one, found) for number, one in enumerate(found.shown, 1))])


def cells(one: Candidate, tokens: float) -> dict[str, str]:
    """A timed layout's figures by the names of `COLUMNS`, and the fields that `Question.also` names."""
    parallel, time = one.run.parallel, one.time
    return {
        **{name: str(getattr(parallel, name)) for name in ("tensor", "pipe", "data", "chunks")},
        "microbatch": str(parallel.microbatch_size),
        "microbatches": str(one.run.microbatches),
        "schedule": parallel.schedule,
        "recompute": parallel.recompute,
        "ZeRO": str(parallel.zero),
        **{name: value_text(getattr(parallel, name)) for name in ("context", *one.question.also)},
        "step s": f"{time.total:.2f}",
        "tokens/s": f"{one.tokens_per_second:,.0f}",
        "TFLOP/s": f"{one.teraflops:.0f}",
        "MFU": f"{one.utilisation:.1%}",
        "days": f"{one.days(tokens):.1f}",
        "bubble": f"{time.bubble / time.total:.1%}",
        "comm": f"{time.communication / time.total:.0%}",
        "GB": f"{one.peak / 1e9:.1f}",
    }


def _row(number: int, one: Candidate, found: Answer) -> str:
    """A row, with = for a tie of the fastest, and ! for memory that may not suffice."""
    parallel, texts, plain = one.run.parallel, cells(one, found.tokens), ParallelConfig().axis_order
    texts["schedule"] = SHORT.get(parallel.schedule, parallel.schedule)
    return (
        f"{number:>2}."
        + "".join(template.format(texts[name]) for name, (_, template) in COLUMNS.items())
        + f"  {memory_bar(one.memory, usable_bytes(one.question.gpu))}"
        + (f"  context {parallel.context}, {parallel.context_exchange}" if parallel.context > 1 else "")
        + "  fp8" * (one.run.train.matmul_dtype == "fp8")
        + (f"  expert {parallel.expert}{folded(parallel)}" if parallel.expert > 1 else "")
        + (f", {parallel.expert_dispatch}" if parallel.expert > 1 and parallel.expert_dispatch != "gather" else "")
        + ", fp8" * (one.run.train.expert_dispatch_dtype == "fp8")
        + "  experts fp8" * (one.run.train.expert_matmul_dtype == "fp8")
        + (f"  axes {value_text(parallel.axis_order)}" if parallel.axis_order != plain else "")
        + (f"  layers {parallel.pipeline_layout}" if parallel.pipeline_layout else "")
        + "".join(f"  {name} {texts[name]}" for name in one.question.also if name not in SHOWN)
        + "  =" * is_tie(one, found.fitting[0])
        + "  !" * one.is_tight
    )


def value_text(value: Any) -> str:
    """A value of a layout, as one writes it."""
    return ",".join(value) if isinstance(value, tuple) else str(value)


def shown_parameters(model: Any) -> str:
    """The number of a model's parameters, and of those that a token passes if it has experts."""
    total = model_costs(model).parameters
    active = getattr(model, "active_parameters", total)
    return f"{total / 1e9:.1f}B parameters" + (f" ({active / 1e9:.1f}B for a token)" if active != total else "")


def accuracy(best: Candidate) -> str:
    """How far comparisons and predictions are off, by compiled programs and by published runs."""
    pairs = ", ".join(f"{kind} {bar:.1%}" for kind, bar in PAIRS.items())
    whose, bar = error_bar_of(best)
    tight = f"!: less than {MEMORY_MARGIN:.0%} of the usable memory is free, and predictions were off by as much.\n"
    return (tight if best.question.memory_margin < MEMORY_MARGIN else "") + (
        f"=: within {comparison_bar():.1%} of the fastest, or of one that differs in {pairs}, which is what comparisons of "
        "compiled programs were off by (megajax bench rankings, standing-questions).\n"
        f"Published steps that nothing was fitted to ({whose}: {bar.rows} of {bar.sources} sources) took {bar.bias:+.0%} on "
        f"average, one standard deviation -{bar.faster:.0%} to +{bar.slower:.0%}, of the predicted time (megajax validate)."
    )


def error_bar_of(one: Candidate) -> tuple[str, ErrorBar]:
    """(whose it is, the error bar) of a layout's predicted time."""
    experts = model_costs(one.run.model).experts is not None
    return bar_of(one.question.gpu.family, one.run.parallel, experts)


def answer(found: Answer, compiled: Sequence[Compiled] = ()) -> dict[str, Any]:
    """The question, the size of the search, and the layouts that are shown; if nothing fits, what to pass.

    Those that were compiled have the compiled program's figures too.
    """
    question, gpu, costs = found.question, found.question.gpu, model_costs(found.question.model)
    return {
        "model": question.model.name,
        "parameters": costs.parameters,
        "cluster": found.cluster.name,
        "gpu": gpu.name,
        "gpus": question.gpus,
        "usable_bytes": usable_bytes(gpu),
        "memory_margin": question.memory_margin,
        "global_batch": question.global_batch,
        "sequence_length": costs.sequence_length,
        "precision": question.precision,
        "tokens": found.tokens,
        "software": "megajax",
        "predicted": True,
        "priced_layouts": found.found.priced,
        "layouts": [
            _layout(one, found) | (_compiled(own) if own else {})
            for one, own in itertools.zip_longest(found.shown, compiled)
        ],
    } | ({} if found.fitting else {"remedy": remedy(found.candidates[0])})


def _layout(one: Candidate, found: Answer) -> dict[str, Any]:
    """A timed layout: what to pass, its time, memory and cost."""
    cost = found.cluster.cost(one.question.gpus, one.days(found.tokens))
    return {
        "parallel": {name: getattr(one.run.parallel, name) for name in (*LAYOUT, *one.question.also)},
        "microbatches": one.run.microbatches,
        "matmul_dtype": one.run.train.matmul_dtype or one.run.train.precision,
        "expert_matmul_dtype": one.run.train.expert_matmul_dtype or one.run.train.precision,
        "expert_dispatch_dtype": one.run.train.expert_dispatch_dtype or one.run.train.precision,
        "step_seconds": one.time.total,
        "tokens_per_second": one.tokens_per_second,
        "seconds_by_part": dataclasses.asdict(one.time),
        "error_bar": {
            **dataclasses.asdict(error_bar_of(one)[1]),
            "comparison": comparison_bar(one.run.parallel, found.fitting[0].run.parallel),
        },
        "tie_of_fastest": is_tie(one, found.fitting[0]),
        "teraflops_per_gpu": one.teraflops,
        "mfu": one.utilisation,
        "days": one.days(found.tokens),
        "memory_bytes": one.peak,
        "memory_bytes_by_part": one.memory,
        "memory_is_tight": one.is_tight,
        "cost": {**dataclasses.asdict(cost), "currency": found.cluster.currency},
    }


def _compiled(one: Compiled) -> dict[str, Any]:
    if one.seconds is None:
        return {"compiled": {"failed": one.problem}}
    return {"compiled": {"step_seconds": one.seconds, "memory_bytes": one.peak, "fits": one.fits}}


def heading(found: Answer, seconds: float) -> str:
    """The question, and the size of the search, which took `seconds`."""
    question, gpu = found.question, found.question.gpu
    experts = f"\n{EXPERTS}" if getattr(question.model, "experts", 0) else ""
    return (
        f"{question.model.name}: {shown_parameters(question.model)} on {question.gpus} {gpu.name} "
        f"({usable_bytes(gpu) / 1e9:.0f} of {gpu.memory / 1e9:.0f} GB usable, "
        f"{question.memory_margin:.0%} of it left free), global batch {question.global_batch}, "
        f"{question.precision}, attention {question.resolved_attention}, {found.tokens / 1e9:.0f}B tokens\n"
        f"{found.found.priced} layouts priced, no other can be faster; {seconds:.1f} s. Times are of megajax's program, "
        f"predicted; each mesh with its fastest layout:{experts}"
    )


def smallest(candidates: Sequence[Candidate]) -> str:
    """For a search in which no layout fits: the three smallest ones, and what to pass for one that fits."""
    lines = ["nothing fits; the smallest:"]
    for one in candidates[:3]:
        parallel = one.run.parallel
        limit = one.question.memory_limit
        lines.append(
            f"  tensor {parallel.tensor} pipe {parallel.pipe} data {parallel.data}, {parallel.schedule}, recompute "
            f"{parallel.recompute}: {one.peak / 1e9:.1f} GB of {limit / 1e9:.1f}  {memory_bar(one.memory, limit)}"
        )
    return "\n".join([*lines, remedy(candidates[0])])


def remedy(smallest: Candidate) -> str:
    """What to pass where not even this fits: no margin, more of ZeRO, or more GPUs, for which lean layouts are tried."""
    question = smallest.question
    if smallest.peak <= usable_bytes(question.gpu):
        return "pass --memory-margin 0, if the prediction's error may be ignored"
    schedule = "1f1b" if "1f1b" in question.schedules else question.schedules[0]
    lean = {"microbatches": question.microbatches[:1], "recomputes": question.recomputes[-1:], "schedules": (schedule,)}
    for growth in (1, 2, 4, 8, 16, 32, 64):
        for zero in ((0,), (1, 3)):
            wider = dataclasses.replace(question, gpus=question.gpus * growth, zero=zero, **lean)
            fits = next(fitting(wider), None)
            if fits is not None:
                more = [f"--gpus {wider.gpus}"] if growth > 1 else []
                more += [f"--zero {fits.parallel.zero}"] if fits.parallel.zero not in question.zero else []
                return f"pass {' '.join(more)}"
    return "no layout fits on up to 64 times the GPUs either: pass a smaller --model, or a --gpu with more memory"


def plot(candidates: Sequence[Candidate], path: str) -> None:
    """Draws predicted throughput over mesh shapes, as figures 13 to 15 of 2104.04473, to `path` (.png, .svg or .pdf).

    Each panel shows the fastest layout that fits of each pair of degrees: pipeline by tensor (figure 13), pipeline by data
    (figure 14) and tensor by data (figure 15). The remaining GPUs give the third degree.

    Raises:
      UserError: matplotlib is not installed, or the file cannot be written.
    """
    fitting = [one for one in candidates if one.fits]
    question = candidates[0].question
    shapes = (("pipe", "data"), ("pipe", "tensor"), ("tensor", "data"))
    with picture(path, 470, 660) as figure:
        axes = figure.subplots(3, 1, sharey=True)
        for axis, (x, line) in zip(axes, shapes, strict=True):
            groups = best_by(fitting, lambda one: (getattr(one.run.parallel, line), getattr(one.run.parallel, x)))  # noqa: B023
            for value in sorted({key[0] for key in groups}):
                points = sorted((key[1], one.teraflops) for key, one in groups.items() if key[0] == value)
                axis.plot(*zip(*points, strict=True), marker="o", label=f"{line} {value}")
            sizes = sorted({key[1] for key in groups})
            axis.set_xscale("log", base=2)
            axis.set_xticks(sizes, [str(size) for size in sizes])
            axis.minorticks_off()
            axis.set_ylim(bottom=0)
            axis.set_xlabel(f"{x} size; {({'pipe', 'data', 'tensor'} - {x, line}).pop()} size is what remains")
            axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        axes[1].set_ylabel("predicted model TFLOP/s per GPU, fastest layout of each shape")
        title = f"{question.model.name} on {question.gpus} {question.gpu.name}, global batch {question.global_batch}"
        axes[0].set_title(title)
