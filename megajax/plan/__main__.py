"""Finds the fastest layout of a model on a cluster of GPUs, and explains the choice.

python -m megajax.plan --model gpt3-175b --gpus 1024 --gpu a100-80gb --global-batch 1536
python -m megajax.plan --model gpt3-1t --gpus 3072 --gpu h100-80gb --global-batch 3072 --plot shapes.svg --out plan.toml
"""

import argparse
import dataclasses
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

from megajax.config import ConfigError, ModelConfig, RunConfig, preset
from megajax.config.options import Parser, add_options, option_names
from megajax.config.toml import save_config, toml_text
from megajax.estimate.gpus import GPUS, find_gpu
from megajax.plan.explain import explain
from megajax.plan.report import LEGEND, accuracy, heading, plot, smallest, table
from megajax.plan.search import Candidate, Question, best_by, search
from megajax.plan.ties import simplest_first
from megajax.schedules.arguments import number, plain_text, whole
from megajax.schedules.errors import exit_code
from megajax.schedules.registry import import_user_files, names, search_order

# The search tries every pair of divisors of these; it takes seconds for the largest published clusters and models.
MOST_GPUS, MOST_LAYERS = 10**6, 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Plans; returns the process's exit code: 0, 1 if nothing fits, 2 for invalid options."""
    return exit_code(lambda: _command(arguments))


def _command(arguments: Sequence[str] | None) -> int:
    first = Parser(add_help=False, allow_abbrev=False)
    first.add_argument(
        "--import",
        action="append",
        type=plain_text,
        default=[],
        dest="imports",
        metavar="FILE.py",
        help="a Python file or module to import first, which registers schedules or models (repeatable)",
    )
    import_user_files(first.parse_known_args(arguments)[0].imports)
    return _plan(_parser(first).parse_args(arguments))


def _plan(args: argparse.Namespace) -> int:
    question = question_of(args)
    start = time.perf_counter()
    candidates = search(question)
    fastest = [one for one in candidates if one.fits]
    fitting = simplest_first(fastest)
    seconds = time.perf_counter() - start
    print(heading(question, args.tokens, len(candidates), len(fitting), seconds))
    if not fitting:
        print(smallest(candidates))
        return 1
    shown = list(best_by(fitting, lambda one: one.mesh).values())[: args.top]
    print(table(shown, args.tokens, fastest[0]))
    print(LEGEND)
    print(accuracy(fitting[0]))
    print(explain(fitting + candidates[len(fitting) :]))
    if args.plot:
        plot(candidates, args.plot)
        print(f"drawn: {args.plot}")
    return _write(args, fitting)


def _write(args: argparse.Namespace, fitting: Sequence[Candidate]) -> int:
    """Writes the fastest layout as a configuration file."""
    best = fitting[0]
    command = f"python -m experiments.gpt3 --config {args.out}"
    header = (
        f"{best.run.model.name} on {args.gpus} {args.gpu}: predicted {best.time.total:.2f} s a step, "
        f"{best.utilisation:.1%} MFU, {best.peak / 1e9:.1f} GB a GPU.\n"
        f"{command}"
    )
    # auto stays auto, so that the file is valid on any machine
    parallel = dataclasses.replace(best.run.parallel, attention=args.attention)
    tables = config_sections(dataclasses.replace(best.run, parallel=parallel, imports=tuple(args.imports)), args.model)
    save_config(pathlib.Path(args.out), toml_text(tables, header), "pass --out with a writable path")
    print(f"written: {args.out}   {command}")
    return 0


def config_sections(run: RunConfig, name: str) -> dict[str, dict[str, Any]]:
    """A planned run as sections of a configuration file: the preset, what differs from it, and what the plan decides.

    The experiment's defaults apply to everything else.
    """
    model, base = dataclasses.asdict(run.model), dataclasses.asdict(preset(name))
    return {
        "options": {"model": name} | ({"imports": run.imports} if run.imports else {}),
        "model": {field: value for field, value in model.items() if field != "name" and value != base[field]},
        "parallel": dataclasses.asdict(run.parallel),
        "train": {"global_batch_size": run.train.global_batch_size, "precision": run.train.precision},
    }


