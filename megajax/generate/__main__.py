"""The command `python -m megajax.generate`; `options.DESCRIPTION` says what it does."""

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    prompts = broadcast("generate/prompts", lambda: json.dumps(rows))
    source = open_source(options.run_dir, options.init_from, options.step, options.trust, options.ema)
    output = OutputFile(options.out) if options.out and is_first_process() else None

    def write(samples: Sequence[Any]) -> None:
        results = [
            {**row, "text": one.text, "tokens": len(one.tokens), "finish": one.finish}
            for (_, row), one in zip(rows, samples, strict=True)
        ]
        if output:
            output.write("".join(json.dumps(result, ensure_ascii=False) + "\n" for result in results))
        else:
            pairs = zip(results, samples, strict=True)
            texts = (("" if one.is_message else result["prompt"]) + result["text"] for result, one in pairs)
            print("\n\n".join(texts))

    generate(options, source, json.loads(prompts), write if is_first_process() else lambda samples: None)
    broadcast("generate/written", str)  # the others do not end before the texts are written


class Prompts:
    """Makes samples of prompts, which are texts or chats."""

    def __init__(self, options: Options, source: Any, context: int):
        """Reads the model's generation settings, and a template when the first chat comes.

        Raises:
          ConfigError: the settings cannot be read, or have one that is not implemented.
        """
        from megajax.interop.hugging_face.generation import read_generation

        self.options, self.tokenizer, self.context = options, source.tokenizer, context
        settings = read_generation(source.hugging_face, self.tokenizer.end_of_document)
        settings = settings if options.generation_config == "auto" else settings.without_draws()
        self.sampling, rules = settings.sampling(options.draws)
        self.ends = frozenset() if options.ignore_end else frozenset(settings.ends)
        self.rules = dataclasses.replace(rules, ends=()) if options.ignore_end else rules
        self.stops = options.stop or settings.stops
        self.description = settings.describe(options.draws)
        self._template: Any = None

    def sample(self, number: int, place: str, row: Mapping[str, Any]) -> Any:
        """The `Sample` of a row with "prompt", or with "messages" and perhaps "tools".

        Raises:
          ConfigError: the prompt is empty or too long, or a template is missing or refuses the chat.
        """
        from megajax.generate.prompts import read_chat
        from megajax.generate.text import Ending, Sample, check_length, encode_prompt, most_new_tokens

        chat = read_chat(place, row, self.options.apply_chat_template, self.options.system_prompt)
        if chat is None:
            tokens = encode_prompt(row["prompt"], self.tokenizer, self.context, place)
        else:
            tokens = self._encode(chat, place)
            check_length(len(tokens), self.context, place)
        new = most_new_tokens(len(tokens), self.sampling, self.rules, place)
        ending = Ending(new, self.context, self.stops, self.ends)
        return Sample(number, tokens, ending, self.tokenizer, is_message=chat is not None)

    def _encode(self, chat: Any, place: str) -> Any:
        from megajax.data.chat_template import load_template

        if self._template is None:
            self._template = load_template(self.tokenizer, self.options.chat_template)
        try:
            return self._template.prompt(chat.messages, chat.tools, **chat.variables)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None


def generate(
    options: Options,
    source: Any,
    rows: Sequence[tuple[str, Mapping[str, Any]]],
    write: Callable[[Sequence[Any]], None],
) -> None:
    """Continues the prompts of (place, row) pairs and writes the `Sample`s; or continues the lines that are typed."""
    from megajax.data.tokenizers import tokenizer_hash
    from megajax.generate.decoder import Decoder, DecodeSizes, decoding_run
    from megajax.generate.text import Speed, continue_prompts
    from megajax.runtime.exchange import require_same
    from megajax.runtime.mesh import choose_devices, make_mesh

    parallel = ParallelConfig(data=options.data, pipe=options.pipe, tensor=options.tensor)
    devices = choose_devices(options.devices, parallel.devices)
    precision = options.precision or usual_precision(devices[0].platform)
    config = decoding_run(source.run(precision), parallel)
    config.validate()
    context, tokenizer = config.model.sequence_length, source.tokenizer
    prompts = Prompts(options, source, context)
    sampling = prompts.sampling
    model = {"the model": repr(config.model), "the tokenizer's hash": tokenizer_hash(tokenizer)}
    settings = {"the generation settings": repr((sampling, prompts.rules, sorted(prompts.ends), prompts.stops))}
    require_same("generate/options", options.of_all_processes | model | settings)
    samples = [prompts.sample(number, place, row) for number, (place, row) in enumerate(rows)]
    longest = max((len(one.prompt) for one in samples), default=context - 1)
    new = max((min(one.ending.new_tokens, context - len(one.prompt)) for one in samples), default=0)
    new = new or min(sampling.new_tokens, context - 1)
    together = min(options.batch or MOST_TOGETHER, max(1, len(samples)))
    sizes = DecodeSizes(together, longest, new, options.prefill_chunk)
    mesh = make_mesh(config.parallel, devices)
    decoder = Decoder(config, mesh, sizes, sampling, logits_rules=prompts.rules, seed=options.seed)
    weights = source.load(decoder)
    seconds = decoder.compile(weights)
    tell(f"{describe(decoder)}; compiled in {seconds:.1f} s")
    if prompts.description:
        tell(prompts.description)
    if options.interactive:
        converse(decoder, weights, prompts)
        return
    speed = Speed()
    continue_prompts(decoder, weights, samples, speed)
    write(samples)
    if full := sum(one.finish == "context" for one in samples):
        tell(f"{full} of {len(samples)} texts end at the context of {context} tokens")
    tell(speed.describe())


def converse(decoder: Any, weights: Any, prompts: Prompts) -> None:
    """Continues each line of process 0's standard input by itself, or as the next turn of a chat.

    Process 0 prints the text as it grows.
    """
    from megajax.generate.text import Speed, continue_prompts
    from megajax.runtime.processes import is_first_process

    held = max(map(len, prompts.stops), default=1) - 1  # characters at the end that may be the start of a stop
    cleans = getattr(prompts.tokenizer.hugging_face, "clean_up_tokenization_spaces", False)
    show = print if is_first_process() else (lambda *words, **settings: None)
    chat = prompts.options.apply_chat_template
    turns: list[dict[str, Any]] = []
    for number, line in enumerate(prompt_lines()):
        shown, speed = 0, Speed()

        def progress(batch) -> None:
            nonlocal shown
            [one] = batch
            text = one.text
            ready = len(text) if one.finish else shown_length(text, cleans) - held
            show(text[shown:ready], end="", flush=True)  # noqa: B023
            shown = max(shown, ready)

        said = [*turns, {"role": "user", "content": line}]
        try:
            one = prompts.sample(number, "the line", {"messages": said} if chat else {"prompt": line})
        except ConfigError as error:
            tell(f"error: {error}")
            continue
        show("" if chat else line, end="", flush=True)
        continue_prompts(decoder, weights, [one], speed, progress)
        show(flush=True)
        turns = [*said, {"role": "assistant", "content": one.text}]
        tell(f"[{one.finish}; {speed.describe()}]")


def shown_length(text: str, cleans: bool) -> int:
    """Characters of a growing text that following tokens do not change.

    Args:
      text: so far; its last character may be incomplete.
      cleans: whether the tokenizer removes spaces before punctuation, so that the last word's is not certain.
    """
    complete = text.rstrip("\N{REPLACEMENT CHARACTER}")
    return max(0, complete.rfind(" ")) if cleans else len(complete)


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
