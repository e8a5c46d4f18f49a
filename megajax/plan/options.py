"""The planner's command line: its options, and the question and the clusters that they describe."""

import argparse
import dataclasses
import functools
import os
import pathlib
import pkgutil
from collections.abc import Sequence
from typing import Any

from megajax.config import PRESETS, ConfigError, ModelConfig, ParallelConfig, preset
from megajax.config.errors import divisors
from megajax.config.options import Parser, add_options, option_names
from megajax.estimate import model_costs
from megajax.estimate.gpus import GPUS, find_gpu
from megajax.plan.cluster import Cluster, load_cluster
from megajax.plan.layouts import FIELDS, MOST_CONTEXT
from megajax.plan.search import CHOICES, MEMORY_MARGIN, Question
from megajax.schedules.arguments import number, plain_text, whole
from megajax.schedules.errors import shown
from megajax.schedules.paths import local_path
from megajax.schedules.pictures import picture_file
from megajax.schedules.registry import names, search_order

# The search tries every pair of divisors of these; it takes seconds for the largest published clusters and models.
MOST_GPUS, MOST_LAYERS = 10**6, 1024
# Found by name where --model is a directory: they take a while to import, and no other question needs them.
DIRECTORY, READER = "megajax.data.hub.local_directory", "megajax.interop.hugging_face.config.read_config"


def clusters_of(args: argparse.Namespace) -> list[Cluster]:
    """The clusters that the command line names: one, or those to compare; raises ConfigError if there is none."""
    if args.compare:
        return [load_cluster(path) for path in args.compare]
    if args.cluster:
        return [load_cluster(args.cluster)]
    if not args.gpu:
        raise ConfigError(f"gpu is not given: pass --gpu {'|'.join(GPUS)}, or --cluster FILE.toml.")
    return [Cluster.of_gpu(find_gpu(args.gpu))]


def question_of(args: argparse.Namespace, cluster: Cluster) -> Question:
    """The search that the command line asks for on a cluster; 0 GPUs if it names no number.

    Raises:
      ConfigError: an unknown model or GPU, or an invalid number.
    """
    if args.model is None and args.budget is None:
        raise ConfigError("model is not given: pass --model NAME, or --budget MONEY to be told which.")
    model = model_named(args.model or "tiny")  # with --budget the model is found, and this one replaced
    changed = {name: value for name, value in vars(args).items() if name in option_names(ModelConfig)}
    for name in changed:
        if not hasattr(model, name):
            raise ConfigError(
                f"{name} = {changed[name]}, but {model.name} has no {name}: omit --{name.replace('_', '-')}."
            )
    if changed and args.model is None:
        raise ConfigError(f"{next(iter(changed))} is of a model, which is not given: pass --model NAME with it.")
    if changed:
        model = dataclasses.replace(model, name=f"{model.name}, changed", **changed)
        if model.layers > MOST_LAYERS:
            raise ConfigError(
                f"layers = {model.layers} must be at most {MOST_LAYERS}: pass --layers with such a number."
            )
        if hasattr(model, "validate"):
            model.validate()
    if args.expert:
        _check_expert(model, args.expert)
    names = ("precision", "vocab_parallel", "attention", "memory_margin", "optimizer", "ema_decay", "fp8")
    given = {name: getattr(args, name) for name in names} | {"freeze": tuple(args.freeze)}
    choices = {name: getattr(args, field) for name, field in CHOICES.items()} | {"also": args.search}
    given |= {name: values and tuple(values) for name, values in choices.items()}
    return Question(model, args.gpus or cluster.gpus or 0, cluster.gpu, args.global_batch_size, **given)


def is_directory(name: str) -> bool:
    """Whether --model is a directory, or a name on the Hugging Face Hub, and not a preset."""
    return name not in PRESETS and ("/" in name or os.path.isdir(name))