def question_of(args: argparse.Namespace) -> Question:
    """The search that the command line asks for.

    Raises:
      ConfigError: an unknown model or GPU, or an invalid number.
    """
    model = preset(args.model)
    changed = {name: value for name, value in vars(args).items() if name in option_names(ModelConfig)}
    for name in changed:
        if not hasattr(model, name):
            raise ConfigError(
                f"{name} = {changed[name]}, but {model.name} has no {name}: omit --{name.replace('_', '-')}."
            )
    if changed:
        model = dataclasses.replace(model, name=f"{model.name}, changed", **changed)
        if model.layers > MOST_LAYERS:
            raise ConfigError(
                f"layers = {model.layers} must be at most {MOST_LAYERS}: pass --layers with such a number."
            )
        if hasattr(model, "validate"):
            model.validate()
    return Question(
        model,
        args.gpus,
        find_gpu(args.gpu),
        args.global_batch,
        precision=args.precision,
        schedules=tuple(args.schedules),
        recomputes=tuple(args.recompute),
        microbatches=tuple(args.microbatch_sizes),
        zero=tuple(args.zero),
        vocab_parallel=args.vocab_parallel,
        attention=args.attention,
    )


def _parser(parent: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m megajax.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[parent],
    )
    add = parser.add_argument
    add(
        "--model",
        required=True,
        type=plain_text,
        metavar="NAME",
        help="preset, as of experiments.gpt3, or one that an --import registers",
    )
    add(
        "--gpus",
        required=True,
        type=whole(below=MOST_GPUS + 1),
        metavar="COUNT",
        help="GPUs of the cluster; all are used",
    )
    add("--gpu", required=True, type=plain_text, metavar="|".join(GPUS), help="kind of GPU")
    add("--global-batch", required=True, type=whole(), metavar="COUNT", help="samples in a step")
    add(
        "--tokens",
        type=number(below=1e18),
        default=300e9,
        metavar="COUNT",
        help="to train on, for the days (default: 300e9)",
    )
    add("--precision", default="bf16", choices=("bf16", "fp16", "fp32"), help="of the matmuls (default: bf16)")
    add("--top", type=whole(), default=10, metavar="COUNT", help="layouts to list (default: 10)")
    add(
        "--out",
        type=plain_text,
        default="plan.toml",
        metavar="FILE",
        help="where the fastest layout is written (default: plan.toml)",
    )
    add("--plot", type=plain_text, metavar="FILE", help="draw throughput over mesh shapes (needs megajax[plot])")
    searched = search_order()
    add(
        "--schedules",
        nargs="+",
        default=searched,
        choices=names(),
        help=f"to choose from (default: {', '.join(searched)})",
    )
    modes = ("none", "selective", "full")
    add("--recompute", nargs="+", default=modes, choices=modes, help="modes to choose from (default: all)")
    add("--microbatch-sizes", nargs="+", type=whole(), default=(1, 2, 4, 8, 16), metavar="COUNT", help="to choose from")
    add(
        "--vocab-parallel",
        default="pipe",
        choices=("pipe", "tensor", "auto"),
        help="devices that share embedding and head: all of pipe * tensor, or each end's tensor group; auto: the better one "
        "for each layout (default: pipe)",
    )
    add(
        "--zero",
        nargs="+",
        type=int,
        default=(0,),
        choices=(0, 1, 3),
        help="levels to choose from: 1 shards optimizer state over replicas, 3 gradients and weights too (default: 0)",
    )
    add(
        "--attention",
        default="auto",
        choices=("auto", "xla", "cudnn", "pallas"),
        help="as of experiments.gpt3: auto is cudnn if the GPU supports it for the model, or pallas or xla (default: auto)",
    )
    add_options(parser, ModelConfig, "model (default: the preset's)")
    return parser


if __name__ == "__main__":
    jax.config.update(
        "jax_platforms", "cpu"
    )  # no GPU is used; without one, the CUDA plugin prints errors when jax starts
    sys.exit(main())
