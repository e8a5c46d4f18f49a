"""Finds the fastest layout of a model on a cluster of GPUs, and explains the choice.

python -m megajax.plan --model gpt3-175b --gpus 1024 --gpu a100-80gb --global-batch-size 1536
python -m megajax.plan --model gpt3-1t --gpus 3072 --gpu h100-80gb --global-batch-size 3072 --plot shapes.svg --out plan.toml
python -m megajax.plan --model gpt3-175b --cluster ours.toml --global-batch-size 1536 --deadline 60
python -m megajax.plan --cluster ours.toml --global-batch-size 1024 --budget 1e6
python -m megajax.plan --model gpt3-175b --compare ours.toml theirs.toml --global-batch-size 1536 --tokens 300e9
python -m megajax.plan --calibrate --cluster ours.toml
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

from megajax.config import ConfigError, RunConfig
from megajax.config.options import Parser
from megajax.config.toml import save_config, toml_text
from megajax.plan.best import DEGREES, SHAPES, Found, best_layouts
from megajax.plan.cluster import Cluster
from megajax.plan.compiled import compile_rows, compiled_table, ranked
from megajax.plan.counts import better_counts, nearest_counts
from megajax.plan.expected import expected, fields_of
from megajax.plan.explain import explain
from megajax.plan.goals import best_model, compare, gpus_for, scaling, tokens_for
from megajax.plan.html_report import page
from megajax.plan.options import clusters_of, is_directory, model_named, plan_parser, question_of
from megajax.plan.report import LEGEND, Answer, accuracy, answer, heading, plot, smallest, table
from megajax.plan.search import Candidate, NoLayout, Question
from megajax.schedules.errors import command
from megajax.schedules.paths import local_path, tell_replaced
from megajax.schedules.registry import import_user_files

# Layouts are compared by their degrees up to so many times the fastest's time.
EXPLAINED = 1.5


@command
def main(arguments: Sequence[str] | None) -> int:
    """Plans; returns 1 if nothing fits."""
    first = Parser(add_help=False)
    first.add_argument(
        "--import",
        action="append",
        type=local_path,
        default=[],
        dest="imports",
        metavar="FILE.py",
        help="a Python file or module to import first, which registers schedules or models (repeatable)",
    )
    first.add_argument(
        "--calibrate",
        action="store_true",
        help="plan nothing: measure the devices there are and write their rates to the cluster's file "
        "(--calibrate --help lists its options)",
    )
    known = first.parse_known_args(arguments)[0]
    if known.calibrate:
        from megajax.plan.calibrate import calibrate  # it alone runs something on devices

        return calibrate(arguments)
    import_user_files(known.imports)
    args = plan_parser(first, __doc__).parse_args(arguments)
    clusters = clusters_of(args)
    question = question_of(args, clusters[0])
    fields_of(args.explain or ())  # raises for a word that is none
    if args.compare:
        if args.budget or args.deadline or args.json or args.html or args.plot or args.compile:
            raise ConfigError(
                "compare prints one table: omit --budget, --deadline, --json, --html, --plot and --compile."
            )
        rows, fits = compare(dataclasses.replace(question, gpus=args.gpus or 0), clusters, args.tokens)
        print(rows)
        return 0 if fits else 1
    if args.scaling is not None:
        if args.json or args.html or args.plot or args.compile or args.explain:
            raise ConfigError("scaling prints one table: omit --json, --html, --plot, --compile and --explain.")
        rows, fits = scaling(question, clusters[0], args.tokens, args.scaling)
        print(rows)
        return 0 if fits else 1
    words = sys.argv[1:] if arguments is None else arguments
    repeated = shlex.join(["python", "-m", "megajax.plan", *words])
    return _plan(args, repeated, clusters[0], *_goal(args, question, clusters[0]))


def _goal(args: argparse.Namespace, question: Question, cluster: Cluster) -> tuple[Question, float, str]:
    """The question with the number of GPUs or the model that is asked for, the tokens, and a text that says so."""
    if args.deadline:
        best, text = gpus_for(question, args.tokens, args.deadline, question.gpus or None)
        return best.question, args.tokens, text
    if not question.gpus:
        raise ConfigError(
            "gpus is not given: pass --gpus COUNT, write gpus = COUNT in the cluster's file, or pass --deadline."
        )
    if not args.budget:
        return question, args.tokens, ""
    found, text = (tokens_for if args.model else best_model)(question, cluster, args.budget)
    return found.best.question, found.tokens, text


def _plan(
    args: argparse.Namespace, command: str, cluster: Cluster, question: Question, tokens: float, goal: str
) -> int:
    start = time.perf_counter()
    try:
        found = Answer(cluster, tokens, _search(args, question), args.top)
    except NoLayout as error:
        near = "" if error.narrowed else nearest_counts(question)
        raise (ConfigError(f"{str(error).partition(':')[0]}; {near}") if near else error) from None
    best = next(iter(found.fitting), None)
    seconds = time.perf_counter() - start
    if args.html and best:
        tell_replaced(args.html)
        text = page(found, command, datetime.date.today().isoformat())
        save_config(pathlib.Path(args.html), text, "pass --html with a writable path")
    compiled = compile_rows(found.shown[: args.compile], tell=_tell) if args.compile else []
    chosen = next((one.candidate for one in ranked(compiled) if one.fits), best)
    if args.json:
        print(json.dumps(answer(found, compiled), indent=1))
        return _write(args, chosen, quiet=True) if best else 1
    if goal:
        print(goal)
    print(heading(found, seconds))
    if not best:
        print(smallest(found.candidates))
        return 1
    print(table(found))
    print(LEGEND)
    if compiled:
        print(compiled_table(compiled))
    if better := better_counts(best):
        print(better)
    print(f"{tokens / 1e9:,.0f}B tokens take {cluster.describe(cluster.cost(question.gpus, best.days(tokens)))}")
    print(accuracy(best))
    print(explain(found.compared, found.found.slower))
    if args.explain:
        print(expected(question, best, args.explain))
    if args.html:
        print(f"page: {args.html}")
    if args.plot:
        plot(found.candidates, args.plot)
        print(f"drawn: {args.plot}")
    return _write(args, chosen)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _search(args: argparse.Namespace, question: Question) -> Found:
    """The layouts that the output needs."""
    if args.html or args.plot:
        return best_layouts(question, args.top, (*DEGREES, *SHAPES))
    return best_layouts(question, args.top, () if args.json else DEGREES, EXPLAINED)


def _write(args: argparse.Namespace, best: Candidate, quiet: bool = False) -> int:
    """Writes a layout as a configuration file; `quiet`: without a line about it."""
    command = f"python -m experiments.gpt3 --config {args.out}"
    header = (
        f"{best.run.model.name} on {best.question.gpus} {best.question.gpu.name}: predicted {best.time.total:.2f} s a step, "
        f"{best.utilisation:.1%} MFU, {best.peak / 1e9:.1f} GB a GPU.\n"
        f"{command}"
    )
    # auto stays auto, so that the file is valid on any machine
    run = dataclasses.replace(best.run.with_layout(attention=args.attention), imports=tuple(args.imports))
    text = toml_text(config_sections(run, args.model or run.model.name), header)
    _keep_older(pathlib.Path(args.out), text)
    save_config(pathlib.Path(args.out), text, "pass --out with a writable path")
    if not quiet:
        print(f"written: {args.out}   {command}")
    return 0


def _keep_older(path: pathlib.Path, text: str) -> None:
    """Renames a file that has another text to FILE.old, with a line on stderr: people edit their plans."""
    older = path.with_name(path.name + ".old")
    try:
        if path.is_file() and path.read_bytes() != text.encode():
            path.replace(older)
            print(f"note: {path} was there with another text; that is now {older}", file=sys.stderr)
    except OSError as error:
        raise ConfigError(f"cannot rename {path} to {older}: {error.strerror}; pass another --out.") from error


def config_sections(run: RunConfig, name: str) -> dict[str, dict[str, Any]]:
    """A planned run as sections of a configuration file: the model, what differs from it, and what the plan decides.

    The model is a preset, or with a directory of Hugging Face's the one that `init_from` starts from.

    The experiment's defaults apply to everything else.
    """
    model, base = dataclasses.asdict(run.model), dataclasses.asdict(model_named(name))
    directory = is_directory(name)
    return {
        "options": ({} if directory else {"model": name}) | ({"imports": run.imports} if run.imports else {}),
        "model": {field: value for field, value in model.items() if field != "name" and value != base[field]},
        "parallel": dataclasses.asdict(run.parallel),
        "train": {"global_batch_size": run.train.global_batch_size, "precision": run.train.precision}
        | ({"init_from": name} if directory else {})
        | ({} if run.train.optimizer == "adamw" else {"optimizer": run.train.optimizer})
        | ({} if run.train.ema_decay is None else {"ema_decay": run.train.ema_decay})
        | {
            name: kind
            for name in ("matmul_dtype", "expert_matmul_dtype", "expert_dispatch_dtype")
            if (kind := getattr(run.train, name))
        }
        | ({"freeze": run.train.freeze} if run.train.freeze else {}),
    }


if __name__ == "__main__":
    if "--calibrate" not in sys.argv:
        # No GPU is used; without one, the CUDA plugin prints errors when jax starts.
        jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