@functools.cache
def model_named(name: str) -> Any:
    """The preset, or the model of a Hugging Face directory's config.json; raises ConfigError as these do."""
    if not is_directory(name):
        return preset(name)
    directory = pathlib.Path(pkgutil.resolve_name(DIRECTORY)(name, "--model"))
    return pkgutil.resolve_name(READER)(directory)[1]


def _check_expert(model: Any, degrees: Sequence[int]) -> None:
    """Raises ConfigError if a degree of expert parallelism does not divide the model's experts."""
    experts = model_costs(model).experts
    count = experts.choice.count if experts else 1
    wrong = next((degree for degree in degrees if count % degree), None)
    if wrong is None:
        return
    if experts is None:
        raise ConfigError(f"expert = {wrong}, but {model.name} has no experts: omit --expert.")
    legal = " ".join(map(str, sorted(divisors(count))))
    raise ConfigError(f"expert = {wrong} does not divide the {count} experts of {model.name}: pass --expert {legal}.")


def _expert_tensor(text: str) -> int | None:
    """A reader of values of `expert_tensor`."""
    values = {"tensor": None, "1": 1}
    if text not in values:
        raise argparse.ArgumentTypeError(f"{shown(text)} is neither tensor nor 1")
    return values[text]


def plan_parser(parent: argparse.ArgumentParser, description: str) -> argparse.ArgumentParser:
    """The parser of `python -m megajax.plan`; `parent` has the options that are read first."""
    parser = Parser(prog="python -m megajax.plan", description=description, parents=[parent])
    parser.renamed |= {
        "--global-batch": "--global-batch-size",
        "--schedules": "--schedule",
        "--microbatch-sizes": "--microbatch-size",
    }
    add = parser.add_argument
    add(
        "--model",
        type=plain_text,
        metavar="NAME|DIR|ORG/NAME",
        help="preset, as of experiments.gpt3, or one that an --import registers; or a directory with a Hugging Face model's "
        "config.json, or its name on the Hub; with --budget it may be left out",
    )
    add(
        "--gpus",
        type=whole(below=MOST_GPUS + 1),
        metavar="COUNT",
        help="GPUs of the cluster; all are used (default: the cluster file's; with --deadline the fewest)",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpu", type=plain_text, metavar="|".join(GPUS), help="kind of GPU, in its vendor's machines")
    where.add_argument(
        "--cluster", type=local_path, metavar="FILE.toml", help="GPU, links, price and power (docs/planning.md)"
    )
    where.add_argument(
        "--compare", nargs="+", type=local_path, metavar="FILE.toml", help="several clusters, one row for each"
    )
    add("--global-batch-size", required=True, type=whole(), metavar="COUNT", help="samples in a step")
    add(
        "--tokens",
        type=number(below=1e18),
        default=300e9,
        metavar="COUNT",
        help="to train on, for the days (default: 300e9)",
    )
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--budget",
        type=number(),
        metavar="MONEY",
        help="train on the tokens that this pays for; without --model, of the preset nearest to Chinchilla's rule",
    )
    asked.add_argument(
        "--deadline", type=number(below=1e5), metavar="DAYS", help="the fewest GPUs that train on --tokens in time"
    )
    asked.add_argument(
        "--scaling",
        nargs="*",
        type=whole(below=MOST_GPUS + 1),
        metavar="COUNT",
        help="a row for each of these numbers of GPUs, with time, MFU and cost (default: 16, 32, ..., 4096)",
    )
    add("--precision", default="bf16", choices=("bf16", "fp16", "fp32"), help="of the matmuls (default: bf16)")
    add(
        "--optimizer",
        default="adamw",
        choices=("adamw", "lion", "adafactor", "muon"),
        help="whose state takes memory, and whose update time (default: adamw)",
    )
    add(
        "--ema-decay",
        type=number(0, below=1),
        metavar="NUMBER",
        help="of a run that averages its weights, which takes 4 bytes a parameter (default: none)",
    )
    add(
        "--freeze",
        action="append",
        default=[],
        metavar="PATTERN",
        help="parameters that are not trained, as of the training; can be repeated (default: none)",
    )
    _add_output(parser)
    add(
        "--memory-margin",
        type=number(low=0, below=1),
        default=MEMORY_MARGIN,
        metavar="SHARE",
        help="of the usable memory that layouts leave free, as predictions have errors (default: %(default)s)",
    )
    _add_choices(parser)
    add_options(parser, ModelConfig, "model (default: the preset's)")
    return parser


