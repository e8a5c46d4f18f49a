"""The command `python -m megajax.evaluate`; `options.DESCRIPTION` says what it does."""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megajax.config import ConfigError, ParallelConfig
from megajax.evaluate.options import Options, read_options
from megajax.interop.source_options import usual_precision
from megajax.schedules.errors import exit_code, one_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the process's exit code (see `options.DESCRIPTION`)."""
    return exit_code(lambda: run(read_options(arguments)), "stopped; a --task with --out resumes by the same command")


def run(options: Options) -> int:
    """Connects the processes, runs the task or those of lm-evaluation-harness, and writes or prints the results."""
    from megajax.runtime.processes import run_together

    return run_together(options.launch, lambda count, watchdog: run_connected(options, count))


def run_connected(options: Options, processes: int) -> None:
    """Runs the task, or those of lm-evaluation-harness; every process calls it.

    All of them read the data, and the scores from their devices; process 0 alone writes and prints.

    Raises:
      ConfigError: the processes have other options, or lm-evaluation-harness is to run in several.
    """
    from megajax.interop.weight_source import open_source
    from megajax.runtime.exchange import broadcast, require_same

    if options.harness and processes > 1:
        raise ConfigError(f"--harness runs in one process, and there are {processes}: start one, or pass --task.")
    require_same("evaluate/options", options.of_all_processes)
    source = open_source(options.run_dir, options.init_from, options.step, options.trust, options.ema)
    (run_harness if options.harness else run_task)(options, source)
    broadcast("evaluate/written", str)  # the others do not end before the results are written


def run_task(options: Options, source: Any) -> None:
    """Reads the data, loads the weights, and scores all requests."""
    from megajax.evaluate.results import PartialScores
    from megajax.evaluate.tasks import make_task
    from megajax.interop.output_file import OutputFile
    from megajax.runtime.exchange import require_same
    from megajax.runtime.processes import is_first_process

    context = source.run("fp32").model.sequence_length
    sizes = {name: getattr(options, name) for name in ("window", "stride", "last_token")}
    task = make_task(options.task, options.task_data, source.tokenizer, context, **sizes)
    scorer = open_scorer(options, source)
    settings = describe_task(options, context) | describe_model(options, source, scorer)
    compared = ("data_sha256", "model", "tokenizer_hash", "precision", "device", "megajax", "jax")
    require_same("evaluate/settings", {f"the {name.replace('_', ' ')}": str(settings[name]) for name in compared})
    output = OutputFile(options.out) if options.out and is_first_process() else None
    partial = PartialScores(output.path, settings) if output else None
    start = time.perf_counter()
    try:
        scores = score_all(scorer, source, task.requests, partial)
        seconds = time.perf_counter() - start
        if not is_first_process():
            return
        report(
            options, output, {**task.results(scores), "counts": task.counts, "settings": settings, "seconds": seconds}
        )
        if partial:
            partial.remove()
    finally:
        if partial:
            partial.close()


def run_harness(options: Options, source: Any) -> None:
    """Runs tasks of lm-evaluation-harness.

    Raises:
      ConfigError: it is not installed, or a task does not exist or cannot be loaded.
    """
    try:
        from megajax.evaluate.harness import HarnessModel
        from megajax.evaluate.harness_tasks import load_tasks, run_tasks
    except ImportError as error:
        raise ConfigError(
            f"--harness needs lm-eval ({one_line(str(error))}): run pip install 'megajax[eval]'."
        ) from None
    from megajax.interop.output_file import OutputFile

    chat = options.chat
    template = check_template(chat, source.tokenizer)
    loaded = load_tasks(options.harness, options.include_path)
    output = OutputFile(options.out) if options.out else None
    scorer = open_scorer(options, source)
    start = time.perf_counter()
    own = options.generation_config or "auto"
    model = HarnessModel(scorer, source.load(scorer), source.tokenizer, source.hugging_face, template, own)
    results, chosen = run_tasks(model, loaded, options.num_fewshot, options.limit, chat)
    settings = {"harness": options.harness, **chosen, **describe_model(options, source, scorer)}
    counts = {"truncated": model.truncated}
    seconds = time.perf_counter() - start
    report(options, output, {**results, "counts": counts, "settings": settings, "seconds": seconds})


def check_template(chat: Mapping[str, Any], tokenizer: Any) -> str | None:
    """The name of the chat template to use; None: the default, or there are no chats.

    Raises:
      ConfigError: the tokenizer has no chat template, or none of that name.
    """
    wanted = chat.get("apply_chat_template")
    if not wanted:
        return None
    own = getattr(tokenizer.hugging_face, "chat_template", None)
    if not own:
        raise ConfigError(f"tokenizer {tokenizer.name} has no chat template: omit --apply-chat-template.")
    if wanted is True:
        return None
    names = ", ".join(sorted(own)) if isinstance(own, dict) else "one without a name"
    if not isinstance(own, dict) or wanted not in own:
        raise ConfigError(
            f"tokenizer {tokenizer.name} has no chat template {wanted!r}, but {names}: pass --apply-chat-template with one "
            "of its names, or without."
        )
    return wanted


