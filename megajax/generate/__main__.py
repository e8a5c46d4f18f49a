"""The command `python -m megajax.generate`; `options.DESCRIPTION` says what it does."""

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megajax.config import ConfigError, ParallelConfig
from megajax.generate.options import MOST_TOGETHER, Options, read_options
from megajax.interop.source_options import usual_precision
from megajax.schedules.errors import counted, exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the process's exit code (see `options.DESCRIPTION`)."""
    return exit_code(lambda: run(read_options(arguments)))


def run(options: Options) -> int:
    """Connects the processes, reads the prompts, and continues them."""
    from megajax.runtime.processes import run_together

    return run_together(options.launch, lambda count, watchdog: run_connected(options))


def run_connected(options: Options) -> None:
    """Reads the prompts, loads the weights, and continues the prompts; every process calls it.

    All of them have the same prompts, and read the same new tokens from their devices. So without further exchange
    each knows which texts have ended, and which prompts are next.
    """
    from megajax.generate.prompts import read_prompts
    from megajax.interop.output_file import OutputFile
    from megajax.interop.weight_source import open_source
    from megajax.runtime.exchange import broadcast
    from megajax.runtime.processes import is_first_process

    rows = [(f"--prompt {index}", {"prompt": text}) for index, text in enumerate(options.prompt, 1)]
    if options.prompts and is_first_process():
        rows = read_prompts(options.prompts)
    prompts = broadcast("generate/prompts", lambda: json.dumps([(place, row["prompt"]) for place, row in rows]))
    source = open_source(options.run_dir, options.init_from, options.step, options.trust)
    output = OutputFile(options.out) if options.out and is_first_process() else None

    def write(samples: Sequence[Any]) -> None:
        results = [
            {**row, "text": one.text, "tokens": len(one.tokens), "finish": one.finish}
            for (_, row), one in zip(rows, samples, strict=True)
        ]
        if output:
            output.write("".join(json.dumps(result, ensure_ascii=False) + "\n" for result in results))
        else:
            print("\n\n".join(result["prompt"] + result["text"] for result in results))

    generate(options, source, json.loads(prompts), write if is_first_process() else lambda samples: None)
    broadcast("generate/written", str)  # the others do not end before the texts are written


def generate(
    options: Options, source: Any, prompts: Sequence[tuple[str, str]], write: Callable[[Sequence[Any]], None]
) -> None:
    """Continues (place, prompt) pairs and writes the `Sample`s; or continues the lines that are typed."""
    from megajax.data.tokenizers import tokenizer_hash
    from megajax.generate.decoder import Decoder, DecodeSizes, decoding_run
    from megajax.generate.text import Ending, Sample, Speed, continue_prompts, encode_prompt
    from megajax.runtime.exchange import require_same
    from megajax.runtime.mesh import choose_devices, make_mesh

    parallel = ParallelConfig(data=options.data, pipe=options.pipe, tensor=options.tensor)
    devices = choose_devices(options.devices, parallel.devices)
    precision = options.precision or usual_precision(devices[0].platform)
    config = decoding_run(source.run(precision), parallel)
    config.validate()
    context, tokenizer = config.model.sequence_length, source.tokenizer
    model = {"the model": repr(config.model), "the tokenizer's hash": tokenizer_hash(tokenizer)}
    require_same("generate/options", options.of_all_processes | model)
    ending = Ending(
        options.sampling.new_tokens, context, options.stop, None if options.ignore_end else tokenizer.end_of_document
    )

    def sample(number: int, place: str, prompt: str) -> Sample:
        return Sample(number, encode_prompt(prompt, tokenizer, context, place), ending, tokenizer)

    samples = [sample(number, place, prompt) for number, (place, prompt) in enumerate(prompts)]
    longest = max((len(one.prompt) for one in samples), default=context - 1)
    new = min(options.sampling.new_tokens, context - min((len(one.prompt) for one in samples), default=1))
    together = min(options.batch or MOST_TOGETHER, max(1, len(samples)))
    sizes = DecodeSizes(together, longest, new, options.prefill_chunk)
    decoder = Decoder(config, make_mesh(config.parallel, devices), sizes, options.sampling, seed=options.seed)
    weights = source.load(decoder)
    seconds = decoder.compile(weights)
    tell(f"{describe(decoder)}; compiled in {seconds:.1f} s")
    if options.interactive:
        converse(decoder, weights, sample, options.stop)
        return
    speed = Speed()
    continue_prompts(decoder, weights, samples, speed)
    write(samples)
    if full := sum(one.finish == "context" for one in samples):
        tell(f"{full} of {len(samples)} texts end at the context of {context} tokens")
    tell(speed.describe())


def converse(decoder: Any, weights: Any, sample: Any, stops: Sequence[str]) -> None:
    """Continues each line of process 0's standard input by itself; process 0 prints the text as it grows."""
    from megajax.generate.text import Speed, continue_prompts
    from megajax.runtime.processes import is_first_process

    held = max(map(len, stops), default=1) - 1  # characters at the end that may be the start of a stop
    show = print if is_first_process() else (lambda *words, **settings: None)
    for number, line in enumerate(prompt_lines()):
        shown, speed = 0, Speed()

        def progress(batch) -> None:
            nonlocal shown
            [one] = batch
            ready = len(one.text) if one.finish else len(one.text.rstrip("\N{REPLACEMENT CHARACTER}")) - held
            show(one.text[shown:ready], end="", flush=True)  # noqa: B023
            shown = max(shown, ready)

        try:
            one = sample(number, "the line", line)
        except ConfigError as error:
            tell(f"error: {error}")
            continue
        show(line, end="", flush=True)
        continue_prompts(decoder, weights, [one], speed, progress)
        show(flush=True)
        tell(f"[{one.finish}; {speed.describe()}]")


def prompt_lines() -> Iterator[str]:
    """The lines of process 0's standard input, in every process."""
    from megajax.runtime.exchange import broadcast

    for number in itertools.count():
        line = json.loads(broadcast(f"generate/line {number}", lambda: json.dumps(read_line())))
        if not line:
            return
        yield line.rstrip("\n")


def read_line() -> str:
    """A line of standard input, "" at its end; after a prompt if it is a terminal."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return sys.stdin.readline()


def tell(text: str) -> None:
    """Prints a line on standard error, in process 0 alone."""
    from megajax.runtime.processes import is_first_process

    if is_first_process():
        print(text, file=sys.stderr)


def describe(decoder: Any) -> str:
    """Model, mesh, batch and memory in a line."""
    from megajax.checkpoint.manager import format_size

    parallel, sizes = decoder.run.parallel, decoder.sizes
    return (
        f"{decoder.run.model.name} on data {parallel.data} x pipe {parallel.pipe} x tensor {parallel.tensor}, "
        f"{decoder.run.train.precision}; {counted(sizes.samples, 'sample')} of {sizes.slots} tokens together, in "
        f"{counted(decoder.groups, 'group')}; caches take {format_size(decoder.cache_bytes())} a device"
    )


if __name__ == "__main__":
    sys.exit(main())