def _add_output(parser: argparse.ArgumentParser) -> None:
    """The options of what is printed and written."""
    add = parser.add_argument
    add("--top", type=whole(), default=10, metavar="COUNT", help="layouts to list (default: 10)")
    add(
        "--out",
        type=local_path,
        default="plan.toml",
        metavar="FILE",
        help="where the fastest layout is written (default: plan.toml)",
    )
    add(
        "--compile",
        type=whole(),
        metavar="COUNT",
        help="compile so many of the rows, a minute or more for each, and write the one whose program is the fastest; it "
        "needs the extra dryrun and no GPU",
    )
    add(
        "--explain",
        nargs="+",
        type=plain_text,
        metavar="t8",
        help="why this layout is not the fastest: sizes such as t8 p16 d8 (letters of the table; c: context, e: expert, z: "
        "zero), a schedule or a recompute mode",
    )
    add("--json", action="store_true", help="print the answer as JSON")
    add("--html", type=local_path, metavar="FILE", help="write the answer as a page for a browser")
    add("--plot", type=picture_file, metavar="FILE", help="draw throughput over mesh shapes (needs megajax[plot])")


def _add_choices(parser: argparse.ArgumentParser) -> None:
    """The options of a layout that the search chooses from."""
    choose, add, searched = functools.partial(parser.add_argument, nargs="+"), parser.add_argument, search_order()
    legal = {name: field.metadata["choices"] for name, field in ParallelConfig.__dataclass_fields__.items()}
    choose("--schedule", default=searched, choices=names(), help=f"to choose from (default: {', '.join(searched)})")
    modes = legal["recompute"]
    choose("--recompute", default=modes, choices=modes, help="modes to choose from (default: all)")
    choose("--microbatch-size", type=whole(), default=(1, 2, 4, 8, 16), metavar="COUNT", help="to choose from")
    add(
        "--vocab-parallel",
        default="auto",
        choices=legal["vocab_parallel"],
        help="devices that share embedding and head: all of pipe * tensor, or each end's tensor group; auto: the better one "
        "for each layout (default: auto)",
    )
    choose(
        "--zero",
        type=int,
        default=legal["zero"],
        choices=legal["zero"],
        help="levels to choose from: 1 shards optimizer state over replicas, 3 gradients and weights too (default: all)",
    )
    choose(
        "--context",
        type=whole(),
        metavar="COUNT",
        help=f"degrees of context parallelism to choose from (default: all up to {MOST_CONTEXT} that the model allows)",
    )
    add(
        "--fp8",
        action="store_true",
        help="also consider blocks' matmuls in 8 bits; of a model with experts theirs, and what is sent to them",
    )
    choose(
        "--expert",
        type=whole(),
        metavar="COUNT",
        help="degrees of expert parallelism to choose from (default: all that divide the model's experts)",
    )
    choose(
        "--expert-tensor",
        type=_expert_tensor,
        metavar="tensor|1",
        help="devices that split each expert's matrices to choose from: those of tensor, or 1, with which --expert counts "
        "tensor ranks too (default: both)",
    )
    own = ("tensor", "pipe", "data", "chunks", *CHOICES.values(), "vocab_parallel", "attention", "group_size")
    choose(
        "--search",
        default=(),
        choices=[name for name in FIELDS if name not in own],
        metavar="FIELD",
        help="further options of a layout to choose the values of: %(choices)s",
    )
    add(
        "--attention",
        default="auto",
        choices=legal["attention"],
        help="as of experiments.gpt3: auto is cudnn, tokamax or xla, as the GPU and the model allow (default: auto)",
    )