def open_scorer(options: Options, source: Any) -> Any:
    """The programs on the command line's mesh.

    Raises:
      ConfigError: there are too few devices, or the model cannot be split as the mesh requires.
    """
    from megajax.evaluate.scorer import evaluation_run, make_scorer
    from megajax.runtime.mesh import choose_devices, make_mesh

    parallel = ParallelConfig(
        data=options.data,
        context=options.context,
        pipe=options.pipe,
        tensor=options.tensor,
        zero=options.zero,
        schedule="gpipe",
    )
    devices = choose_devices(options.devices, parallel.devices)
    precision = options.precision or usual_precision(devices[0].platform)
    config = evaluation_run(source.run(precision), parallel)
    config.validate()
    return make_scorer(config, make_mesh(config.parallel, devices), options.batch)


def describe_task(options: Options, context: int) -> dict[str, Any]:
    """The task's part of the settings, of a model of `context` tokens."""
    from megajax.evaluate.tasks import window_sizes

    window, stride = window_sizes(options.window, options.stride, context)
    sizes = {"window": window, "stride": stride}
    target = {"target": "last token" if options.last_token else "last word"}
    data = pathlib.Path(options.task_data or "")
    return {
        "task": options.task,
        **(target if options.task == "lambada" else sizes),
        "data": str(data.absolute()),
        "data_sha256": hashlib.sha256(data.read_bytes()).hexdigest(),
    }


def describe_model(options: Options, source: Any, scorer: Any) -> dict[str, Any]:
    """The model's and the layout's part of the settings: with the task's, all that the scores depend on."""
    import jax

    import megajax
    from megajax.data.tokenizers import tokenizer_hash
    from megajax.interop.weight_source import files_stamp

    parallel = scorer.run.parallel
    return {
        "weights": str(source.path.absolute()),
        "weights_stamp": files_stamp(source.path),
        **({"averaged": True} if options.ema else {}),
        "model": dataclasses.asdict(scorer.run.model),
        "tokenizer": source.tokenizer.name,
        "tokenizer_hash": tokenizer_hash(source.tokenizer),
        "precision": scorer.run.train.precision,
        "attention": scorer.training.program.attention.name,
        "layout": {name: getattr(parallel, name) for name in ("data", "context", "pipe", "tensor", "zero")},
        "batch": options.batch,
        "device": scorer.training.mesh.devices.flat[0].device_kind,
        "megajax": megajax.__version__,
        "jax": jax.__version__,
    }


def score_all(scorer: Any, source: Any, requests: Sequence[Any], partial: Any) -> list[Any]:
    """The scores of all requests, in their order; on other processes than the first, None for those that were resumed.

    Args:
      scorer, source: programs and weights.
      requests: of the task.
      partial: the `PartialScores` to resume from and to append to; None: no file.
    """
    from megajax.runtime.exchange import broadcast

    batches = scorer.plan(requests)
    scores = dict(partial.done) if partial else {}
    missing = [number for number, batch in enumerate(batches) if not set(batch.numbers) <= scores.keys()]
    left = [batches[number] for number in json.loads(broadcast("evaluate/left", lambda: json.dumps(missing)))]
    if scores:
        print(f"resumed: {len(scores):,} of {len(requests):,} samples were scored before", file=sys.stderr)
    if left:
        weights = source.load(scorer)
        with progress_bar(len(requests), len(scores)) as advance:
            for batch, found in scorer.score(weights, requests, left):
                scores |= dict(zip(batch.numbers, found, strict=True))
                if partial:
                    partial.add(batch, found)
                advance(len(found))
    return [scores.get(number) for number in range(len(requests))]


@contextlib.contextmanager
def progress_bar(total: int, done: int) -> Iterator[Callable[[int], None]]:
    """A bar on process 0's standard error, if a terminal; yields a function that advances it by a number of samples."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from megajax.runtime.processes import is_first_process

    console = Console(stderr=True, quiet=not is_first_process())
    columns = (TextColumn("samples"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total, completed=done)
        yield lambda count: progress.advance(task, count)


def report(options: Options, output: Any, results: dict[str, Any]) -> None:
    """Prints the results, or writes them to the `OutputFile` of --out and prints the numbers in a line for each task."""
    from megajax.evaluate.results import describe_numbers

    text = json.dumps(results, indent=2, ensure_ascii=False)
    if not output:
        print(text)
        return
    output.write(text + "\n")
    counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in results["counts"].items())
    tasks = results["tasks"] if options.harness else {options.task: results}
    for name, of_task in tasks.items():
        print(f"{name}: {describe_numbers(of_task)} ({counts}; {results['seconds']:.1f} s)")


if __name__ == "__main__":
    sys.exit(main())
