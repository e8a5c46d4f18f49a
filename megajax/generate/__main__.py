"""The command `python -m megajax.generate`; `options.DESCRIPTION` says what it does."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from megajax.config import ConfigError, ParallelConfig
from megajax.generate.options import Options, read_options
from megajax.interop.source_options import usual_precision
from megajax.schedules.errors import exit_code

MOST_TOGETHER = 64  # prompts, by default


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 for a user's mistake."""
    return exit_code(lambda: run(read_options(arguments)))


def run(options: Options) -> None:
    """Reads the prompts, loads the weights, and continues the prompts."""
    from megajax.generate.prompts import OutputFile, read_prompts
    from megajax.interop.weight_source import open_source

    rows = [(f"--prompt {index}", {"prompt": text}) for index, text in enumerate(options.prompt, 1)]
    rows = read_prompts(options.prompts) if options.prompts else rows
    source = open_source(options.run_dir, options.hf, options.step)
    output = OutputFile(options.out) if options.out else None
    try:
        generate(options, source, rows, output)
    finally:
        if output:
            output.discard()


def generate(options: Options, source: Any, rows: list[tuple[str, dict[str, Any]]], output: Any) -> None:
    """Continues the rows' prompts, or those that are typed if there are none."""
    from megajax.generate.decoder import Decoder, DecodeSizes, decoding_run
    from megajax.generate.text import Ending, Sample, Speed, continue_prompts, encode_prompt
    from megajax.runtime.mesh import choose_devices, make_mesh

    parallel = ParallelConfig(data=options.data, pipe=options.pipe, tensor=options.tensor)
    devices = choose_devices(options.devices, parallel.devices)
    precision = options.precision or usual_precision(devices[0].platform)
    config = decoding_run(source.run(precision), parallel)
    config.validate()
    context, tokenizer = config.model.sequence_length, source.tokenizer
    ending = Ending(
        options.sampling.new_tokens, context, options.stop, None if options.ignore_end else tokenizer.end_of_document
    )

    def sample(number: int, place: str, prompt: str) -> Sample:
        return Sample(number, encode_prompt(prompt, tokenizer, context, place), ending, tokenizer)

    samples = [sample(number, place, row["prompt"]) for number, (place, row) in enumerate(rows)]
    longest = max((len(one.prompt) for one in samples), default=context - 1)
    new = min(options.sampling.new_tokens, context - min((len(one.prompt) for one in samples), default=1))
    together = min(options.batch or MOST_TOGETHER, max(1, len(samples)))
    sizes = DecodeSizes(together, longest, new, options.prefill_chunk)
    decoder = Decoder(config, make_mesh(config.parallel, devices), sizes, options.sampling, seed=options.seed)
    weights = source.load(decoder)
    print(f"{describe(decoder)}; compiled in {decoder.compile(weights):.1f} s", file=sys.stderr)
    if options.interactive:
        converse(decoder, weights, sample, options.stop)
        return
    speed = Speed()
    continue_prompts(decoder, weights, samples, speed)
    results = [
        {**row, "text": one.text, "tokens": len(one.tokens), "finish": one.finish}
        for (_, row), one in zip(rows, samples, strict=True)
    ]
    if output:
        output.write(results)
    else:
        print("\n\n".join(result["prompt"] + result["text"] for result in results))
    if full := sum(one.finish == "context" for one in samples):
        print(f"{full} of {len(samples)} texts end at the context of {context} tokens", file=sys.stderr)
    print(speed.describe(), file=sys.stderr)


def converse(decoder: Any, weights: Any, sample: Any, stops: Sequence[str]) -> None:
    """Continues each line of standard input by itself, and prints the text as it grows."""
    from megajax.generate.text import Speed, continue_prompts

    held = max(map(len, stops), default=1) - 1  # characters at the end that may be the start of a stop
    for number, line in enumerate(prompt_lines()):
        shown, speed = 0, Speed()

        def progress(batch) -> None:
            nonlocal shown
            [one] = batch
            ready = len(one.text) if one.finish else len(one.text.rstrip("\N{REPLACEMENT CHARACTER}")) - held
            print(one.text[shown:ready], end="", flush=True)  # noqa: B023
            shown = max(shown, ready)

        try:
            one = sample(number, "the line", line)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            continue
        print(line, end="", flush=True)
        continue_prompts(decoder, weights, [one], speed, progress)
        print(flush=True)
        print(f"[{one.finish}; {speed.describe()}]", file=sys.stderr)


def prompt_lines() -> Iterator[str]:
    """The lines of standard input, after a prompt if it is a terminal."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        yield line.rstrip("\n")


def describe(decoder: Any) -> str:
    """Model, mesh, batch and memory in a line."""
    from megajax.checkpoint.manager import format_size

    parallel, sizes = decoder.run.parallel, decoder.sizes
    return (
        f"{decoder.run.model.name} on data {parallel.data} x pipe {parallel.pipe} x tensor {parallel.tensor}, "
        f"{decoder.run.train.precision}; {sizes.samples} samples of {sizes.slots} tokens together, in {decoder.groups} "
        f"groups; caches take {format_size(decoder.cache_bytes())} a device"
    )


if __name__ == "__main__":
    sys.exit(main())
